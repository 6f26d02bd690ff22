"""Speed of one method at one size and batch size."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.contestants import SameAsError, contestant
from benchmarks.gpu.counts import ForwardCounts, counting
from benchmarks.gpu.failures import outcome_of, release_memory
from benchmarks.gpu.limits import TimedOutError, at_most
from hf_slospec.cli.benchmark import Bench, Method, Sample
from hf_slospec.engine.events import PhaseTimes

# calls
MIN_WARM_UP = 2
MAX_WARM_UP = 12
WITHOUT_REPLAYS = (
    4  # calls, after which a method whose forwards were never replayed is as warm as it gets
)

Record = dict[str, Any]


class Repeats(NamedTuple):
    """Number of timed calls of a method."""

    at_least: int  # as far as its time limit allows
    at_most: int
    # Seconds, warm-up included, after which it is not repeated more often than ``at_least``
    enough_s: float


def measure(
    bench: Bench,
    batch: int,
    name: str,
    repeats: Repeats,
    limit_s: float,
    on_hang: Callable[[], None],
) -> Record:
    """Time a method after a warm-up, for at most ``limit_s`` seconds in all; see `at_most` for
    ``on_hang``.
    """
    record: Record = {"name": name, "batch": batch}
    device = bench.target.device
    samples = list[Sample]()
    counts = list[ForwardCounts]()
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    facts: Record = {}
    try:
        with at_most(limit_s, on_hang), contestant(bench, batch, name) as (method, facts):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            budget = Budget(limit_s)
            record["warm_up"], longest_s = _warm_up(bench, method, facts, repeats.at_most, budget)
            while len(samples) < (
                repeats.at_least if budget.spent_s > repeats.enough_s else repeats.at_most
            ):
                if samples and budget.left_s < longest_s:
                    break
                sample, counted = _time(bench, method, len(samples))
                samples.append(sample)
                counts.append(counted)
                longest_s = max(longest_s, sample.seconds)
    except SameAsError as same:
        record |= {"status": "same", "reason": f"it would be the same as {same}"}
    except TimedOutError as error:
        record |= {
            "status": "timed out",
            "reason": f"{error}; --resume with more --budget-s tries it again",
        }
    except Exception as error:  # noqa: BLE001  recorded
        record |= outcome_of(error)
        error.__traceback__ = None  # it would keep the call's tensors alive
    if samples and record.get("status", "timed out") == "timed out":
        record |= {"status": "measured"} | _figures(bench, batch, samples, counts)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        record |= {
            "peak_gib": round(peak / 2**30, 3),
            "peak_beyond_held_gib": round((peak - held) / 2**30, 3),
        }
    release_memory()
    return record | facts


def compare(record: Record, stock: Record | None) -> None:
    """Add ratios to stock ``generate`` and the number of equal rows; None where that was not
    measured.
    """
    if record["status"] != "measured":
        return
    if stock is None or stock["status"] != "measured":
        record |= {
            "speedup_vs_generate": None,
            "speedup_per_repeat": None,
            "rows_equal_to_generate": None,
        }
        return
    ratios = [
        theirs / ours for theirs, ours in zip(stock["seconds"], record["seconds"], strict=False)
    ]
    rows = [
        pair
        for pairs in zip(stock["rows"], record["rows"], strict=False)
        for pair in zip(*pairs, strict=True)
    ]
    record["speedup_vs_generate"] = round(statistics.median(ratios), 3)
    record["speedup_per_repeat"] = [round(ratio, 3) for ratio in ratios]
    record["rows_equal_to_generate"] = f"{sum(theirs == ours for theirs, ours in rows)}/{len(rows)}"


def _warm_up(
    bench: Bench, method: Method, facts: Record, repeats: int, budget: Budget
) -> tuple[Record, float]:
    """Run a method until a call has captured and compiled nothing.  -> record, and seconds of the
    last call
    """
    calls = captures = compilations = 0
    while True:
        sample, counted = _time(
            bench, method, calls % repeats
        )  # by the prompts that are timed later
        calls = calls + 1
        captures = captures + counted.captures
        compilations += counted.compilations
        may_replay = counted.forwards and facts["cuda_graphs"] and calls < WITHOUT_REPLAYS
        has_replayed = bool(counted.replays) or not may_replay
        is_warm = calls >= MIN_WARM_UP and has_replayed and not counted.has_prepared
        if is_warm or calls == MAX_WARM_UP or budget.left_s < 3 * sample.seconds:
            break
    record = {
        "calls": calls,
        "seconds": round(budget.spent_s, 2),
        "captures": captures,
        "compilations": compilations,
    }
    return record | {"is_warm": is_warm}, sample.seconds


def _time(bench: Bench, method: Method, repeat: int) -> tuple[Sample, ForwardCounts]:
    with counting() as counts:
        sample = bench.time(method, repeat)
    return sample, counts


def _figures(
    bench: Bench, batch: int, samples: list[Sample], counts: list[ForwardCounts]
) -> Record:
    median_s = statistics.median(sample.seconds for sample in samples)
    lengths = [
        m.acceptance_length for sample in samples if sample.slo for m in sample.slo if m.steps
    ]
    record = {
        "seconds": [round(sample.seconds, 5) for sample in samples],
        "rows": [[_digest(row) for row in sample.sequences] for sample in samples],
        "counts": [counted.as_record() for counted in counts],
        "tokens_per_s": round(batch * bench.new_tokens / median_s, 2),
        "ms_per_token_and_row": round(1e3 * median_s / bench.new_tokens, 3),
        "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
    }
    return record | _phases(samples)


def _digest(row: torch.Tensor) -> str:
    """Return a short digest of a row [length] of tokens, to compare it with that of another run."""
    return hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()[:12]


def _phases(samples: list[Sample]) -> Record:
    """Return the mean milliseconds of a decoding step by phase, and of a draft level where there
    were some, and medians of its verify phase.
    """
    events = [event for sample in samples for event in sample.steps or () if event.num_decoding]
    if not events:
        return {}
    total = sum((event.phases for event in events), PhaseTimes())
    seconds = {
        "draft": total.draft_s,
        "select": total.select_s,
        "verify": total.verify_s,
        "host": total.host_s,
    }
    num_levels = sum(event.draft_levels for event in events)
    drafted_s = sum(event.phases.draft_s for event in events if event.draft_levels)
    levels = {"ms_per_draft_level": round(1e3 * drafted_s / num_levels, 3)} if num_levels else {}
    return levels | {
        "ms_per_step": {
            phase: round(1e3 * spent / len(events), 3) for phase, spent in seconds.items()
        },
        "steps": {
            "verify_ms": round(
                1e3 * statistics.median(event.phases.verify_s for event in events), 3
            ),
            "tokens": statistics.median(event.nodes + event.prefill_tokens for event in events),
        },
    }
