"""``hf_slospec gpu-check``: correctness and speed of decoding on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hf_slospec.cli import benchmark
from hf_slospec.cli import gpu_check as checking
from hf_slospec.cli.options import console, write_results
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.tiny.load import SIZES


def gpu_check(
    shapes: Annotated[str, typer.Option(help=f"Sizes of the target, comma-separated: {', '.join(SIZES)}.")] = "1B,8B",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are truncated to this many tokens.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=4, help="New tokens of every row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method, as far as time allows.")] = 5,
    budget_s: Annotated[
        float, typer.Option(min=1.0, help="Time limit in seconds; what is left then is skipped.")
    ] = 480.0,
    skip_tests: Annotated[bool, typer.Option("--skip-tests", help="Do not run the tests marked gpu.")] = False,
    json_path: Annotated[
        Path, typer.Option("--json", help="Write the results with provenance to this file, after each phase.")
    ] = Path("gpu-check.json"),
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",  # cpu: for tests of the check itself, with small sizes
    identity_shape: Annotated[str, typer.Option(hidden=True)] = "0.1B",
) -> None:
    """Check a GPU in eight minutes: tests, identity with stock generate, speed, and time over the memory floor.

    Nothing is downloaded: the targets are inflated from the embedded one on the device. Exit code 1: a test or a check
    failed; 2: there is no CUDA device.

    Example:  hf_slospec gpu-check --json result.json
    """
    sizes = tuple(dict.fromkeys(shapes.replace(" ", "").split(",")))
    if unknown := {*sizes, identity_shape} - set(SIZES):
        raise typer.BadParameter(f"--shapes must be among {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    numbers = dict.fromkeys(batches.replace(" ", "").split(","))
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"--batches must be positive numbers such as 1,4, got {batches!r}")
    output = console()
    if (reason := checking.why_no_device(device)) is not None:
        output.print(f"gpu-check: {reason}", style="bold red", markup=False, soft_wrap=True)
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
            plan, lambda so_far: write_results(json_path, facts, so_far), lambda text: output.print(text, style="dim")
        )
    for table in checking.tables(results):
        output.print(table, soft_wrap=isinstance(table, Text))
    output.print(f"written to {json_path}", markup=False)
    raise typer.Exit(checking.exit_code(results))
