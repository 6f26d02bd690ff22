"""Records of steps, for metrics, plots, traces and the cost model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds by phase of one step, or summed over several."""

    draft_s: float = 0.0  # the drafter's forwards
    select_s: float = 0.0  # planning and selection
    verify_s: float = 0.0  # the target's forward and the choice of tokens
    host_s: float = 0.0  # accepting and committing

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return self.draft_s + self.select_s + self.verify_s + self.host_s

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            self.draft_s + other.draft_s,
            self.select_s + other.select_s,
            self.verify_s + other.verify_s,
            self.host_s + other.host_s,
        )


class Commit(NamedTuple):
    """Tokens that one step committed for a request. Accepted draft tokens come first, then the
    bonus token.
    """

    num_emitted: int  # new tokens of the request so far, those of the step included
    at_s: float  # on the engine's clock
    num_nodes: int  # nodes verified in the step, root included
    num_accepted: int  # accepted draft tokens of the step


@dataclass(frozen=True)
class RequestStep:
    """One request's part in a step."""

    index: int  # the request's index
    nodes: int  # nodes verified, root included
    committed: int  # tokens
    expected: float  # tokens that the policy expected
    tpot_slo_s: float | None  # TPOT SLO of the request's stage; None: no SLO
    elapsed_s: float  # since the stage began
    emitted: int  # tokens since the stage began


@dataclass(frozen=True)
class StepEvent:
    """One step of the engine. Times are seconds of the engine's monotonic clock."""

    begun_s: float
    num_decoding: int  # decoding requests
    depth: int  # draft levels planned; 0: no speculation
    width: int  # planned beam width per request
    phases: PhaseTimes
    predicted_s: float  # seconds that the policy expected; 0: it made no prediction
    # Requests that chose tokens: decoding ones, then those that finished prefill.
    requests: tuple[RequestStep, ...]
    prefill_tokens: int = 0  # in the same forward
    num_keys: int = 0  # cached tokens of the decoding requests
    num_drafted_for: int = 0  # requests passed to the drafter
    num_catch_up: int = 0  # their committed tokens that were new to the drafter
    draft_levels: int = 0  # depth of the deepest candidate tree
    level_share: float = (
        1.0  # mean share of the requests drafted for that levels after the first draft for
    )

    @property
    def is_prefill(self) -> bool:
        """Return whether the step decoded nothing."""
        return self.num_decoding == 0

    @property
    def decoding(self) -> tuple[RequestStep, ...]:
        """Requests that decoded; the others finished their prefill."""
        return self.requests[: self.num_decoding]

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's forward: nodes of decoding requests, and prefill tokens."""
        return sum(request.nodes for request in self.decoding) + self.prefill_tokens

    @property
    def committed(self) -> int:
        """Tokens committed, over all requests."""
        return sum(request.committed for request in self.requests)

    @property
    def nodes(self) -> int:
        """Nodes verified over all requests, roots included, as the token budget counts them."""
        return sum(request.nodes for request in self.requests)


PHASES = ("draft", "select", "verify", "host")


def write_chrome_trace(steps: Iterable[StepEvent], path: Path | str) -> None:
    """Write steps into a JSON file for a trace viewer.

    Args:
        steps: ``output.steps`` of one or several calls.
        path: the file, which is overwritten.
    """
    Path(path).write_text(
        json.dumps({"traceEvents": list(_events(steps)), "displayTimeUnit": "ms"}), encoding="utf-8"
    )


def _events(steps: Iterable[StepEvent]) -> Iterable[dict[str, Any]]:
    for number, step in enumerate(steps):
        begun_s = step.begun_s
        shape = {
            "step": number,
            "depth": step.depth,
            "width": step.width,
            "predicted_ms": step.predicted_s * 1e3,
        }
        # select_s also contains planning, which happens before drafting but is shown after it.
        for phase in PHASES:
            duration_s = getattr(step.phases, f"{phase}_s")
            name = "prefill" if step.is_prefill and phase == "verify" else phase
            yield _span(name, "steps", phase, begun_s, duration_s, shape)
            begun_s += duration_s
        for request in step.requests:
            counts = {
                "nodes": request.nodes,
                "committed": request.committed,
                "expected": round(request.expected, 2),
            }
            name = f"+{request.committed} of {request.nodes}"
            yield _span(
                name,
                "requests",
                f"request {request.index}",
                step.begun_s,
                step.phases.total_s,
                counts,
            )


def _span(
    name: str, process: str, lane: str, begun_s: float, duration_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    times_us = {"ts": begun_s * 1e6, "dur": duration_s * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": lane, **times_us, "args": args}
