"""Autoscaling by guarantees: replicas are added while SLOs are not guaranteed or missed, not by
numbers of requests.

Serve's controller gets this module by value and may lack this package, so the module must not
import from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Replicas are added if a larger share of recent SLOs is missed, or a larger share of a batch waits
UP = 0.05
LOW = 0.6  # a replica is removed if the utilisation of the remaining ones stays below this
GAUGES = ("missed", "waiting", "utilisation")


def wanted_replicas(current: int, missed: float, waiting: float, utilisation: float) -> int:
    """Return how many replicas there should be.

    Shares are averages over the replicas. Serve applies the number after its delays.

    Args:
        current: replicas now, at least 1.
        missed: share of recent requests with SLOs whose SLOs were not guaranteed, or guaranteed and
            missed.
        waiting: requests that wait for room, as a share of the largest batch.
        utilisation: largest share in use of a replica's time, K/V and batch.
    """
    if missed > UP or waiting > UP:
        lacking = min(
            max(missed, waiting), 0.5
        )  # at most double: under overload all SLOs are missed
        return max(math.ceil(current / (1.0 - lacking)), current + 1)
    if current > 1 and not missed and not waiting and utilisation * current / (current - 1) < LOW:
        return current - 1
    return current


def by_guarantees(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for Serve's controller, and no state; ``context`` is an
    AutoscalingContext.
    """
    current = max(context.target_num_replicas, 1)
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    shares = (metrics.get(name, {}).values() for name in GAUGES)
    missed, waiting, utilisation = (sum(values) / max(len(values), 1) for values in shares)
    if context.total_queued_requests and not metrics:  # no replica has reported yet
        return current, {}
    wanted = wanted_replicas(current, missed, waiting, utilisation)
    if len(context.running_replicas) < current:  # replicas that are starting will take a part
        wanted = min(wanted, current)
    return min(
        max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas
    ), {}
