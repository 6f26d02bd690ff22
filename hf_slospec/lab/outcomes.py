"""Results of a simulated load, by request, by class and overall."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.lab.workload import Job
from hf_slospec.request.request import Request


@dataclass(frozen=True)
class Outcome:
    """Result of one request. Times are seconds of the virtual clock."""

    index: int
    kind: str
    replica: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    first_token_s: float
    decode_begun_s: float  # beginning of the first decode step
    finish_s: float
    steps: int  # verify steps after the prefill
    drafted: int  # draft nodes that were verified, roots not counted
    accepted: int  # draft nodes that were committed
    guaranteed: bool
    preempted: int  # times the request was preempted
    reroutes: int  # number of replicas that refused to guarantee its SLOs
    tpot_s: float | None  # measured
    ttft_s: float
    worst_tpot_s: float | None  # maximum over any 10 consecutive tokens
    attained: bool | None  # by the definition of RequestMetrics
    window_guarantee: float | None  # probability that was guaranteed for windows_kept
    windows_kept: bool | None  # every window of 10 tokens met the TPOT SLO
    think_tokens: int  # output tokens before the answer, whose SLO is tpot_slo_s
    reused: int  # prompt tokens whose K/V was cached

    @classmethod
    def of(
        cls, request: Request, job: Job, replica: int, decode_begun_s: float, reroutes: int
    ) -> Outcome:
        """Return the result of a finished request."""
        metrics = request.metrics()
        stats = request.stats
        values = {
            **vars(job),
            **vars(metrics),
            "index": request.index,
            "replica": replica,
            "output_tokens": metrics.tokens,
            "first_token_s": math.nan if stats.first_token_s is None else stats.first_token_s,
            "decode_begun_s": decode_begun_s,
            "finish_s": stats.last_token_s,
            "reroutes": reroutes,
            "ttft_s": math.nan if metrics.ttft_s is None else metrics.ttft_s,
        }
        return cls(**{each.name: values[each.name] for each in fields(cls)})


Metric = Callable[[Outcome], bool | None]


def attained(outcome: Outcome) -> bool | None:
    """Return whether the request attained its SLOs by this package's definition.

    TPOT is (last token - first token) / (tokens - 1); TTFT counts if the request has a TTFT SLO.
    """
    return outcome.attained


def adaserve_attained(outcome: Outcome) -> bool | None:
    """Return whether (finish - first decode iteration) / tokens is within the TPOT SLO (AdaServe).

    Queueing and prefill do not count. AdaServe has no SLO stages: requests with a thinking stage
    are judged by :func:`attained`."""
    if outcome.think_tokens:
        return outcome.attained
    if outcome.tpot_slo_s is None:
        return None
    return (outcome.finish_s - outcome.decode_begun_s) / outcome.output_tokens <= outcome.tpot_slo_s


def slos_serve_attained(outcome: Outcome) -> bool | None:
    """Return whether TTFT and the TPOT of any 10 consecutive tokens of a stage are within the SLOs
    (SLOs-Serve).
    """
    if outcome.think_tokens:
        return (
            None
            if outcome.attained is None
            else outcome.attained and outcome.windows_kept is not False
        )
    if outcome.tpot_slo_s is None and outcome.ttft_slo_s is None:
        return None
    is_late = outcome.ttft_slo_s is not None and outcome.ttft_s > outcome.ttft_slo_s
    worst_s = outcome.tpot_s if outcome.worst_tpot_s is None else outcome.worst_tpot_s
    is_slow = (
        outcome.tpot_slo_s is not None and worst_s is not None and worst_s > outcome.tpot_slo_s
    )
    return not (is_late or is_slow)


METRICS: dict[str, Metric] = {
    "tpot": attained,
    "adaserve": adaserve_attained,
    "slos-serve": slos_serve_attained,
}


@dataclass
class Totals:
    """Sums over the decode steps of a run, and number and seconds of steps that only prefill."""

    num_steps: int = 0
    num_prefills: int = 0
    prefill_s: float = 0.0
    requests: int = 0  # decoding requests
    nodes: int = 0  # nodes verified for decoding requests, roots included
    committed: int = 0  # tokens of decoding requests
    expected: float = 0.0  # tokens that the policy expected to commit
    depth: int = 0  # draft levels
    phases: PhaseTimes = field(default_factory=PhaseTimes)

    def add(self, event: StepEvent) -> None:
        if event.is_prefill:
            self.num_prefills += 1
            self.prefill_s += event.phases.total_s
            return
        self.phases += event.phases
        self.num_steps += 1
        self.requests += event.num_decoding
        self.depth += event.depth
        self.nodes += sum(part.nodes for part in event.decoding)
        self.committed += sum(part.committed for part in event.decoding)
        self.expected += sum(part.expected for part in event.decoding)


@dataclass(frozen=True)
class Run:
    """Results of one load on one system."""

    system: str
    outcomes: tuple[Outcome, ...]
    totals: Totals
    not_guaranteed: int  # requests whose SLOs no replica guaranteed

    def summary(self, metric: Metric = attained) -> dict[str, Any]:
        """Return the figures of the whole load and, under ``kinds``, of each class of requests."""
        kinds = sorted({outcome.kind for outcome in self.outcomes})
        totals = self.totals
        steps = max(self.totals.num_steps, 1)
        return {
            **_figures(self.outcomes, metric, self.seconds),
            "seconds": self.seconds,
            "tokens_per_request_and_step": totals.committed / max(totals.requests, 1),
            "expected_per_request_and_step": totals.expected / max(totals.requests, 1),
            "nodes_per_step": totals.nodes / steps,
            "requests_per_step": totals.requests / steps,
            "depth": totals.depth / steps,
            "step_ms": 1e3 * totals.phases.total_s / steps,
            "draft_share": totals.phases.draft_s / max(totals.phases.total_s, 1e-12),
            "not_guaranteed": self.not_guaranteed,
            "kinds": {
                kind: _figures(
                    [outcome for outcome in self.outcomes if outcome.kind == kind],
                    metric,
                    self.seconds,
                )
                for kind in kinds
            },
        }

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        first_s = min(outcome.arrival_s for outcome in self.outcomes)
        return max(outcome.finish_s for outcome in self.outcomes) - first_s


def _figures(outcomes: Sequence[Outcome], metric: Metric, seconds: float) -> dict[str, Any]:
    verdicts = [metric(outcome) for outcome in outcomes]
    judged = [verdict for verdict in verdicts if verdict is not None]
    good = sum(
        outcome.output_tokens
        for outcome, verdict in zip(outcomes, verdicts, strict=True)
        if verdict
    )
    tpots_ms = [1e3 * outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    ttfts_s = [outcome.ttft_s for outcome in outcomes]
    return {
        "requests": len(outcomes),
        "attainment": sum(judged) / len(judged) if judged else None,
        "goodput": good / seconds,  # tokens/s of the requests that attained their SLOs
        "throughput": sum(outcome.output_tokens for outcome in outcomes) / seconds,
        "tpot_ms": float(np.mean(tpots_ms)) if tpots_ms else None,
        "tpot_p99_ms": float(np.percentile(tpots_ms, 99)) if tpots_ms else None,
        "ttft_s": float(np.mean(ttfts_s)),
        "ttft_p99_s": float(np.percentile(ttfts_s, 99)),
        "latency_s": float(np.mean([outcome.finish_s - outcome.arrival_s for outcome in outcomes])),
        "guaranteed": sum(outcome.guaranteed for outcome in outcomes) / len(outcomes),
        "preempted": sum(outcome.preempted for outcome in outcomes),
    }


def write_requests(runs: Sequence[tuple[str, Run]], metric: Metric, path: Path) -> None:
    """Write a line of CSV for every request of every run.

    Args:
        runs: pairs of a load's label and a run under this load.
        metric: definition of attainment for the column ``attained``.
        path: the CSV file, which is overwritten.
    """
    names = [field.name for field in fields(Outcome)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["load", "system", *names])
        writer.writeheader()
        for load, run in runs:
            for outcome in run.outcomes:
                row = asdict(outcome) | {"attained": metric(outcome)}
                writer.writerow({"load": load, "system": run.system, **row})
