"""``hf_slospec bench``: speed against stock ``generate``, assisted generation and prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

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
from hf_slospec.engine.chrome_trace import write_chrome_trace
from hf_slospec.errors import InvalidInputError
from hf_slospec.serving.options import ModelOptions


@with_models(size="0.6B")
def bench(
    given: dict[str, Any],
    batch: Annotated[list[int], typer.Option(help="Batch sizes; repeatable.")] = [1, 8],  # noqa: B006  read only
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are truncated to this many tokens.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of every row.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method, each with other prompts.")] = 5,
    tune: Annotated[
        bool, typer.Option(help="Also run assisted generation with 1 to 8 constant assistant tokens.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampled text. 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Top-p of sampled text.")] = 1.0,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
    trace: Annotated[
        Path | None, typer.Option(help="Write the steps of hf_slospec's last run as a Chrome trace to this file.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the draft's probabilities for `simulate --recording` to this file.")
    ] = None,
    json_path: ResultPath = None,
) -> None:
    """Compare hf_slospec with stock generate, assisted generation and prompt lookup on this machine.

    All methods take turns in one process; speed-ups are medians of the ratios within a repeat.

    Example:  hf_slospec bench --size 0.3B --batch 1 --batch 4 --json result.json
    """
    from hf_slospec.cli import benchmark
    from hf_slospec.lab.texts import Recording
    from hf_slospec.serving.loading import draft_method, load_models, size_and_place
    from hf_slospec.tiny.embedded import tiny_prompts

    check_outputs(None, trace, record, json_path)
    settings = config_of(config, exact=exact)
    if top_p < 1.0 and not temperature:
        raise typer.BadParameter("--top-p has no effect without --temperature")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else None
    with usage_errors():
        options = ModelOptions(**given)
        if record is not None and options.target is not None and options.assistant is None:
            raise InvalidInputError("--record has no draft model whose probabilities to write; give --assistant")
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
        sampling=sampling, config=settings.model_dump(),
    )  # fmt: skip
    runner = benchmark.Bench(
        *models, tiny_prompts(), prompt_tokens, new_tokens, settings,
        times_forwards=models.target.device.type == "cpu", sampling=sampling, method=method,
    )  # fmt: skip
    methods = runner.methods(sorted(set(batch)), list(range(1, 9)) if tune else [])
    samples = runner.run(methods, repeats)
    rows = benchmark.summarize(samples, new_tokens)
    console().print(_table(rows, facts))
    if trace is not None:
        write_chrome_trace(samples[benchmark.OURS, max(batch)][-1].steps, trace)
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        Recording(provenance=facts, texts=runner.record(samples)).write(record)
    if json_path is not None:
        write_results(json_path, facts, rows)


def _table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """Return the results as a table within 80 columns."""
    from hf_slospec.cli.benchmark import OURS

    title = f"Speed against stock generate at the same batch size, medians over repeats, {facts['dtype']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    table.caption = "host: time outside of forwards, drafting and verifying; equal: rows with the tokens of generate"
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("speed-up", "tokens/s", "ms/token", "host", "tok/step", "equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if row["name"] == OURS else None
        length, host = row["acceptance_length"], row["host_share"]
        table.add_row(
            str(row["batch"]), row["name"], f"{row['speedup_vs_generate']:.2f}x", f"{row['tokens_per_s']:.1f}",
            f"{row['ms_per_token_and_row']:.1f}", "" if host is None else f"{host:.1%}",
            f"{length:.2f}" if length else "", row["rows_equal_to_generate"], style=style,
        )  # fmt: skip
    return table
