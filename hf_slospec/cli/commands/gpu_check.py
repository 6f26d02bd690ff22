"""``hf_slospec gpu-check``: whether this GPU decodes rightly, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hf_slospec.cli import benchmark
from hf_slospec.cli import gpu_check as checking
from hf_slospec.cli.options import write_results
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.tiny.load import SIZES


def gpu_check(
    shapes: Annotated[str, typer.Option(help=f"Targets to bench, by comma: {', '.join(SIZES)}.")] = "1B,8B",
    batches: Annotated[str, typer.Option(help="Batch sizes, by comma.")] = "1,4,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are cut to this many tokens.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=4, help="Tokens every row writes.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times each contestant runs, as far as the time allows.")] = 5,
    budget_s: Annotated[float, typer.Option(min=1.0, help="Seconds for all of it; the rest is skipped.")] = 480.0,
    skip_tests: Annotated[bool, typer.Option("--skip-tests", help="Do not run the tests marked gpu.")] = False,
    json_path: Annotated[Path, typer.Option("--json", help="Where results with provenance go, phase by phase.")] = Path(
        "gpu-check.json"
    ),
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",  # cpu tries out the check itself, on small shapes
    identity_shape: Annotated[str, typer.Option(hidden=True)] = "0.1B",
) -> None:
    """Check one GPU in eight minutes: tests, identity with stock generate, speed, and distance from the memory floor.

    Nothing is downloaded: targets are the embedded one inflated on the device. Exit code 1: something is wrong;
    2: there is no CUDA device.

    Example:  hf_slospec gpu-check --json result.json
    """
    sizes = tuple(dict.fromkeys(shapes.replace(" ", "").split(",")))
    if unknown := {*sizes, identity_shape} - set(SIZES):
        raise typer.BadParameter(f"--shapes must be of {', '.join(SIZES)}, not {', '.join(sorted(unknown))}")
    numbers = dict.fromkeys(batches.replace(" ", "").split(","))
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter("--batches must be numbers from 1 on, such as 1,4")
    console = Console()
    if (why := checking.why_no_device(device)) is not None:
        console.print(f"gpu-check: {why}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    plan = checking.Plan(
        device=device,
        sizes=sizes,
        batches=tuple(map(int, numbers)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        budget_s=budget_s,
        runs_tests=not skip_tests,
        identity_size=identity_shape,
    )
    facts = benchmark.provenance(**vars(plan))
    with only_errors_logged():
        results = checking.check(
            plan, lambda so_far: write_results(json_path, facts, so_far), lambda text: console.print(text, style="dim")
        )
    for table in checking.tables(results):
        console.print(table, soft_wrap=isinstance(table, Text))
    console.print(f"written to {json_path}", markup=False)
    raise typer.Exit(checking.exit_code(results))
