"""Measure a GPU: all parts in the order of their value, or one check of speed, identity and tests
(README.md beside this file).

python -m benchmarks.gpu --results gpu-results
python -m benchmarks.gpu check --json benchmarks/results/gpu-check.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import hf_slospec
from benchmarks.gpu.environment import why_no_device
from benchmarks.gpu.goals import goals
from benchmarks.gpu.parts import FAILED, PARTS, TOTAL_S, Run, version
from benchmarks.gpu.quantised import ALL_SIZES
from benchmarks.gpu.suite import gpu_tests
from hf_slospec.cli import benchmark
from hf_slospec.cli.options import check_outputs, console, usage_errors, write_results
from hf_slospec.server.model_options import only_errors_logged
from hf_slospec.tiny.embedded import HEADS
from hf_slospec.tiny.shapes import SIZES

if TYPE_CHECKING:
    from benchmarks.gpu import Plan

MAX_DIGITS = 6  # per batch size

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def gpu_parts(
    context: typer.Context,
    results: Annotated[
        Path, typer.Option(help="Folder for one JSON per part; those that are finished are kept.")
    ] = Path("gpu-results"),
    only: Annotated[
        str, typer.Option(help=f"Parts, comma-separated: {', '.join(p.name for p in PARTS)}.")
    ] = "",
    budget_s: Annotated[
        float, typer.Option(min=1.0, help="Time limit in seconds for all parts.")
    ] = TOTAL_S,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run all parts on the CPU with tiny models, to try them."),
    ] = False,
) -> None:
    """Measure a GPU in eleven minutes, part by part, the most important first.

    The same command goes on where the last one ended: it skips parts that are finished for this
    commit, and runs those that were cut off. Exit code 1: a part failed; 2: there is no CUDA device.
    """
    if context.invoked_subcommand is not None:
        return
    names = [name for name in only.replace(" ", "").split(",") if name]
    if unknown := set(names) - {part.name for part in PARTS}:
        raise typer.BadParameter(f"--only has no part {', '.join(sorted(unknown))}")
    output = console()
    reason = None if dry_run else why_no_device("cuda")
    if reason is not None:
        output.print(reason, style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    run = Run(results, dry_run, version(), lambda text: output.print(text, style="dim"))
    chosen = [part for part in PARTS if not names or part.name in names]
    ended = run.run(chosen, budget_s)
    for part in chosen:
        record = ended[part.name]
        why = f", {record['reason']}" if "reason" in record else ""
        output.print(f"{part.name}: {record['status']}{why}", markup=False, soft_wrap=True)
    if not dry_run:
        for goal in goals(results):
            output.print(str(goal), markup=False, soft_wrap=True)
    raise typer.Exit(int(any(ended[part.name]["status"] == FAILED for part in chosen)))


@app.command(name="tests")
def gpu_tests_only(
    budget_s: Annotated[float, typer.Option(min=1.0, help="Time limit in seconds.")] = 600.0,
    json_path: Annotated[Path, typer.Option("--json", help="Write the outcome to it.")] = Path(
        "gpu-tests.json"
    ),
) -> None:
    """Run the tests that need a GPU. Exit code 1: one failed."""
    check_outputs(None, json_path)
    if (reason := why_no_device("cuda")) is not None:
        record: dict[str, Any] = {"status": "not present", "reason": reason}
    else:
        record = gpu_tests(budget_s)
    facts = benchmark.provenance(hf_slospec=hf_slospec.__version__)
    json_path.write_text(json.dumps({"provenance": facts, "tests": record}, indent=1) + "\n")
    raise typer.Exit(int(record["status"] == "failed"))


@app.command(name="check")
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
    drafter: Annotated[
        str | None,
        typer.Option(
            help=f"Draft with an embedded head in place of the draft model: {', '.join(HEADS)}."
        ),
    ] = None,
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

    Example:  python -m benchmarks.gpu check --budget-s 120 --json result.json
    """
    from benchmarks import gpu as checking

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
    chosen = tuple(name for name in checking.ALL_METHODS if name in named) or checking.METHODS
    if unknown := set(named) - set(chosen):
        raise typer.BadParameter(
            f"--methods must be among {'; '.join(checking.ALL_METHODS)}, got {'; '.join(unknown)}"
        )
    if drafter not in (None, *HEADS):
        raise typer.BadParameter(f"--drafter must be one of {', '.join(HEADS)}, got {drafter!r}")
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
        drafter=drafter,
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
    if plan.drafter is not None:
        options["--drafter"] = plan.drafter
    flags = {"--skip-tests": not plan.runs_tests, "--profile": plan.profiles, "--resume": True}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "check",
        *(flag for flag, is_set in flags.items() if is_set),
    ]
    os.execv(
        sys.executable, [*command, *(str(part) for option in options.items() for part in option)]
    )


if __name__ == "__main__":
    app()
