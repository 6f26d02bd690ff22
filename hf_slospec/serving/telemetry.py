"""Counters of a batcher: as a snapshot, and for Prometheus under vLLM's names."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.request import Request
from hf_slospec.errors import NotGuaranteedError
from hf_slospec.models.device.memory import MemoryUse

RECENT = 1024  # number of last finished requests that percentiles are taken over
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Percentiles(BaseModel):
    """Percentiles over recently finished requests, in seconds."""

    p50: float
    p90: float
    p99: float


class Stats(BaseModel):
    """Snapshot of a batcher. Counts are since it was first started."""

    model_config = ConfigDict(frozen=True)

    running: int = Field(description="Requests that hold K/V.")
    waiting: int = Field(description="Requests that wait for room, preempted ones included.")
    kv_tokens: int = Field(description="Tokens of K/V that running requests need at their longest.")
    kept_tokens: int = Field(description="Tokens of finished requests whose K/V is kept for reuse by later ones.")
    kv_limit: int = Field(description="Maximum tokens of K/V.")
    memory: MemoryUse | None = Field(description="None before the batcher was first started.")
    forwards: dict[str, str] = Field(
        description="How the forwards of target and draft are computed: compiled, or eager with the reason."
    )
    finished: dict[str, int] = Field(description="Requests by finish reason: stop, length, cancelled, error.")
    attained: int = Field(description="Finished requests that met their SLOs.")
    missed: int = Field(description="Finished requests that missed an SLO.")
    guaranteed: int = Field(description="Finished requests whose SLOs had been guaranteed.")
    broken: int = Field(description="Guaranteed requests that missed an SLO.")
    declined: int = Field(description="Requests refused because their SLOs could not be guaranteed (must_guarantee).")
    preempted: int = Field(description="Times that finished requests had been preempted.")
    steps: int
    prompt_tokens: int = Field(description="Prompt tokens of finished requests.")
    reused_tokens: int = Field(description="Prompt tokens whose K/V other requests had computed.")
    generated_tokens: int
    drafted_tokens: int = Field(description="Drafted tokens that were verified, of finished requests.")
    accepted_tokens: int = Field(description="Drafted tokens that were accepted.")
    tokens_per_step: float = Field(description="Tokens committed per decoding request and step (acceptance length).")
    ttft_s: Percentiles | None = Field(description="Time to the first token.")
    tpot_s: Percentiles | None = Field(description="Time per output token.")


COUNTS = (  # counters with the names of the fields of Stats
    *("attained", "missed", "guaranteed", "broken", "declined", "preempted", "steps"),
    *("prompt_tokens", "reused_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens"),
)


class _Histogram:
    """A Prometheus histogram."""

    def __init__(self, buckets: tuple[float, ...]):
        self.buckets, self.counts, self.sum = buckets, [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.buckets, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*map(str, self.buckets), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class Telemetry:
    """Counters that the batcher's thread writes and any thread reads."""

    def __init__(self) -> None:
        self._lock = FairLock()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._ttft_s: deque[float] = deque(maxlen=RECENT)
        self._tpot_s: deque[float] = deque(maxlen=RECENT)
        self._histograms = {
            "time_to_first_token_seconds": _Histogram(TIME_BUCKETS),
            "time_per_output_token_seconds": _Histogram(LATENCY_BUCKETS),
            "e2e_request_latency_seconds": _Histogram(TIME_BUCKETS),
            "step_seconds": _Histogram(LATENCY_BUCKETS),
        }

    def on_step(self, step: StepEvent) -> None:
        """Count a step."""
        with self._lock:
            self._counts.update(
                steps=1,
                generated_tokens=step.committed,
                request_steps=step.num_decoding,
                decoded=sum(request.committed for request in step.decoding),
            )
            self._histograms["step_seconds"].observe(step.phases.total_s)

    def on_end(self, request: Request) -> None:
        """Count a request that ended."""
        metrics, stats = request.metrics(), request.stats
        with self._lock:
            if isinstance(request.error, NotGuaranteedError):
                self._counts["declined"] += 1
                return
            self._finished[str(request.finish_reason)] += 1
            self._counts.update(
                prompt_tokens=request.prompt_len,
                reused_tokens=metrics.reused,
                drafted_tokens=metrics.drafted,
                accepted_tokens=metrics.accepted,
                preempted=metrics.preempted,
            )
            if metrics.ttft_s is None:
                return
            self._ttft_s.append(metrics.ttft_s)
            self._histograms["time_to_first_token_seconds"].observe(metrics.ttft_s)
            self._histograms["e2e_request_latency_seconds"].observe(stats.last_token_s - stats.arrived_s)
            if metrics.tpot_s is not None:
                self._tpot_s.append(metrics.tpot_s)
                self._histograms["time_per_output_token_seconds"].observe(metrics.tpot_s)
            if metrics.attained is not None and request.finish_reason in ("stop", "length"):
                self._counts["attained" if metrics.attained else "missed"] += 1
                self._counts["guaranteed"] += metrics.guaranteed
                self._counts["broken"] += metrics.guaranteed and not metrics.attained

    def stats(
        self,
        running: int,
        waiting: int,
        kv_tokens: int,
        kept_tokens: int,
        kv_limit: int,
        memory: MemoryUse | None,
        forwards: dict[str, str],
    ) -> Stats:
        """Return a snapshot; the arguments are the present state of the batcher."""
        with self._lock:
            counts = self._counts
            return Stats(
                running=running,
                waiting=waiting,
                kv_tokens=kv_tokens,
                kept_tokens=kept_tokens,
                kv_limit=kv_limit,
                memory=memory,
                forwards=forwards,
                finished=dict(self._finished),
                tokens_per_step=counts["decoded"] / max(counts["request_steps"], 1),
                ttft_s=_percentiles(self._ttft_s),
                tpot_s=_percentiles(self._tpot_s),
                **{name: counts[name] for name in COUNTS},
            )

    def families(self, stats: Stats, prefix: str) -> Iterator[Any]:
        """Yield Prometheus metric families; needs the extra ``metrics``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, text, value in (
            ("num_requests_running", "Requests that hold K/V.", stats.running),
            ("num_requests_waiting", "Requests that wait for room.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the K/V limit in use, 0 to 1.", stats.kv_tokens / max(stats.kv_limit, 1)),
        ):
            yield GaugeMetricFamily(prefix + name, text, value=value)
        compiled = GaugeMetricFamily(prefix + "compiled", "Forwards are compiled, 0 or 1.", labels=["model"])
        for model, path in stats.forwards.items():
            compiled.add_metric([model], path == "compiled")
        yield compiled
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of finished requests.", stats.prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up among kept texts.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens whose K/V was there.", stats.reused_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens),
            ("num_preemptions", "Times a request was preempted.", stats.preempted),
            ("slo_attained", "Finished requests that met their SLOs.", stats.attained),
            ("slo_missed", "Finished requests that missed an SLO.", stats.missed),
            ("slo_guarantees_broken", "Guaranteed requests that missed an SLO.", stats.broken),
            ("slo_guarantees_declined", "Requests refused as their SLOs could not be guaranteed.", stats.declined),
        ):
            yield CounterMetricFamily(prefix + name, text, value=value)
        finished = CounterMetricFamily(
            prefix + "request_success", "Requests by finish reason.", labels=["finished_reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        with self._lock:
            histograms = [(name, each.cumulative(), each.sum) for name, each in self._histograms.items()]
        for name, buckets, total in histograms:
            yield HistogramMetricFamily(prefix + name, name.replace("_", " "), buckets=buckets, sum_value=total)


class Collector:
    """A collector as ``prometheus_client`` expects it."""

    def __init__(self, families: Callable[[], Iterator[Any]]):
        self.collect = families


def _percentiles(values: deque[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(np.array(values), (50, 90, 99)).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)
