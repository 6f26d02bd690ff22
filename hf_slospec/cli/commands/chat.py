"""``hf_slospec chat``: a conversation with a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hf_slospec.cli.activity import can_update
from hf_slospec.cli.commands.generate import INTERRUPTED, sampling_of, started, summary
from hf_slospec.cli.options import ConfigJSON, ExactName, config_of, usage_errors, with_models
from hf_slospec.errors import InvalidInputError, SLOSpecError
from hf_slospec.request.slo import LEAST_SLO_S, parse_slo
from hf_slospec.server.model_options import logged_afterwards

if TYPE_CHECKING:
    from hf_slospec.batcher.generator import SLOSpecGenerator
    from hf_slospec.batcher.handle import RequestHandle

HELP = """\
/slo 0.05     TPOT SLO of the next answers, in seconds per token; /slo none: no SLO
/policy none  policy of the next answers: auto, adaserve, fixed, none
              /slo and /policy alone show what is set
/clear        forget the conversation
/help         this list
/quit         leave, as Ctrl-D does; Ctrl-C stops an answer"""
UPDATES_PER_S = 8  # how often the status line is updated per second


@with_models()
def chat(
    fields: dict[str, Any],
    slo_tpot: Annotated[
        float | None,
        typer.Option(min=LEAST_SLO_S, help="TPOT SLO in seconds per token. Default: none."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of an answer.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most probable token.")
    ] = 0.0,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
) -> None:
    """Run a chat with a model in the terminal, with the speed of each answer below it.

    Lines that begin with / are commands; /help lists them. Without a terminal, every line of
    standard input is a message; answers go to standard output, figures to standard error.

    Example:  hf_slospec chat --target org/name --slo-tpot 0.05

    With a draft model:  hf_slospec chat --target org/name --assistant org/draft
    """
    settings = config_of(config, exact=exact)
    err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    options = {"max_new_tokens": max_new_tokens, **sampling_of(temperature)}
    try:
        with usage_errors():
            parse_slo(slo_tpot)
            with started(fields, settings, err) as generator:
                conversation = Conversation(generator, options, system)
                conversation.slo_tpot = slo_tpot
                if not conversation.has_template:
                    err.print(
                        "the tokenizer has no chat template: the model continues your text",
                        style="yellow",
                    )
                _run(conversation, err)
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error


class Conversation:
    """A conversation: its messages, and the options of the next answer.

    Args:
        generator: a generator whose batcher runs.
        options: further arguments of ``submit``.
        system: the system message; None: there is none.
    """

    def __init__(
        self, generator: SLOSpecGenerator, options: dict[str, Any], system: str | None = None
    ):
        self.generator = generator
        self.has_template = getattr(generator.tokenizer, "chat_template", None) is not None
        if system is not None and not self.has_template:
            raise InvalidInputError("--system needs a chat template, which the tokenizer lacks")
        self._options = options
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.slo_tpot: float | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self.messages = list(self._beginning)
        self._earlier: RequestHandle | None = None  # without a chat template: the last request

    def ask(self, text: str) -> RequestHandle:
        """Submit a message, and return the request that answers it.

        K/V of the conversation so far is reused: by the tokens that both prompts begin with or,
        without a chat template, by continuing the last request.
        """
        options = {**self._options, "slo_tpot": self.slo_tpot}
        if self.has_template:
            prompt = [*self.messages, {"role": "user", "content": text}]
            return self.generator.submit(prompt, **options)
        prefix = "" if self._earlier is None else "\n"
        return self.generator.submit(f"{prefix}{text}", continues=self._earlier, **options)

    def add(self, text: str, answer: str, handle: RequestHandle) -> None:
        """Add a message and its answer, which may have been stopped, to the conversation."""
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]
        self._earlier = handle

    def command(self, line: str) -> str | None:
        """Run a command; return what to print, or None to leave.

        Raises:
            InvalidInputError: there is no such command, or its argument is wrong.
        """
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/help":
            return HELP
        if name == "/clear":
            self.clear()
            return "the conversation is empty"
        if name == "/policy":
            if argument:
                self.generator.set_policy(argument)
            decoder = self.generator.decoder
            return f"policy: {(decoder.batcher_config or decoder.config).policy}"
        if name == "/slo":
            try:
                seconds = self.slo_tpot
                if argument:
                    seconds = None if argument == "none" else float(argument)
                    parse_slo(seconds)
            except ValueError as error:
                raise InvalidInputError(
                    f"/slo takes seconds per token, such as 0.05, or none; got {argument}"
                ) from error
            self.slo_tpot = seconds
            return "SLO: " + ("none" if seconds is None else f"{1e3 * seconds:g} ms")
        raise InvalidInputError(f"{line} is no command; these are:\n{HELP}")


def _run(conversation: Conversation, err: Console) -> None:
    """Handle the lines of standard input until it ends, or until /quit."""
    for line in _lines(err):
        if not line.strip():
            continue
        try:
            if not line.startswith("/"):
                _answer(conversation, line, err)
            elif (said := conversation.command(line)) is not None:
                err.print(said, style="dim")
            else:
                return
        except SLOSpecError as error:
            err.print(str(error), style="red")


def _lines(err: Console) -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lets input() edit the line
    err.print("/help lists the commands, Ctrl-D leaves", style="dim")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            err.print("\nCtrl-D or /quit leaves", style="dim")


def _answer(conversation: Conversation, text: str, err: Console) -> None:
    """Print the answer to a message as it is written, and its figures."""
    with logged_afterwards():  # logs follow the text
        handle = conversation.ask(text)
        pieces: list[str] = []
        try:
            with _view(partial(_figures, conversation, handle)) as show:
                for piece in handle:
                    pieces.append(str(piece))
                    show(str(piece))
        except KeyboardInterrupt:
            handle.cancel()
            with contextlib.suppress(SLOSpecError):
                handle.result()
            err.print("stopped", style="dim")
        conversation.add(text, "".join(pieces), handle)
    err.print(_figures(conversation, handle), style="dim")


def _figures(conversation: Conversation, handle: RequestHandle) -> str:
    """Return the figures of an answer, which may still be written."""
    metrics = handle.metrics
    forwards = conversation.generator.decoder.speculator.forwards["target"]
    parts = [summary(metrics, forwards)]
    if metrics.drafted:
        parts.append(f"{metrics.accepted / metrics.drafted:.0%} of them accepted")
    if metrics.reused:
        parts.append(f"{metrics.reused} prompt tokens from cached K/V")
    return ", ".join(parts)


@contextlib.contextmanager
def _view(figures: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints pieces of an answer; in a terminal, its figures are in a status
    line below the text.
    """
    output = Console(highlight=False, markup=False)
    if not can_update(output):
        try:
            yield lambda piece: print(piece, end="", flush=True)
        finally:
            print(flush=True)
        return
    last_line = ""

    def region() -> Group:
        status = Text(figures(), "reverse dim", no_wrap=True, overflow="ellipsis")
        return Group(Text(last_line), status)

    with Live(
        get_renderable=region, console=output, refresh_per_second=UPDATES_PER_S, transient=True
    ):

        def show(piece: str) -> None:
            nonlocal last_line
            *complete, last_line = (last_line + piece).split("\n")
            for line in complete:
                output.print(line, soft_wrap=True)

        try:
            yield show
        finally:
            output.print(last_line, soft_wrap=True)
            last_line = ""
