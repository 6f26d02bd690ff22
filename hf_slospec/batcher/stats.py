"""Counts and latencies of a batcher: ``Telemetry`` counts them, ``Stats`` is a snapshot, and
Prometheus gets them under vLLM's names. The metrics of one request are in ``request/metrics.py``.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.errors import NotGuaranteedError
from hf_slospec.model.memory import MemoryUse
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.request import Request

RECENT = 1024  # percentiles are taken over this many requests, those that finished last
# Upper bounds of Prometheus histogram buckets: seconds per token or step, seconds per request, and
# tokens.
LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
)
TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Percentiles(BaseModel):
    """Percentiles over the last ``RECENT`` finished requests, in seconds."""

    p50: float
    p90: float
    p99: float


class Stats(BaseModel):
    """Snapshot of a batcher: its present load, and counts since it was first started."""

    model_config = ConfigDict(frozen=True)

    running: int = Field(description="Requests that hold K/V.")
    waiting: int = Field(description="Requests that wait for room, preempted ones included.")
    kv_tokens: int = Field(
        description="Tokens of running requests, whose K/V is held or computed next."
    )
    kept_tokens: int = Field(
        description="Tokens of finished requests whose K/V is kept for reuse by later ones."
    )
    kv_limit: int = Field(description="Maximum tokens of K/V.")
    memory: MemoryUse | None = Field(description="None before the batcher was first started.")
    forwards: dict[str, str] = Field(
        description="How the forwards of target and draft are computed: compiled, cuda_graphs, or eager with the "
        "reason."
    )
    finished: dict[str, int] = Field(
        description="Requests by finish reason: stop, length, cancelled, error."
    )
    attained: int = Field(description="Finished requests that met their SLOs.")
    missed: int = Field(description="Finished requests that missed an SLO.")
    guaranteed: int = Field(description="Finished requests whose SLOs had been guaranteed.")
    broken: int = Field(description="Guaranteed requests that missed an SLO.")
    declined: int = Field(
        description="Requests refused because their SLOs could not be guaranteed (must_guarantee)."
    )
    preempted: int = Field(description="Times that finished requests had been preempted.")
    steps: int
    prompt_tokens: int = Field(description="Prompt tokens of finished requests.")
    reused_tokens: int = Field(description="Prompt tokens whose K/V other requests had computed.")
    generated_tokens: int
    drafted_tokens: int = Field(
        description="Drafted tokens that were verified, of finished requests."
    )
    accepted_tokens: int = Field(description="Drafted tokens that were accepted.")
    drafts: int = Field(description="Draft trees that were verified, of finished requests.")
    accepted_per_position: list[int] = Field(
        description="Of these trees, those of which a token was accepted at the first level, at the second, and so on."
    )
    tokens_per_step: float = Field(
        description="Tokens committed per decoding request and step (acceptance length)."
    )
    ttft_s: Percentiles | None = Field(description="Time to the first token.")
    tpot_s: Percentiles | None = Field(description="Time per output token.")


COUNTS = (  # counters of Telemetry whose names are fields of Stats
    *("attained", "missed", "guaranteed", "broken", "declined", "preempted", "steps"),
    *("prompt_tokens", "reused_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens"),
)
COUNTERS = {  # Prometheus name, as in vLLM -> description, field of Stats
    "prompt_tokens": ("Prompt tokens of finished requests.", "prompt_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up among kept texts.", "prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens whose K/V was there.", "reused_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "spec_decode_num_drafts": ("Draft trees verified.", "drafts"),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", "drafted_tokens"),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", "accepted_tokens"),
    "num_preemptions": ("Times a request was preempted.", "preempted"),
    "slo_attained": ("Finished requests that met their SLOs.", "attained"),
    "slo_missed": ("Finished requests that missed an SLO.", "missed"),
    "slo_guarantees_broken": ("Guaranteed requests that missed an SLO.", "broken"),
    "slo_guarantees_declined": (
        "Requests refused as their SLOs could not be guaranteed.",
        "declined",
    ),
}
HISTOGRAMS = {  # Prometheus name, as in vLLM -> buckets
    **dict.fromkeys(("time_to_first_token_seconds", "e2e_request_latency_seconds"), TIME_BUCKETS),
    **{
        f"request_{phase}_time_seconds": TIME_BUCKETS
        for phase in ("queue", "prefill", "decode", "inference")
    },
    **dict.fromkeys(
        ("time_per_output_token_seconds", "inter_token_latency_seconds", "step_seconds"),
        LATENCY_BUCKETS,
    ),
    **dict.fromkeys(
        ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
        TOKEN_BUCKETS,
    ),
    "iteration_tokens_total": TOKEN_BUCKETS,
}
SAME = {  # another name that vLLM has for a histogram -> its name in HISTOGRAMS
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "request_max_num_generation_tokens": "request_generation_tokens",
}


class _Histogram:
    """Histogram with the buckets that Prometheus expects."""

    def __init__(self, buckets: tuple[float, ...]):
        self.buckets = buckets
        self.counts = np.zeros(len(buckets) + 1, np.int64)
        self.sum = 0.0

    def observe(self, *values: float) -> None:
        places = np.searchsorted(self.buckets, values)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.sum += sum(values)

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*map(str, self.buckets), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class Telemetry:
    """Counters of a batcher: its thread updates them, and any thread may read them."""

    def __init__(self) -> None:
        self._lock = FairLock()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        # Number of accepted tokens -> number of draft trees.
        self._accepted_lengths: Counter[int] = Counter()
        self._ttft_s: deque[float] = deque(maxlen=RECENT)
        self._tpot_s: deque[float] = deque(maxlen=RECENT)
        self._histograms = {name: _Histogram(buckets) for name, buckets in HISTOGRAMS.items()}

    def on_step(self, step: StepEvent) -> None:
        """Add a step to the counters."""
        with self._lock:
            self._counts.update(
                steps=1,
                generated_tokens=step.committed,
                request_steps=step.num_decoding,
                decoded=sum(request.committed for request in step.decoding),
            )
            self._histograms["step_seconds"].observe(step.phases.total_s)
            self._histograms["iteration_tokens_total"].observe(step.num_tokens)

    def on_end(self, request: Request) -> None:
        """Add a request that has ended to the counters."""
        metrics = request.metrics()
        stats = request.stats
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
            self._accepted_lengths.update(
                commit.num_accepted for commit in stats.commits if commit.num_nodes > 1
            )
            if stats.first_token_s is None or metrics.ttft_s is None:
                return
            self._ttft_s.append(metrics.ttft_s)
            if metrics.tpot_s is not None:
                self._tpot_s.append(metrics.tpot_s)
            for name, value in _observations(request, metrics).items():
                self._histograms[name].observe(value)
            times_s = np.array([commit.at_s for commit in stats.commits])
            self._histograms["inter_token_latency_seconds"].observe(*np.diff(times_s).tolist())
            if metrics.attained is not None and request.finish_reason in ("stop", "length"):
                self._counts["attained" if metrics.attained else "missed"] += 1
                self._counts["guaranteed"] += metrics.guaranteed
                self._counts["broken"] += metrics.guaranteed and not metrics.attained

    def stats(self, **present: Any) -> Stats:
        """Return a snapshot.

        Args:
            present: fields of :class:`Stats` that describe the batcher's present load.
        """
        with self._lock:
            counts = self._counts
            return Stats(
                **present,
                finished=dict(self._finished),
                drafts=self._accepted_lengths.total(),
                accepted_per_position=_per_position(self._accepted_lengths),
                tokens_per_step=counts["decoded"] / max(counts["request_steps"], 1),
                ttft_s=_percentiles(self._ttft_s),
                tpot_s=_percentiles(self._tpot_s),
                **{name: counts[name] for name in COUNTS},
            )

    def families(self, stats: Stats, prefix: str) -> Iterator[Any]:
        """Yield Prometheus metric families for a snapshot and the histograms; needs the extra
        ``metrics``.
        """
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        compiled = {model: path == "compiled" for model, path in stats.forwards.items()}
        for kind, name, text, values in (
            (GaugeMetricFamily, "num_requests_running", "Requests that hold K/V.", stats.running),
            (
                GaugeMetricFamily,
                "num_requests_waiting",
                "Requests that wait for room.",
                stats.waiting,
            ),
            (
                GaugeMetricFamily,
                "kv_cache_usage_perc",
                "Share of the K/V limit in use, 0 to 1.",
                stats.kv_tokens / max(stats.kv_limit, 1),
            ),
            (GaugeMetricFamily, "compiled", "Forwards are compiled, 0 or 1.", ("model", compiled)),
            *(
                (CounterMetricFamily, name, text, getattr(stats, field))
                for name, (text, field) in COUNTERS.items()
            ),
            (
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft trees of which a token at this level, from 0 on, was accepted.",
                ("position", dict(enumerate(stats.accepted_per_position or [0]))),
            ),
            (
                CounterMetricFamily,
                "request_success",
                "Requests by finish reason.",
                ("finished_reason", stats.finished),
            ),
        ):
            if not isinstance(values, tuple):
                yield kind(prefix + name, text, value=values)
                continue
            label, by_label = values
            family = kind(prefix + name, text, labels=[label])
            for key, value in by_label.items():
                family.add_metric([str(key)], value)
            yield family
        with self._lock:
            histograms = {
                name: (each.cumulative(), each.sum) for name, each in self._histograms.items()
            }
        histograms |= {name: histograms[same] for name, same in SAME.items()}
        for name, (buckets, total) in histograms.items():
            yield HistogramMetricFamily(
                prefix + name, name.replace("_", " "), buckets=buckets, sum_value=total
            )


class Collector:
    """Collector to register with ``prometheus_client``, which calls its ``collect``."""

    def __init__(self, families: Callable[[], Iterator[Any]]):
        self.collect = families


def with_labels(families: Iterable[Any], **labels: str) -> Iterator[Any]:
    """Add labels to all samples of Prometheus metric families, and yield the families."""
    for family in families:
        family.samples = [
            sample._replace(labels=sample.labels | labels) for sample in family.samples
        ]
        yield family


def _observations(request: Request, metrics: RequestMetrics) -> dict[str, float]:
    """Return one value per histogram, by the histogram's name, of a request that emitted a
    token.
    """
    stats = request.stats
    first_s = stats.first_token_s or 0.0
    observations: dict[str, float | None] = {
        "time_to_first_token_seconds": metrics.ttft_s,
        "time_per_output_token_seconds": metrics.tpot_s,
        "e2e_request_latency_seconds": metrics.e2e_s,
        "request_decode_time_seconds": stats.last_token_s - first_s,
        "request_prompt_tokens": request.prompt_len,
        "request_generation_tokens": metrics.tokens,
        "request_params_max_tokens": request.params.max_new_tokens,
    }
    # A resumed request waited in the queue of another engine, whose times are not known here.
    if stats.entered_s is not None and not metrics.resumed:
        observations["request_queue_time_seconds"] = stats.entered_s - stats.arrived_s
        observations["request_prefill_time_seconds"] = first_s - stats.entered_s
        observations["request_inference_time_seconds"] = stats.last_token_s - stats.entered_s
    return {name: value for name, value in observations.items() if value is not None}


def _per_position(lengths: Counter[int]) -> list[int]:
    """Return, for each level of draft trees, in how many trees a token of that level was accepted.

    Args:
        lengths: number of trees by the number of their accepted tokens.
    """
    levels = range(max(lengths, default=0))
    return [sum(count for length, count in lengths.items() if length > level) for level in levels]


def _percentiles(values: deque[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(np.array(values), (50, 90, 99)).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)
