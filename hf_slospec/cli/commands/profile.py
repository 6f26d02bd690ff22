"""``hf_slospec profile``: latencies of forwards on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_slospec.cli import benchmark, profiling
from hf_slospec.cli.options import (
    AllowMissing,
    Assistant,
    Device,
    DType,
    ResultPath,
    Size,
    TargetModel,
    check_outputs,
    console,
    usage_errors,
    write_results,
)
from hf_slospec.serving.loading import ModelOptions


def profile(
    target: TargetModel = None,
    assistant: Assistant = None,
    size: Size = "0.6B",
    dtype: DType = "fast",
    device: Device = "cpu",
    allow_missing: AllowMissing = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration of the measurement of each model.")] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Plot the measured curves to this PNG.")] = None,
    json_path: ResultPath = None,
    keep: Annotated[
        bool, typer.Option(help="Store the result, which later runs use in place of a shorter measurement.")
    ] = True,
) -> None:
    """Measure the latencies of both models' forwards on this machine, and the error of the fit at other sizes.

    Example:  hf_slospec profile --size 0.3B --seconds 20 --plot curves.png
    """
    check_outputs(plot, json_path)
    with usage_errors():
        pair = ModelOptions(
            target, assistant, size=size, dtype=dtype, device=device, allow_missing=allow_missing
        ).load()
    models = {"target": pair.target, "draft": pair.draft}
    records = {name: profiling.profile(name, model, seconds, keep) for name, model in models.items()}
    output = console()
    for name, record in records.items():
        output.print(profiling.table(name, record))
    if plot is not None:
        profiling.draw(records, plot)
        output.print(f"plotted to {plot}")
    if json_path is not None:
        facts = benchmark.provenance(target=target or f"embedded, {size}", assistant=assistant or "embedded",
                                     dtype=str(models["target"].dtype), device=device, seconds=seconds)  # fmt: skip
        write_results(json_path, facts, records)
