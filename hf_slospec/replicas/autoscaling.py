"""Autoscaling policy for Ray Serve: it adds replicas while SLOs cannot be guaranteed or are missed,
whatever the number of requests.

Serve's controller gets this module pickled by value and may run without this package, so the module
must not import from the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Replicas are added if more than this share of the recent requests with SLOs missed them, or if the
# waiting requests are more than this share of the maximum batch
UP = 0.05
LOW = 0.6  # a replica is removed if the remaining ones' utilisation would be below this
# Names of the gauges that ModelReplica.record_autoscaling_stats returns
GAUGES = ("missed", "waiting", "utilisation")


def wanted_replicas(current: int, missed: float, waiting: float, utilisation: float) -> int:
    """Return the number of replicas to scale to.

    All arguments except ``current`` are averages over the replicas. Serve applies the returned
    number after its upscale or downscale delay.

    Args:
        current: current number of replicas, at least 1.
        missed: share of the recent requests with SLOs whose SLOs were not guaranteed, or were
            guaranteed and missed.
        waiting: number of waiting requests divided by the maximum batch size.
        utilisation: the largest of three ratios: expected TPOT to the tightest guaranteed SLO, used
            K/V slots to all slots, and running requests to the maximum batch size.
    """
    if missed > UP or waiting > UP:
        # At most double the replicas: under overload all SLOs are missed, however few are lacking
        lacking = min(max(missed, waiting), 0.5)
        return max(math.ceil(current / (1.0 - lacking)), current + 1)
    if current > 1 and not missed and not waiting and utilisation * current / (current - 1) < LOW:
        return current - 1
    return current


def by_guarantees(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas to scale to, and an empty policy state; Serve's controller
    calls this with an AutoscalingContext.
    """
    current = max(context.target_num_replicas, 1)
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    shares = (metrics.get(name, {}).values() for name in GAUGES)
    missed, waiting, utilisation = (sum(values) / max(len(values), 1) for values in shares)
    if context.total_queued_requests and not metrics:  # no replica has reported yet
        return current, {}
    wanted = wanted_replicas(current, missed, waiting, utilisation)
    if len(context.running_replicas) < current:  # starting replicas will take part of the load
        wanted = min(wanted, current)
    return min(
        max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas
    ), {}
