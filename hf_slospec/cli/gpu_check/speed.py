"""Speed of all methods at one size and batch size."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from hf_slospec.cli.benchmark import ASSISTED, OURS, PLAIN, Bench, Method, Sample, summarize
from hf_slospec.cli.gpu_check.budget import Budget
from hf_slospec.cli.gpu_check.continuous import ContinuousBatching
from hf_slospec.cli.gpu_check.failures import outcome_of, release_memory
from hf_slospec.cli.gpu_check.variants import VARIANTS
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.models.packed import PackedModel

CONTINUOUS = "continuous batching"
MIN_REPEATS = 2  # for a median, unless the time limit of the check ends before


def measure_speed(bench: Bench, batch: int, repeats: int, budget: Budget, own_s: float) -> dict[str, Any]:
    """Measure all methods in interleaved repeats; a method that fails is left out of the following ones.

    Args:
        repeats: number of repeats, as far as the time allows.
        budget: time limit of the check, for the first :data:`MIN_REPEATS` repeats.
        own_s: seconds for the repeats after these.
    """
    return _SpeedComparison(bench, batch, budget, budget.share(own_s)).run(repeats)


class _SpeedComparison:
    def __init__(self, bench: Bench, batch: int, budget: Budget, own: Budget):
        self.bench, self.batch, self.budget, self.own = bench, batch, budget, own
        self.continuous = ContinuousBatching(bench.target, batch, bench.prompt_tokens, bench.new_tokens)
        self.running: dict[str, Method] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.device = bench.target.device
        self.held: dict[str, int] = {}  # bytes allocated before a method's first run
        self.memory: dict[str, tuple[float, float]] = {}  # peak GiB: in all, and beyond those held before
        self.facts: dict[str, dict[str, Any]] = {}
        self._round_s = self._longest_s = 0.0  # seconds of a round of all methods, as measured so far; longest call
        self._seen: dict[tuple[Any, ...], str] = {}  # effective settings -> the variant that has them

    def run(self, repeats: int) -> dict[str, Any]:
        try:
            makers = self._makers()
            for name, make in makers.items():
                self._warm_up(name, make)
            rounds = self._rounds(repeats)
        finally:
            self.continuous.close()
            self.running.clear()
            release_memory()
        own = {(name, self.batch): samples for name, samples in self.samples.items() if samples}
        rows = {row["name"]: row for row in summarize(own, self.bench.new_tokens)}
        return {
            "repeats": rounds,
            "contestants": [self._record(name, rows.get(name)) for name in makers],
            "steps": self._steps(),
        }

    def _makers(self) -> dict[str, Callable[[], Method]]:
        """Return constructors of the methods, most important first: the last ones may be skipped for lack of time."""
        bench, batch = self.bench, self.batch
        found: dict[str, Callable[[], Method]] = {PLAIN: lambda: Method(PLAIN, batch, bench.stock())}
        variants = {
            name: lambda name=name, config=config: Method(name, batch, self._ours(name, config))
            for name, config in VARIANTS.items()
        }
        found[OURS] = variants.pop(OURS)
        if batch == 1:  # assisted generation supports no larger batch
            found[ASSISTED] = lambda: Method(ASSISTED, batch, bench.stock(assistant_model=bench.draft))

        def run_continuous(encoded: dict[str, torch.Tensor]) -> torch.Tensor:
            self.facts[CONTINUOUS] = self.continuous.facts
            return self.continuous(encoded)

        found[CONTINUOUS] = lambda: Method(CONTINUOUS, batch, run_continuous, self.continuous.running)
        return found | variants

    def _ours(self, name: str, config: SLOSpecConfig) -> Callable[[dict[str, torch.Tensor]], Any]:
        packed = PackedModel(self.bench.target, config.attention, config.prepack, config.cuda_graphs)
        self.facts[name] = {"attention": packed.backend.__name__, "cuda_graphs": packed.has_graphs}
        key = *self.facts[name].values(), config.model_dump_json(exclude={"attention", "cuda_graphs"})
        if (other := self._seen.setdefault(key, name)) != name:
            raise _SameAsError(other)
        return self.bench.ours(config)

    def _warm_up(self, name: str, make: Callable[[], Method]) -> None:
        if self.budget.left_s <= self._longest_s:
            self.facts[name] = {"status": "skipped", "reason": "no time was left"}
            return
        # Memory that a method keeps between its calls counts as its own.
        self.held[name] = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        try:
            method = make()
            seconds = self.bench.time(method, 0).seconds
        except _SameAsError as same:
            self.facts[name] |= {"status": "skipped", "reason": f"it would be the same as {same}"}
        except Exception as error:  # noqa: BLE001  recorded
            self._drop(name, error)
        else:
            self.running[name], self.samples[name] = method, []
            self._round_s, self._longest_s = self._round_s + seconds, max(self._longest_s, seconds)

    def _rounds(self, repeats: int) -> int:
        done = 0
        while self.running and done < repeats:
            if (self.own if done >= MIN_REPEATS else self.budget).left_s <= self._round_s:
                break
            begun_s = self.budget.spent_s
            for name, method in list(self.running.items()):
                self._repeat(name, method, done)
            self._round_s, done = self.budget.spent_s - begun_s, done + 1
        return done

    def _repeat(self, name: str, method: Method, repeat: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self.samples[name].append(self.bench.time(method, repeat))
        except Exception as error:  # noqa: BLE001  recorded
            self._drop(name, error)
            return
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            now = peak / 2**30, (peak - self.held[name]) / 2**30
            self.memory[name] = max(now, self.memory.get(name, now))

    def _drop(self, name: str, error: Exception) -> None:
        self.running.pop(name, None)
        self.samples.pop(name, None)
        self.facts[name] = self.facts.get(name, {}) | outcome_of(error)
        error.__traceback__ = None  # it would keep the call's tensors alive
        if name == CONTINUOUS:
            self.continuous.close()
        release_memory()

    def _record(self, name: str, row: dict[str, Any] | None) -> dict[str, Any]:
        facts = self.facts.get(name, {})
        if row is None:
            return {"name": name, "batch": self.batch, "status": "skipped", "reason": "no time was left"} | facts
        peak = self.memory.get(name)
        memory = {} if peak is None else {"peak_gib": round(peak[0], 3), "peak_beyond_held_gib": round(peak[1], 3)}
        phases = _phases(self.samples[name])
        return {"status": "measured"} | row | facts | memory | ({} if phases is None else {"ms_per_step": phases})

    def _steps(self) -> dict[str, float] | None:
        """Return medians over hf_slospec's decoding steps; None if there were none."""
        events = [event for sample in self.samples.get(OURS, ()) for event in sample.steps if event.num_decoding]
        if not events:
            return None
        return {
            "verify_ms": round(1e3 * statistics.median(event.phases.verify_s for event in events), 3),
            "tokens": statistics.median(event.nodes + event.prefill_tokens for event in events),
        }


class _SameAsError(Exception):
    """A variant with the same effective settings as another one."""


def _phases(samples: list[Sample]) -> dict[str, float] | None:
    """Return the mean milliseconds of a decoding step by phase."""
    events = [event for sample in samples for event in sample.steps or () if event.num_decoding]
    if not events:
        return None
    total = sum((event.phases for event in events), PhaseTimes())
    seconds = {"draft": total.draft_s, "select": total.select_s, "verify": total.verify_s, "host": total.host_s}
    return {phase: round(1e3 * spent / len(events), 3) for phase, spent in seconds.items()}
