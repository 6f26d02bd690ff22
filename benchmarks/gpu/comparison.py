"""The comparison of all methods at all sizes and batch sizes, which goes on from what was measured
before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.bandwidth import datasheet_bandwidth, read_bandwidth
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.contestants import IMPORTANT, names_at
from benchmarks.gpu.environment import nvidia_smi
from benchmarks.gpu.failures import outcome_of, release_memory
from benchmarks.gpu.floor import floor
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.profiling import profile
from benchmarks.gpu.quantised import ALL_SIZES, load
from benchmarks.gpu.resuming import STARTED, is_done
from benchmarks.gpu.speed import Repeats, compare, measure
from hf_slospec.cli.benchmark import OURS, PLAIN, Bench
from hf_slospec.tiny.embedded import tiny_prompts

SHARE = 0.8  # one method may take so much of the time left
ENOUGH_SHARE = (
    1 / 8
)  # after this share of the time limit, a method is not repeated more often than needed
MIN_REPEATS = 3
MIN_LEFT_S = 5.0  # no method is started when less time is left

Results = dict[str, Any]
NO_TIME = {"status": "skipped", "reason": "no time was left"}


def order_of(sizes: Sequence[str], batches: Sequence[int]) -> list[tuple[str, int]]:
    """Return sizes and batch sizes in order: small batches first, few changes of the model, the
    largest size first.
    """
    largest_first = sorted(sizes, key=ALL_SIZES.index, reverse=True)
    cells = []
    for index, batch in enumerate(sorted(batches)):
        cells += [
            (size, batch) for size in (largest_first if index % 2 == 0 else largest_first[::-1])
        ]
    return cells


class Comparison:
    """Cells of size and batch size, each with one record per method; they are kept in ``results``."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        budget: Budget,
        results: Results,
        report: Callable[[str], None],
        on_hang: Callable[[], None],
    ):
        self.plan = plan
        self.device = device
        self.budget = budget
        self.results = results
        self.report = report
        self.on_hang = on_hang
        self.results.setdefault("bandwidth", _bandwidth(device))
        self.results.setdefault("floor", [])
        if "speed" not in results:
            results["speed"] = [
                {"size": s, "batch": b, "contestants": []}
                for s, b in order_of(plan.sizes, plan.batches)
            ]
        self._repeats = Repeats(
            min(MIN_REPEATS, plan.repeats), plan.repeats, ENOUGH_SHARE * plan.budget_s
        )
        self._bench: Bench | None = None
        self._built: str | None = None  # size of the models in the bench
        self._unbuilt: dict[str, dict[str, str]] = {}  # sizes that cannot be built

    def run_first(self) -> Iterator[None]:
        """Measure the most important methods of the first cell; yield whenever there are new
        results.
        """
        first = self.results["speed"][0]
        return self._cell(first, [name for name in self._names(first) if name in IMPORTANT])

    def run(self) -> Iterator[None]:
        """Measure what is not measured yet; yield whenever there are new results."""
        for cell in self.results["speed"]:
            yield from self._cell(cell, self._names(cell))
            if (missing := self._missing(cell)) and self._reason_not_to(cell) is None:
                yield from self._complete(cell, missing)
        self.close()

    def close(self) -> None:
        """Free the models."""
        self._bench = self._built = None
        release_memory()

    def _names(self, cell: Results) -> list[str]:
        return names_at(cell["batch"], self.plan.methods)

    def _cell(self, cell: Results, names: list[str]) -> Iterator[None]:
        found = {record["name"]: record for record in cell["contestants"]}
        for name in names:
            if name in found and is_done(found[name]):
                continue
            blank = {"name": name, "batch": cell["batch"]}
            found[name] = blank | (self._reason_not_to(cell) or {"status": STARTED})
            # In the order of importance, whatever the order in which they were measured.
            cell["contestants"] = [found[other] for other in self._names(cell) if other in found]
            if found[name]["status"] == STARTED:
                yield
                self.report(
                    f"{cell['size']} at batch {cell['batch']}: {name}; {self.budget.left_s:.0f} s left"
                )
                found[name] |= self._measured(cell, name)
                for record in found.values():  # all of them, in case that stock was measured last
                    compare(record, found.get(PLAIN))
            yield

    def _reason_not_to(self, cell: Results) -> dict[str, str] | None:
        """Return why the methods of a cell cannot run; None if they can, and then its models are
        built.
        """
        size = cell["size"]
        if size in self._unbuilt:
            return self._unbuilt[size]
        if self.budget.left_s < MIN_LEFT_S:
            return NO_TIME
        if self._built != size:
            self.close()  # the memory may not suffice for two
            try:
                self._bench = _bench(self.plan, self.device, size)
                self._built = size
            except Exception as error:  # noqa: BLE001  recorded
                self._unbuilt[size] = outcome_of(error)
                return self._unbuilt[size]
            cell["parameters"] = self._bench.target.num_parameters()
            cell["draft_parameters"] = self._bench.draft.num_parameters()
        return NO_TIME if self.budget.left_s < MIN_LEFT_S else None

    def _measured(self, cell: Results, name: str) -> Results:
        assert self._bench is not None
        limit_s = SHARE * self.budget.left_s
        record = measure(self._bench, cell["batch"], name, self._repeats, limit_s, self.on_hang)
        smi = nvidia_smi(None) if self.device.type == "cuda" else None
        return record if smi is None else record | {"clocks": smi}

    def _missing(self, cell: Results) -> list[str]:
        """Return what is measured once per cell and was not: floor, drift or profile."""
        place = {key: cell[key] for key in ("size", "batch")}
        missing = (
            []
            if any(place.items() <= record.items() for record in self.results["floor"])
            else ["floor"]
        )
        if "drift" not in cell and any(
            r["name"] == PLAIN and r["status"] == "measured" for r in cell["contestants"]
        ):
            missing.append("drift")
        return missing + ["profile"] * (self.plan.profiles and "profile" not in cell)

    def _complete(self, cell: Results, missing: list[str]) -> Iterator[None]:
        """Measure the floor, how far stock ``generate`` has drifted since it was timed, and the
        profile.
        """
        assert self._bench is not None
        batch = cell["batch"]
        found = {record["name"]: record for record in cell["contestants"]}
        if "floor" in missing:
            rates = (self.results["bandwidth"][name] for name in ("read", "datasheet"))
            keys_each = self.plan.prompt_tokens + self.plan.new_tokens // 2
            try:
                record = floor(
                    self._bench.target, batch, keys_each, found[OURS].get("steps"), *rates
                )
            except Exception as error:  # noqa: BLE001  recorded
                record = outcome_of(error)
            self.results["floor"].append({"size": cell["size"], "batch": batch} | record)
            yield
        if "drift" in missing and self.budget.left_s > MIN_LEFT_S:
            limit_s = SHARE * self.budget.left_s
            again = measure(self._bench, batch, PLAIN, Repeats(1, 1, 0.0), limit_s, self.on_hang)
            if again["status"] == "measured":
                cell["drift"] = round(
                    again["seconds"][0] / statistics.median(found[PLAIN]["seconds"]), 3
                )
                yield
        if "profile" in missing and self.budget.left_s > MIN_LEFT_S:
            cell["profile"] = profile(self._bench, batch, SHARE * self.budget.left_s, self.on_hang)
            yield


def _bandwidth(device: torch.device) -> Results:
    """Return the bandwidths in bytes per second."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else None
    return {"read": read_bandwidth(device), "datasheet": datasheet_bandwidth(name)}


def _bench(plan: Plan, device: torch.device, size: str) -> Bench:
    return Bench(*load(size, str(device)), tiny_prompts(), plan.prompt_tokens, plan.new_tokens)
