"""``hf_slospec bench``: speed against stock ``generate``, assisted generation and prompt lookup."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from hf_slospec.cli.activity import activity
from hf_slospec.cli.options import (
    ConfigJSON,
    ExactName,
    ResultPath,
    check_outputs,
    config_of,
    console,
    usage_errors,
    with_models,
    write_results,
)
from hf_slospec.server.model_options import ModelOptions


@with_models(size="0.6B")
def bench(
    fields: dict[str, Any],
    batch: Annotated[list[int], typer.Option(min=1, help="Batch sizes; repeatable.")] = [1, 8],  # noqa: B006  read only
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompts are truncated to this many tokens.")
    ] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of every row.")] = 96,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each method, each with other prompts.")
    ] = 5,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
    json_path: ResultPath = None,
) -> None:
    """Compare hf_slospec with stock generate, assisted generation and prompt lookup on this
    machine.

    All methods take turns in one process, after a warm-up and while no compiler of this package
    runs; speed-ups are medians of the ratios within a repeat. The gain is shown as two factors:
    faster steps (hf_slospec without drafts against stock) and drafts.

    Example:  hf_slospec bench --size 0.3B --batch 1 --batch 4 --json result.json
    """
    from hf_slospec.cli import benchmark
    from hf_slospec.cli.gain import gain_of
    from hf_slospec.server.loading import draft_method, load_models, size_and_place
    from hf_slospec.tiny.embedded import tiny_prompts

    check_outputs(None, json_path)
    settings = config_of(config, exact=exact)
    with usage_errors(), activity("loading"):
        options = ModelOptions(**fields)
        models = load_models(options)
        method = draft_method(options, models)
        where = size_and_place(models.target)
    typer.echo(f"{options.name}: {where}; drafts: {method.kind}", err=True)
    facts = benchmark.provenance(
        target=options.target or f"embedded, {options.size}",
        assistant="embedded" if options.target is None else options.assistant,
        drafter=method.kind, dtype=str(models.target.dtype), device=str(models.target.device),
        parameters=[model.num_parameters() for model in models[:2] if model is not None], prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, repeats=repeats,
        config=settings.model_dump(),
    )  # fmt: skip
    runner = benchmark.Bench(
        *models, tiny_prompts(), prompt_tokens, new_tokens, settings, method=method
    )
    batches = sorted(set(batch))
    with activity("compiling, unless an earlier run did") as show:
        samples = runner.run(runner.methods(batches), repeats, show)
    gains = [gain_of(runner, samples, size) for size in batches]
    rows = benchmark.summarize(samples, new_tokens)
    for row, gain in zip(
        (row for row in rows if row["name"] == benchmark.OURS), gains, strict=True
    ):
        row["gain"] = gain.record()
    output = console()
    output.print(_table(rows, facts))
    for gain in gains:
        output.print(str(gain), highlight=False)
    if json_path is not None:
        write_results(json_path, facts, rows)


def _table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """Return the results as a table within 80 columns."""
    from hf_slospec.cli.benchmark import OURS

    title = f"Speed against stock generate at the same batch size, medians over repeats, {facts['dtype']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    table.caption = "equal: rows with the tokens of generate"
    for heading in ("batch", "method", "speed-up", "tokens/s", "ms/token", "tok/step", "equal"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        length = row["acceptance_length"]
        table.add_row(
            str(row["batch"]), row["name"], f"{row['speedup_vs_generate']:.2f}x", f"{row['tokens_per_s']:.1f}",
            f"{row['ms_per_token_and_row']:.1f}", f"{length:.2f}" if length else "", row["rows_equal_to_generate"],
            style="bold" if row["name"] == OURS else None,
        )  # fmt: skip
    return table
