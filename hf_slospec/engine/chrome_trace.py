"""Steps as a Chrome trace (chrome://tracing, Perfetto): one lane per phase, one per request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_slospec.engine.events import StepEvent

PHASES = ("draft", "select", "verify", "host")


def write_chrome_trace(steps: Iterable[StepEvent], path: Path | str) -> None:
    """Write steps into a JSON file for a trace viewer.

    Args:
        steps: ``output.steps`` of one or several calls.
        path: the file, which is overwritten.
    """
    Path(path).write_text(json.dumps({"traceEvents": list(_events(steps)), "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(steps: Iterable[StepEvent]) -> Iterable[dict[str, Any]]:
    for number, step in enumerate(steps):
        begun_s = step.begun_s
        shape = {"step": number, "depth": step.depth, "width": step.width, "predicted_ms": step.predicted_s * 1e3}
        # select_s also contains planning, which happens before drafting but is shown after it.
        for phase in PHASES:
            duration_s = getattr(step.phases, f"{phase}_s")
            name = "prefill" if step.is_prefill and phase == "verify" else phase
            yield _span(name, "steps", phase, begun_s, duration_s, shape)
            begun_s += duration_s
        for request in step.requests:
            counts = {"nodes": request.nodes, "committed": request.committed, "expected": round(request.expected, 2)}
            name = f"+{request.committed} of {request.nodes}"
            yield _span(name, "requests", f"request {request.index}", step.begun_s, step.phases.total_s, counts)


def _span(
    name: str, process: str, lane: str, begun_s: float, duration_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    times_us = {"ts": begun_s * 1e6, "dur": duration_s * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": lane, **times_us, "args": args}
