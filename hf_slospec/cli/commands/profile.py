"""``hf_slospec profile``: what forwards cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_slospec.cli import benchmark, profiling
from hf_slospec.cli.options import (
    Assistant,
    Device,
    DType,
    ResultPath,
    Size,
    TargetModel,
    pair_of,
    write_results,
)


def profile(
    target: TargetModel = None,
    assistant: Assistant = None,
    size: Size = "0.6B",
    dtype: DType = "bfloat16",
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(min=1.0, help="Time to measure each model for.")] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the measured curves into this PNG.")] = None,
    json_path: ResultPath = None,
    keep: Annotated[bool, typer.Option(help="Use the result from now on, in place of a shorter measurement.")] = True,
) -> None:
    """Measure what forwards of both models cost on this machine, and how well the fit predicts other sizes.

    Example:  hf_slospec profile --size 0.3B --seconds 20 --plot curves.png
    """
    models = dict(zip(("target", "draft"), pair_of(target, assistant, size, dtype, device)[:2], strict=True))
    records = {name: profiling.profile(name, model, seconds, keep) for name, model in models.items()}
    console = Console()
    for name, record in records.items():
        console.print(profiling.table(name, record))
    if plot is not None:
        profiling.draw(records, plot)
        console.print(f"drawn to {plot}")
    if json_path is not None:
        facts = benchmark.provenance(target=target or f"embedded, {size}", assistant=assistant or "embedded",
                                     dtype=dtype, device=device, seconds=seconds)  # fmt: skip
        write_results(json_path, facts, records)
