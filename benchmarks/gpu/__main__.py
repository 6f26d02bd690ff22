"""Check a GPU: tests, identity, speed and memory floor (README.md beside this file).

python -m benchmarks.gpu --json benchmarks/results/gpu-check.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

import hf_slospec
from benchmarks.gpu.quantised import ALL_SIZES
from hf_slospec.cli.options import check_outputs, console, usage_errors, write_results
from hf_slospec.server.model_options import only_errors_logged
from hf_slospec.tiny.shapes import SIZES

if TYPE_CHECKING:
    from benchmarks.gpu import Plan

MAX_DIGITS = 6  # per batch size

app = typer.Typer(add_completion=False)


@app.command()
def gpu_check(
    shapes: Annotated[
        str,
        typer.Option(
            help=f"Sizes of the target, comma-separated: {', '.join(SIZES)}, or such as 8B-int4: -int4, -int8 and -fp8 "
            "are quantised by torchao."
        ),
    ] = "8B",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4,16,64",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompts are truncated to this many tokens.")
    ] = 128,
    new_tokens: Annotated[int, typer.Option(min=4, help="New tokens of every row.")] = 64,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each method, as far as time allows.")
    ] = 5,
    budget_s: Annotated[
        float, typer.Option(min=1.0, help="Time limit in seconds; what is left then is skipped.")
    ] = 480.0,
    methods: Annotated[
        str,
        typer.Option(
            help="Time these methods only, separated by semicolons; check neither identity nor tests."
        ),
    ] = "",
    skip_tests: Annotated[
        bool, typer.Option("--skip-tests", help="Do not run the tests marked gpu.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Also count device operations and host waits of a step, by phase."
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the results in the file of --json; measure what it lacks."
        ),
    ] = False,
    json_path: Annotated[
        Path,
        typer.Option(
            "--json", help="Write the results with provenance to this file, after each method."
        ),
    ] = Path("gpu-check.json"),
    device: Annotated[
        str, typer.Option(hidden=True)
    ] = "cuda",  # cpu: for tests of the check itself, with small sizes
    identity_shape: Annotated[str, typer.Option(hidden=True)] = "0.1B",
) -> None:
    """Check a GPU in eight minutes: speed against stock generate, identity with it, tests, and the
    memory floor.

    Nothing is downloaded: models of the shapes of Llama-3.1-8B and Llama-3.2-1B are made of the
    embedded pair on the device. Whatever the time limit, the most important figures come first, and
    --resume adds the others. Exit code 1: a test or a check failed; 2: there is no CUDA device.

    Example:  python -m benchmarks.gpu --budget-s 120 --json result.json
    """
    from benchmarks import gpu as checking
    from hf_slospec.cli import benchmark

    check_outputs(None, json_path)
    sizes = tuple(dict.fromkeys(shapes.replace(" ", "").split(",")))
    if unknown := {*sizes, identity_shape} - set(ALL_SIZES):
        raise typer.BadParameter(
            f"--shapes must be among {', '.join(ALL_SIZES)}, got {', '.join(sorted(unknown))}"
        )
    numbers = dict.fromkeys(batches.replace(" ", "").split(","))
    if not all(
        number.isdecimal() and len(number) <= MAX_DIGITS and int(number) for number in numbers
    ):
        raise typer.BadParameter(f"--batches must be positive numbers such as 1,4, got {batches!r}")
    named = [name.strip() for name in methods.split(";") if name.strip()]
    chosen = tuple(name for name in checking.METHODS if name in named) or checking.METHODS
    if unknown := set(named) - set(chosen):
        raise typer.BadParameter(
            f"--methods must be among {'; '.join(checking.METHODS)}, got {'; '.join(unknown)}"
        )
    output = console()
    if (reason := checking.why_no_device(device)) is not None:
        output.print(reason, style="bold red", markup=False, soft_wrap=True)
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
        profiles=profile,
        methods=chosen,
    )
    facts = benchmark.provenance(hf_slospec=hf_slospec.__version__, **vars(plan))
    with usage_errors():
        earlier = checking.earlier_results(json_path, facts) if resume else None
    with only_errors_logged():
        results = checking.check(
            plan,
            lambda so_far: write_results(json_path, facts, so_far),
            lambda text: output.print(text, style="dim"),
            earlier,
            lambda left_s: _restart(plan, json_path, left_s),
        )
    for table in checking.tables(results):
        output.print(table, soft_wrap=isinstance(table, Text))
    output.print(
        f"written to {json_path}. Please send it to us, whatever it says: attach it to an issue of the repository. The "
        "same command with --resume measures what is missing.",
        markup=False,
        soft_wrap=True,
    )
    raise typer.Exit(checking.exit_code(results, plan.checks))


def _restart(plan: Plan, json_path: Path, left_s: float) -> None:
    """Replace this process, in which a method hangs, by one that goes on after this method."""
    options = {
        "--shapes": ",".join(plan.sizes),
        "--batches": ",".join(map(str, plan.batches)),
        "--prompt-tokens": plan.prompt_tokens,
        "--new-tokens": plan.new_tokens,
        "--repeats": plan.repeats,
        "--budget-s": max(left_s, 1.0),
        "--json": json_path,
        "--device": plan.device,
        "--identity-shape": plan.identity_size,
        "--methods": ";".join(plan.methods if not plan.checks else ()),
    }
    flags = {"--skip-tests": not plan.runs_tests, "--profile": plan.profiles, "--resume": True}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        *(flag for flag, is_set in flags.items() if is_set),
    ]
    os.execv(
        sys.executable, [*command, *(str(part) for option in options.items() for part in option)]
    )


if __name__ == "__main__":
    app()
