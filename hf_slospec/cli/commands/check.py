"""``hf_slospec check``: a user's model compared with stock ``generate``, as a report for an issue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_slospec import __version__
from hf_slospec.cli.budget import TimeBudget, progress_shown
from hf_slospec.cli.options import (
    MODEL,
    ConfigJSON,
    ExactName,
    config_of,
    usage_errors,
    with_models,
)
from hf_slospec.errors import IncompatibleDraftError, UnsupportedModelError
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.serving.options import ModelOptions

if TYPE_CHECKING:
    from hf_slospec.cli.model_check import Comparison, ModelCheck

MAX_SHOWN = 5  # differences of one kind of call


@with_models(MODEL[1:], dtype="auto")
def check(
    given: dict[str, Any],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help=ModelOptions.model_fields["target"].description)
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, one per line, or a list of texts in a .json file. Default: 20 texts.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Maximum new tokens of every output. Default: 64, or fewer where the model is slow."),
    ] = None,
    images: Annotated[bool, typer.Option("--images", help="Also compare prompts with pictures.")] = False,
    repeats: Annotated[int, typer.Option(min=0, help="Repeats of the measurement of speed, at most. 0: none.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Time for all of it; what it is too short for is left out.")
    ] = 100.0,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
) -> None:
    """Compare a model with stock generate: tokens, speed and K/V. The report is Markdown, to paste into an issue.

    The verdict is exact, near ties only (outputs differ where rounding decides between two tokens), WRONG, or refused
    with the reason. TARGET without a way to draft is checked with prompt lookup. The tokens are compared with a tree in
    every step, speed is measured with the default policy. At least one output of each kind of call is compared, more as
    long as there is time; the report says what was left out.

    Example:  hf_slospec check org/name --assistant org/draft --dtype float32

    Exit codes: 0 checked or refused, 1 WRONG, 2 usage error.
    """
    from hf_slospec.cli.check_prompts import image_inputs, read_prompts
    from hf_slospec.cli.model_check import REFUSED, WRONG, ModelCheck, verdict_of
    from hf_slospec.serving.loading import draft_method, load_models, size_and_place

    budget, settings, err = TimeBudget(seconds), config_of(config, exact=exact), Console(stderr=True, soft_wrap=True)
    with usage_errors(), only_errors_logged(), progress_shown(err, budget) as show:
        texts = read_prompts(prompts)
        options = ModelOptions(**given, target=target, images=images)
        show(f"checking {options.name}, for about {seconds:g} s at most (--seconds); loading")
        pair = load_models(options)
        pictures = list(image_inputs(str(target), pair.target.device)) if images else None
        facts = _facts(target or f"embedded, {options.size}", pair.target)
        show(f"{size_and_place(pair.target)}; {len(texts)} prompts")
        try:
            method = draft_method(options, pair)
            facts["drafter"] = method.kind + (f" ({named})" if (named := options.assistant or options.drafter) else "")
            model = ModelCheck(pair, method, texts, max_new_tokens, settings, budget, show, pictures)
        except (UnsupportedModelError, IncompatibleDraftError) as error:
            _print(f"{REFUSED}: {_line(error)}", facts)
            return
        comparisons = list(model.comparisons())
        verdict = verdict_of(comparisons)
        facts["new tokens"] = f"at most {model.new_tokens} of every output"
        facts |= {comparison.name: _outcome(comparison) for comparison in comparisons}
        facts["K/V"] = _memory(model)
        if repeats and verdict not in (WRONG, REFUSED):
            facts |= _speed(model.speed(repeats), repeats)
    facts["time"] = f"{budget.elapsed_s:.0f} s, with --seconds {seconds:g}"
    _print(_headline(verdict, comparisons), facts)
    if verdict == WRONG:
        raise typer.Exit(1)


def _facts(name: str, target: Any) -> dict[str, str]:
    from hf_slospec.cli import benchmark

    facts, device = benchmark.provenance(), target.device.type
    machine = f"{device}: {facts['cpu' if device == 'cpu' else 'gpu']}, {facts['isa']}, {facts['threads']} threads"
    return {
        "model": f"{name}: {type(target).__name__}, {target.num_parameters() / 1e6:.1f} M parameters",
        "dtype": str(target.dtype).removeprefix("torch."),
        "machine": machine,
        "versions": f"hf_slospec {__version__}, transformers {facts['transformers']}, "
        f"torch {facts['torch']}, Python {facts['python']}"
        + (f", commit {facts['commit']}" if facts["commit"] else ""),
    }


def _outcome(comparison: Comparison) -> str:
    from hf_slospec.cli.model_check import REFUSED

    if comparison.refused is not None:
        return f"{REFUSED}: {_line(comparison.refused)}"
    outputs, differences = comparison.outputs, comparison.differences
    parts = [f"{comparison.verdict}, {len(outputs) - len(differences)} of {len(outputs)} outputs equal"]
    parts += [str(difference) for difference in differences[:MAX_SHOWN]]
    if (more := len(differences) - MAX_SHOWN) > 0:
        parts.append(f"and {more} more")
    if comparison.left_out:
        parts.append(f"{comparison.left_out} left out for lack of time")
    return "; ".join(parts)


def _memory(model: ModelCheck) -> str:
    target, *draft = (f"{size / 1024:.1f} KiB" for size in model.kv_bytes_per_token)
    of_draft = f", of the draft {draft[0]}" if draft else ""
    maximum = f"; at most {model.kv_bytes / 2**20:.1f} MiB in the batcher" if model.kv_bytes else ""
    return f"{target} per token{of_draft}{maximum}"


def _speed(rows: list[dict[str, Any]], repeats: int) -> dict[str, str]:
    from hf_slospec.cli import benchmark

    if not rows:
        return {"speed": "left out for lack of time"}
    stock = {row["batch"]: row["tokens_per_s"] for row in rows if row["name"] == benchmark.PLAIN}
    lines = {}
    for row in rows:
        if row["name"] == benchmark.OURS:
            ratios, length = row["speedup_per_repeat"], row["acceptance_length"]
            lines[f"speed, batch {row['batch']}"] = (
                f"{row['speedup_vs_generate']:.2f}x stock ({min(ratios):.2f} to {max(ratios):.2f}, "
                f"median of {len(ratios)}{', fewer for lack of time' if len(ratios) < repeats else ''}); "
                f"{row['tokens_per_s']:.1f} and {stock[row['batch']]:.1f} tokens/s"
                + (f"; {length:.2f} tokens per step" if length else "")
            )
    return lines


def _headline(verdict: str, comparisons: Sequence[Comparison]) -> str:
    """Return the verdict, with the first wrong output or the first reason."""
    from hf_slospec.cli.model_check import REFUSED, WRONG

    first = next(comparison for comparison in comparisons if comparison.verdict == verdict)
    if verdict == WRONG:
        difference = next(difference for difference in first.differences if difference.is_near_tie is False)
        return f"{WRONG}: {first.name}, {difference}"
    return f"{verdict}: {_line(first.refused)}" if verdict == REFUSED else verdict


def _line(text: object) -> str:
    """Return a text on one line."""
    return " ".join(str(text).split())


def _print(verdict: str, facts: dict[str, str]) -> None:
    """Print the report; not by rich, which would wrap it."""
    rows = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    print("\n".join([f"### hf_slospec check: {verdict}", "", "| | |", "| --- | --- |", *rows]))
