"""``hf_slospec generate``: one streamed text."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_slospec.cli.activity import activity
from hf_slospec.cli.options import (
    ConfigJSON,
    ExactName,
    check_outputs,
    config_of,
    usage_errors,
    with_models,
)
from hf_slospec.request.slo import LEAST_SLO_S
from hf_slospec.server.model_options import ModelOptions, logged_afterwards

if TYPE_CHECKING:
    from hf_slospec.batcher.generator import SLOSpecGenerator
    from hf_slospec.batcher.handle import RequestHandle, RequestResult
    from hf_slospec.config import SLOSpecConfig
    from hf_slospec.request.metrics import RequestMetrics

# exit codes; 1 is an error, 2 a usage error
MISSED = 3
INTERRUPTED = 130
# Default prompt for the embedded target, whose continuation is readable code.
EMBEDDED_PROMPT = "def copy_file(src, dst):"


@with_models()
def generate(
    fields: dict[str, Any],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt. '-', or no prompt in a pipe: standard input. Default, for the "
            "embedded target in a terminal: the beginning of a function."
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option(min=LEAST_SLO_S, help="TPOT SLO in seconds per token. Default: none."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most probable token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the most probable tokens with this total probability.",
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many most probable tokens; 0: from all.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of sampling. Default: random.")
    ] = None,
    stop: Annotated[list[str], typer.Option(help="Stop string; repeatable.")] = [],  # noqa: B006  read only
    chat: Annotated[
        bool, typer.Option(help="Apply the tokenizer's chat template to the prompt.")
    ] = False,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write text and metrics to this file; '-': to standard output, instead of the text.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help=f"Exit with {MISSED} if the SLO was missed.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Then decode the prompt by stock generate, by hf_slospec without drafts and with "
            "them, in turns, and show the gain as two factors: faster steps, and drafts.",
        ),
    ] = False,
) -> None:
    """Continue a prompt under a TPOT SLO and report the speed.

    The text is streamed to standard output, the figures go to standard error.

    Example:  hf_slospec generate "def copy_file(src, dst):" --slo-tpot 0.02 --compare

    From a pipe, sampled, for a script:
    cat main.py | hf_slospec generate --temperature 0.7 --seed 1 --json - | jq .metrics.tpot_s

    Exit codes: 0 finished, 1 failed, 2 usage error, 3 SLO missed (with --strict), 130 interrupted.
    """
    from hf_slospec.cli.benchmark import Bench
    from hf_slospec.cli.gain import measure_gain

    check_outputs(None, None if json_path in (None, "-") else Path(str(json_path)))
    if prompt is None and file is None and fields["target"] is None and sys.stdin.isatty():
        prompt = EMBEDDED_PROMPT
        print(prompt, end="", flush=True)
    text = _prompt(prompt, file)
    settings = config_of(config, exact=exact)
    sampling = sampling_of(temperature, top_p, top_k)
    arguments: dict[str, Any] = dict(
        slo_tpot=slo_tpot,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_strings=stop or None,
        **sampling,
    )
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        with usage_errors():
            generator = started(fields, settings, console)
            with generator, logged_afterwards():  # logs follow the text
                handle = generator.submit(
                    [{"role": "user", "content": text}] if chat else text, **arguments
                )
                for piece in handle:
                    if json_path != "-":
                        print(piece, end="", flush=True)
                if json_path != "-":
                    print(flush=True)
                result = handle.result()
        forwards = generator.decoder.speculator.forwards["target"]
        console.print(summary(result.metrics, forwards), style="dim")
        if compare:
            tokenizer: Any = generator.tokenizer
            if chat:
                messages = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            with activity("compiling, unless an earlier run did", console) as show:
                bench = Bench(
                    generator.model, None, tokenizer, [text], len(handle.request.tokens),
                    max(len(result.token_ids), 2), settings, sampling or None,
                    generator.draft_method, add_special_tokens=not chat,
                )  # fmt: skip
                gain = measure_gain(bench, 1, show=show)
            console.print(str(gain))
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    if json_path is not None:
        _write(json_path, record(text, result, handle))
    if strict and result.metrics.attained is False:
        raise typer.Exit(MISSED)


def started(fields: dict[str, Any], config: SLOSpecConfig, err: Console) -> SLOSpecGenerator:
    """Load the models, start a generator, and print what they are."""
    from hf_slospec.server.loading import load_generator, size_and_place

    with activity("loading, and measuring the speed of the models", err):
        generator = load_generator(ModelOptions(**fields), config).start()
    kind = generator.draft_method.kind
    err.print(f"{size_and_place(generator.model)}; drafts: {kind}", style="dim")
    return generator


def sampling_of(temperature: float, top_p: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    """Return arguments of ``submit`` that sample with a temperature; 0: none."""
    if not temperature:
        return {}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt not in (None, "-") and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--file: {error}") from error
    elif prompt in (None, "-"):
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or a prompt by standard input")
        text = sys.stdin.read()
    else:
        text = str(prompt)
    if not text:
        raise typer.BadParameter("the prompt is empty; give at least one character")
    return text


def summary(metrics: RequestMetrics, forwards: str = "") -> str:
    """Return the figures of a request in one line.

    Args:
        metrics: of the request.
        forwards: state of the target's forwards, as in ``Speculator.forwards``.
    """
    parts = [f"{metrics.tokens} token{'' if metrics.tokens == 1 else 's'}"]
    if metrics.tpot_s:
        parts.append(f"{1e3 * metrics.tpot_s:.1f} ms per token ({1 / metrics.tpot_s:.1f} tokens/s)")
    if metrics.tpot_slo_s is not None:
        parts.append(
            f"SLO of {1e3 * metrics.tpot_slo_s:g} ms {'met' if metrics.attained else 'missed'}"
        )
    if metrics.ttft_s is not None:
        parts.append(f"first token after {1e3 * metrics.ttft_s:.0f} ms")
    if metrics.acceptance_length:
        drafted = metrics.drafted / metrics.steps
        parts.append(
            f"{metrics.acceptance_length:.2f} tokens per step, "
            + (f"{drafted:.1f} nodes drafted per step" if drafted else "nothing drafted")
        )
    if forwards == "eager: compiling":
        parts.append("slowed by a compiler, which runs once per machine and model")
    return ", ".join(parts)


def record(prompt: str, result: RequestResult, handle: RequestHandle) -> dict[str, Any]:
    """Return the content of ``--json``."""
    metrics = dataclasses.asdict(result.metrics) | {
        "acceptance_length": result.metrics.acceptance_length
    }
    return {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "from_draft": handle.from_draft,
        "finish_reason": result.finish_reason,
        "seed": handle.seed,
        "metrics": metrics,
    }


def _write(path: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        print(text, end="")
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
