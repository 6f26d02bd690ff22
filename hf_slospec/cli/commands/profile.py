"""``hf_slospec profile``: latencies of forwards on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_slospec.cli.activity import activity
from hf_slospec.cli.options import (
    ResultPath,
    check_outputs,
    console,
    usage_errors,
    with_models,
    write_results,
)
from hf_slospec.config import SLOSpecConfig
from hf_slospec.server.model_options import ModelOptions


@with_models(size="0.6B")
def profile(
    fields: dict[str, Any],
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Duration of the measurement of each model.")
    ] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Plot the measured curves to this PNG.")] = None,
    json_path: ResultPath = None,
    keep: Annotated[
        bool,
        typer.Option(
            help="Store the result, which later runs use in place of a shorter measurement."
        ),
    ] = True,
    compile: Annotated[
        bool,
        typer.Option(
            help="On a CPU, compile forwards first, about a minute; later processes load them at once."
        ),
    ] = True,
) -> None:
    """Measure the latencies of forwards on this machine, of target and draft model, and the error
    of the fit.

    Example:  hf_slospec profile --size 0.3B --seconds 20 --plot curves.png
    """
    from hf_slospec.batcher.generator import SLOSpecGenerator
    from hf_slospec.cli import benchmark, profiling
    from hf_slospec.server.loading import draft_method, load_models, size_and_place

    check_outputs(plot, json_path)
    err = Console(stderr=True, soft_wrap=True)
    loading = "loading" + (", and compiling unless that was done" if compile else "")
    with usage_errors(), activity(loading, err):
        options = ModelOptions(**fields)
        pair = load_models(options)
        method = draft_method(options, pair)
        config = SLOSpecConfig(compile="wait" if compile else False)
        speculator = SLOSpecGenerator(pair.target, drafter=method, config=config).decoder.speculator
    models = dict(zip(("target", "draft"), speculator.models, strict=False))
    total_s = seconds * len(models)
    err.print(
        f"{options.name}: {size_and_place(pair.target)}; drafts: {method.kind}", highlight=False
    )
    err.print(
        f"measuring {' and '.join(models)} for at most about {total_s:.0f} s (--seconds)",
        highlight=False,
    )
    with activity("measuring", err) as show:
        records = {}
        for name, packed in models.items():
            show(f"measuring the {name}")
            records[name] = profiling.profile(packed, seconds, keep)
    output = console()
    for name, record in records.items():
        output.print(profiling.table(name, record))
    if plot is not None:
        profiling.draw(records, plot)
        output.print(f"plotted to {plot}")
    if json_path is not None:
        facts = benchmark.provenance(
            target=options.target or f"embedded, {options.size}", drafter=method.kind, dtype=str(pair.target.dtype),
            device=str(pair.target.device), seconds=seconds,
        )  # fmt: skip
        write_results(json_path, facts, records)
