"""The phases of a check, each with its share of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.cli.benchmark import Bench
from hf_slospec.cli.gpu_check.budget import Budget
from hf_slospec.cli.gpu_check.environment import environment
from hf_slospec.cli.gpu_check.failures import outcome_of, release_memory
from hf_slospec.cli.gpu_check.floor import copy_bandwidth, floor
from hf_slospec.cli.gpu_check.identity import identity
from hf_slospec.cli.gpu_check.speed import measure_speed
from hf_slospec.cli.gpu_check.suite import gpu_tests
from hf_slospec.cli.gpu_check.variants import VARIANTS
from hf_slospec.tiny.embedded import tiny_prompts
from hf_slospec.tiny.load import SIZES, load_pair

BEGIN_SHARE = 0.95  # of the time limit, until which measurements are started
TESTS_SHARE, IDENTITY_SHARE = 0.42, 0.15  # of the time limit, at most; the rest is for speed
MIN_BUILD_S = 15.0  # no model is built when less time is left

Results = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Settings of a check."""

    device: str
    sizes: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    budget_s: float
    runs_tests: bool
    identity_size: str


def check(plan: Plan, on_phase: Callable[[Results], None], report: Callable[[str], None]) -> Results:
    """Run all phases.

    Args:
        on_phase: called with the results so far after each phase.
        report: called with messages about the progress.
    """
    budget, device = Budget(BEGIN_SHARE * plan.budget_s), torch.device(plan.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    results: Results = {"environment": environment(device)}
    on_phase(results)
    report("gpu tests")
    results["tests"] = _tests(plan, device, budget)
    on_phase(results)
    report(f"identity of the output at {plan.identity_size}")
    results["identity"] = []
    share = budget.share(IDENTITY_SHARE * plan.budget_s)
    for record in identity(device, plan.identity_size, plan.new_tokens, share):
        results["identity"].append(record)
        on_phase(results)
    for cells in _speed(plan, device, budget, report):
        results |= cells
        on_phase(results)
    results["environment"]["nvidia_smi_at_the_end"] = environment(device).get("nvidia_smi")
    results["seconds"] = round(budget.spent_s, 1)
    on_phase(results)
    return results


def exit_code(results: Results) -> int:
    """Return the exit code of a check.

    1: a test or a comparison failed, hf_slospec failed other than by lack of memory, or no output was compared in fp32.
    """
    ours = [row for cell in results.get("speed", ()) for row in cell.get("contestants", ()) if row["name"] in VARIANTS]
    records = [results.get("tests", {}), *results.get("identity", ()), *ours]
    is_identical = any(r["status"] == "passed" and r["dtype"] == "float32" for r in results.get("identity", ()))
    return int(not is_identical or any(record.get("status") == "failed" for record in records))


def _tests(plan: Plan, device: torch.device, budget: Budget) -> dict[str, Any]:
    if not plan.runs_tests:
        return {"status": "skipped", "reason": "--skip-tests was given"}
    if device.type != "cuda":
        return {"status": "skipped", "reason": "they need a CUDA device"}
    return gpu_tests(budget.share(TESTS_SHARE * plan.budget_s).limit_s)


def order_of(sizes: Sequence[str], batches: Sequence[int]) -> list[tuple[str, int]]:
    """Return sizes and batch sizes in order: small batches first, few changes of the model, the largest size first."""
    largest_first = sorted(sizes, key=SIZES.index, reverse=True)
    cells = []
    for index, batch in enumerate(sorted(batches)):
        cells += [(size, batch) for size in (largest_first if index % 2 == 0 else largest_first[::-1])]
    return cells


def _speed(plan: Plan, device: torch.device, budget: Budget, report: Callable[[str], None]) -> Iterator[Results]:
    """Yield the results of the phase so far after each size and batch size."""
    bandwidth = copy_bandwidth(device)
    results: Results = {"copy_gb_per_s": round(bandwidth / 1e9, 2), "speed": [], "floor": []}
    yield results
    order = order_of(plan.sizes, plan.batches)
    bench: Bench | None = None
    built: str | None = None  # size of the model in bench
    too_large: dict[str, dict[str, str]] = {}
    for index, (size, batch) in enumerate(order):
        cell: Results = {"size": size, "batch": batch}
        results["speed"].append(cell)
        if size in too_large or budget.left_s < MIN_BUILD_S:
            cell |= too_large.get(size, {"status": "skipped", "reason": "no time was left"})
            continue
        report(f"{size} at batch {batch}; {budget.left_s:.0f} s left")
        begun_s = budget.spent_s
        try:
            if built != size:
                bench = built = None  # the memory may not suffice for two models
                release_memory()
                bench, built = _bench(plan, device, size), size
        except Exception as error:  # noqa: BLE001  recorded
            cell |= outcome_of(error)
            too_large[size] = outcome_of(error)
            yield results
            continue
        assert bench is not None
        own_s = budget.left_s / (len(order) - index)
        cell |= {"status": "measured", "parameters": bench.target.num_parameters()}
        cell |= measure_speed(bench, batch, plan.repeats, budget, own_s)
        cell["seconds"] = round(budget.spent_s - begun_s, 1)
        yield results
        try:
            keys_each = plan.prompt_tokens + plan.new_tokens // 2
            record = floor(bench.target, batch, keys_each, cell["steps"], bandwidth)
        except Exception as error:  # noqa: BLE001  recorded
            record = {"batch": batch, **outcome_of(error)}
        results["floor"].append({"size": size, **record})
        release_memory()
        yield results


def _bench(plan: Plan, device: torch.device, size: str) -> Bench:
    pair = load_pair(None, None, size, "bfloat16", str(device))
    return Bench(*pair, tiny_prompts(), plan.prompt_tokens, plan.new_tokens, times_forwards=False)
