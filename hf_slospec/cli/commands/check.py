"""``hf_slospec check``: a user's model compared with stock ``generate``, as a report for an issue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_slospec import __version__
from hf_slospec.cli.options import (
    MODEL,
    ConfigJSON,
    ExactName,
    TimeBudget,
    config_of,
    usage_errors,
    with_models,
)
from hf_slospec.errors import IncompatibleDraftError, UnsupportedModelError
from hf_slospec.server.model_options import ModelOptions, only_errors_logged


@with_models(MODEL[1:], dtype="auto")
def check(
    fields: dict[str, Any],
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help=ModelOptions.model_fields["target"].description),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, one per line, or a list of texts in a .json file. Default: 20 texts."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum new tokens of every output.")
    ] = 32,
    images: Annotated[
        bool, typer.Option("--images", help="Also compare prompts with pictures.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=1.0, help="Time for all of it; what it is too short for is left out."),
    ] = 100.0,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
) -> None:
    """Compare a model with stock generate: tokens and K/V. The report is Markdown, to paste into an
    issue.

    The verdict is exact, near ties only (outputs differ where rounding decides between two tokens),
    WRONG, or refused with the reason. TARGET without a way to draft is checked with prompt lookup.
    A tree is drafted in every step. At least one output of each kind of call is compared, more as
    long as there is time; the report says what was left out. `bench` measures the speed.

    Example:  hf_slospec check org/name --assistant org/draft --dtype float32

    Exit codes: 0 checked or refused, 1 WRONG, 2 usage error.
    """
    from hf_slospec.cli.benchmark import provenance
    from hf_slospec.cli.check_prompts import image_inputs, read_prompts
    from hf_slospec.cli.model_check import REFUSED, WRONG, ModelCheck, headline
    from hf_slospec.model.machine import weight_formats
    from hf_slospec.server.loading import draft_method, load_models, size_and_place

    settings = config_of(config, exact=exact)
    budget = TimeBudget(seconds, Console(stderr=True, soft_wrap=True))
    with usage_errors(), only_errors_logged():
        texts = read_prompts(prompts)
        options = ModelOptions(**fields, target=target, images=images)
        budget.show(
            f"checking {options.name}, for about {seconds:g} s at most (--seconds); loading"
        )
        pair = load_models(options)
        pictures = list(image_inputs(str(target), pair.target.device)) if images else ()
        size = f"{pair.target.num_parameters() / 1e6:.1f} M parameters"
        facts = {
            "model": f"{target or f'embedded, {options.size}'}: {type(pair.target).__name__}, {size}",
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "device": str(pair.target.device),
            **{
                name: str(value)
                for name, value in provenance(hf_slospec=__version__).items()
                if value
            },
        }
        budget.show(f"{size_and_place(pair.target)}; {len(texts)} prompts")
        try:
            method = draft_method(options, pair)
            facts["drafter"] = method.kind + (
                f" ({named})" if (named := options.assistant or options.drafter) else ""
            )
            model = ModelCheck(pair, method, texts, max_new_tokens, settings, budget, pictures)
        except (UnsupportedModelError, IncompatibleDraftError) as error:
            _print(f"{REFUSED}: {' '.join(str(error).split())}", facts)
            return
        comparisons = list(model.comparisons())
        verdict = headline(comparisons)
        facts["new tokens"] = f"at most {max_new_tokens} of every output"
        facts |= {comparison.name: str(comparison) for comparison in comparisons}
        models = model.generator.decoder.speculator.models
        sizes = (f"{each.kv_bytes_per_token / 1024:.1f} KiB" for each in models)
        facts["weights"] = weight_formats(pair.target)
        facts["forwards"] = model.generator.stats().forwards["target"]
        facts["K/V per token"] = ", of the draft ".join(sizes)
    facts["time"] = f"{budget.elapsed_s:.0f} s, with --seconds {seconds:g}"
    _print(verdict, facts)
    if verdict.startswith(WRONG):
        raise typer.Exit(1)


def _print(verdict: str, facts: dict[str, str]) -> None:
    """Print the report; not by rich, which would wrap it."""
    rows = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    print("\n".join([f"### hf_slospec check: {verdict}", "", "| | |", "| --- | --- |", *rows]))
