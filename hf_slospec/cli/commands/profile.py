"""``hf_slospec profile``: latencies of forwards on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_slospec.cli.budget import TimeBudget, progress_shown
from hf_slospec.cli.options import (
    AllowMissing,
    Assistant,
    Device,
    Drafter,
    DType,
    ResultPath,
    Size,
    TargetModel,
    check_outputs,
    console,
    usage_errors,
    write_results,
)


def profile(
    target: TargetModel = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    size: Size = "0.6B",
    dtype: DType = "fast",
    device: Device = "auto",
    allow_missing: AllowMissing = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration of the measurement of each model.")] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Plot the measured curves to this PNG.")] = None,
    json_path: ResultPath = None,
    keep: Annotated[
        bool, typer.Option(help="Store the result, which later runs use in place of a shorter measurement.")
    ] = True,
) -> None:
    """Measure the latencies of forwards on this machine, of target and draft model, and the error of the fit.

    Example:  hf_slospec profile --size 0.3B --seconds 20 --plot curves.png
    """
    from hf_slospec.cli import benchmark, profiling
    from hf_slospec.serving.generator import SLOSpecGenerator
    from hf_slospec.serving.loading import ModelOptions, size_and_place

    check_outputs(plot, json_path)
    err = Console(stderr=True, soft_wrap=True)
    with usage_errors():
        options = ModelOptions(target, assistant, drafter, size, dtype, device, allow_missing=allow_missing)
        with err.status("loading"):
            pair = options.load()
            method = options.method(pair)
            speculator = SLOSpecGenerator(pair.target, drafter=method).decoder.speculator
    models = dict(zip(("target", "draft"), speculator.models, strict=False))
    total_s = seconds * len(models)
    err.print(f"{options.name}: {size_and_place(pair.target)}; drafts: {method.kind}", highlight=False)
    err.print(f"measuring {' and '.join(models)} for at most about {total_s:.0f} s (--seconds)", highlight=False)
    with progress_shown(err, TimeBudget(total_s)) as show:
        records = {name: profiling.profile(name, packed, seconds, keep, show) for name, packed in models.items()}
    output = console()
    for name, record in records.items():
        output.print(profiling.table(name, record))
    if plot is not None:
        profiling.draw(records, plot)
        output.print(f"plotted to {plot}")
    if json_path is not None:
        facts = benchmark.provenance(
            target=target or f"embedded, {size}", drafter=method.kind, dtype=str(pair.target.dtype),
            device=str(pair.target.device), seconds=seconds,
        )  # fmt: skip
        write_results(json_path, facts, records)
