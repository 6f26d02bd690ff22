"""Device operations and host waits of hf_slospec's steps, by phase, and what takes the memory of a
call.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, supported_activities

from benchmarks.gpu.contestants import contestant
from benchmarks.gpu.counts import counting, replaced
from benchmarks.gpu.failures import outcome_of
from benchmarks.gpu.limits import TimedOutError, at_most
from hf_slospec.cli.benchmark import OURS, Bench
from hf_slospec.engine.step import Engine
from hf_slospec.model.packed_model import PackedModel

PREFIX = "hf_slospec "
STEP = "step"
LEVEL = "draft level"
METHODS = {
    STEP: (Engine, "step"),
    "draft": (Engine, "_draft"),
    "select": (Engine, "_select"),
    "verify": (Engine, "_verify"),
    "commit": (Engine, "_commit"),
    "forward": (PackedModel, "_run"),
}
KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}  # on the device
WARM_UP = 4  # calls
MAX_ACTIONS = 500_000  # allocator's actions in one call
# that are recorded
NUM_PLACES = 12
NUM_FRAMES = 4

Span = tuple[float, float]  # begin and end, in the trace's microseconds


def profile(
    bench: Bench, batch: int, limit_s: float, on_hang: Callable[[], None]
) -> dict[str, Any]:
    """Record a call of hf_slospec's default by a profiler, after some calls without.

    See :func:`count_events`, and for ``memory``, of another call, :func:`places_at_peak`.
    """
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    try:
        with (
            at_most(limit_s, on_hang),
            contestant(bench, batch, OURS) as (method, _),
            ExitStack() as stack,
        ):
            for _ in range(WARM_UP):
                bench.time(method, 0)
            for name, (owner, attribute) in METHODS.items():
                stack.enter_context(replaced(owner, attribute, _labelled(PREFIX + name)))
            with counting() as counts, torch.profiler.profile(activities=list(wanted)) as profiler:
                bench.time(method, 0)
            with tempfile.TemporaryDirectory() as folder:
                profiler.export_chrome_trace(path := str(Path(folder) / "trace.json"))
                trace = json.loads(Path(path).read_text())["traceEvents"]
            memory = _memory_of(lambda: bench.time(method, 0), bench.target.device)
    except TimedOutError as error:
        return {"status": "timed out", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  recorded
        return outcome_of(error)
    return {"status": "measured", "counts": counts.as_record(), "memory": memory} | count_events(
        trace
    )


def _memory_of(run: Callable[[], Any], device: torch.device) -> Any:
    """Return what a call allocates at its peak, by place in the code; None where torch does not
    record that.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=MAX_ACTIONS
        )
        try:
            run()
            traces = torch.cuda.memory._snapshot(device)["device_traces"]
        finally:  # what is timed later shall not be slowed down
            torch.cuda.memory._record_memory_history(enabled=None)
        trace = traces[torch.cuda.current_device() if device.index is None else device.index]
        if len(trace) >= MAX_ACTIONS:
            raise RuntimeError(
                f"the call had more than {MAX_ACTIONS} actions of the allocator, of which the first are lost"
            )
        return places_at_peak(trace)
    except Exception as error:  # noqa: BLE001  recorded, as these functions are no part of torch's interface
        return outcome_of(error)


def places_at_peak(trace: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mebibytes that were allocated when most were, by the frames that did it, the
    largest first.

    ``trace`` is that of one device, with actions in their order; what was allocated before it began
    does not count."""
    live = dict[int, dict[str, Any]]()
    totals = [0]
    for event in trace:
        totals.append(totals[-1] + _replayed(event, live))
    live.clear()
    for event in trace[: totals.index(max(totals))]:
        _replayed(event, live)
    sizes = Counter[str]()
    numbers = Counter[str]()
    for own in live.values():
        frames = [
            f"{frame['filename'].split('site-packages/')[-1]}:{frame['line']}"
            for frame in own.get("frames", ())
        ]
        place = " < ".join(frames[:NUM_FRAMES])
        sizes[place] += own["size"]
        numbers[place] += 1
    return [
        {"mib": round(size / 2**20, 1), "tensors": numbers[place], "at": place}
        for place, size in sizes.most_common(NUM_PLACES)
    ]


def _replayed(event: dict[str, Any], live: dict[int, dict[str, Any]]) -> int:
    """Replay an action on what is allocated, by address, and return by how many bytes that has
    changed.
    """
    if event["action"] == "alloc":
        live[event["addr"]] = event
        return int(event["size"])
    if event["action"] == "free_requested" and event["addr"] in live:
        return -int(live.pop(event["addr"])["size"])
    return 0


def count_events(trace: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Count the events of a Chrome trace by the phase of the host that caused them.

    Returns:
        ``steps`` and ``draft_levels``, the number of each; and ``per_step`` and
        ``per_draft_level``: by phase, mean numbers of ``kernels``, ``copies`` and ``fills`` on the
            device, ``operators`` of torch that the host ran, and
        ``waits`` of the host for the device.
    """
    events = [event for event in trace if event.get("ph") == "X"]
    spans = _spans(events)
    callers = {  # correlation id -> when the host caused it
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    counted = {name: Counter[str]() for name in spans}
    for event in events:
        kind = _kind(event)
        at = event["ts"]
        if kind is None:
            continue
        if kind in KINDS.values():
            at = callers.get(event.get("args", {}).get("correlation"), at)
        for name, own in spans.items():
            index = bisect.bisect_right(own, (at, float("inf"))) - 1
            counted[name][kind] += index >= 0 and at <= own[index][1]
    num_steps = len(spans[STEP])
    num_levels = len(spans[LEVEL])
    return {
        "steps": num_steps,
        "draft_levels": num_levels,
        "per_step": {
            name: _mean(counted[name], num_steps)
            for name in spans
            if name not in (LEVEL, "forward")
        },
        "per_draft_level": _mean(counted[LEVEL], num_levels),
    }


def _spans(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """Return the sorted spans of the host's phases; forwards while drafting are draft levels."""
    spans: dict[str, list[Span]] = {name: [] for name in (*METHODS, LEVEL)}
    for event in events:
        name = str(event.get("name", "")).removeprefix(PREFIX)
        if event.get("cat") == "user_annotation" and name in METHODS:
            spans[name].append((event["ts"], event["ts"] + event["dur"]))
    for own in spans.values():
        own.sort()
    spans[LEVEL] = [
        span
        for span in spans["forward"]
        if any(a <= span[0] and span[1] <= b for a, b in spans["draft"])
    ]
    return spans


def _kind(event: dict[str, Any]) -> str | None:
    category = event.get("cat")
    name = str(event.get("name", ""))
    if category in ("cuda_runtime", "cuda_driver"):
        return "waits" if "Synchronize" in name else None
    return "operators" if category == "cpu_op" else KINDS.get(str(category))


def _mean(counted: Counter[str], number: int) -> dict[str, float]:
    return {kind: round(count / number, 2) for kind, count in counted.items() if count}


def _labelled(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                return method(*args, **kwargs)

        return run

    return wrap
