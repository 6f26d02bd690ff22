"""The phases of a check, each with its share of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.comparison import Comparison, Results
from benchmarks.gpu.environment import environment
from benchmarks.gpu.identity import identity
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.resuming import is_done
from benchmarks.gpu.suite import gpu_tests
from benchmarks.gpu.variants import CONFIGS

BEGIN_SHARE = 0.95  # measurements are started until this share of the time limit
# at most, of the time limit; the rest is for speed
TESTS_SHARE = 0.42
IDENTITY_SHARE = 0.15


def check(
    plan: Plan,
    on_results: Callable[[Results], None],
    report: Callable[[str], None],
    earlier: Results | None = None,
    on_hang: Callable[[float], None] = lambda _: None,
) -> Results:
    """Run all phases: the most important methods first, then the tests of correctness, then all
    other methods.

    Args:
        on_results: called with the results so far whenever there are new ones.
        report: called with messages about the progress.
        earlier: results to go on from.
        on_hang: called in another thread when a method hangs, with the seconds left; it may replace
            the process.
    """
    budget = Budget(BEGIN_SHARE * plan.budget_s)
    device = torch.device(plan.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # cuDNN builds a plan for each new shape, which would fall into timed calls of every method that
    # uses SDPA.
    torch.backends.cuda.enable_cudnn_sdp(False)
    results: Results = {"environment": environment(device)} | (earlier or {})
    on_results(results)

    def hang() -> None:
        on_hang(budget.left_s)

    comparison = Comparison(plan, device, budget, results, report, hang)
    for _ in comparison.run_first():
        on_results(results)
    comparison.close()  # other processes need memory, too
    share = budget.share(IDENTITY_SHARE * plan.budget_s)
    known = results.get("identity", [])
    results["identity"] = []
    if plan.checks:
        report(f"identity of the output at {plan.identity_size}")
        for record in identity(device, plan.identity_size, plan.new_tokens, share, known, hang):
            results["identity"].append(record)
            on_results(results)
    if "tests" not in results or not is_done(results["tests"]):
        report("gpu tests")
        results["tests"] = _tests(plan, device, budget)
        on_results(results)
    for _ in comparison.run():
        on_results(results)
    results["environment"]["nvidia_smi_at_the_end"] = environment(device).get("nvidia_smi")
    results["seconds"] = round(results.get("seconds", 0.0) + budget.spent_s, 1)
    on_results(results)
    return results


def exit_code(results: Results, checks: bool = True) -> int:
    """Return the exit code of a check.

    1: a test or a comparison failed, hf_slospec failed other than by lack of memory, or no output
    was compared in fp32 although it ``checks`` identity.
    """
    ours = [
        row
        for cell in results.get("speed", ())
        for row in cell["contestants"]
        if row["name"] in CONFIGS
    ]
    records: list[dict[str, Any]] = [results.get("tests", {}), *results.get("identity", ()), *ours]
    is_identical = any(
        r["status"] == "passed" and r["dtype"] == "float32" for r in results.get("identity", ())
    )
    return int(
        (checks and not is_identical)
        or any(record.get("status") in ("failed", "hung") for record in records)
    )


def _tests(plan: Plan, device: torch.device, budget: Budget) -> dict[str, Any]:
    if not plan.checks:
        return {"status": "skipped", "reason": "--methods was given"}
    if not plan.runs_tests:
        return {"status": "skipped", "reason": "--skip-tests was given"}
    if device.type != "cuda":
        return {"status": "skipped", "reason": "they need a CUDA device"}
    return gpu_tests(budget.share(TESTS_SHARE * plan.budget_s).limit_s)
