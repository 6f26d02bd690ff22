"""Serving systems by name (settings of policy, admission and prefill), and routers, which send
requests to replicas.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError, describe_validation_error
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.scheduler.load import POWER, Need, ReplicaLoad, ranked

UNCHUNKED: dict[str, Any] = dict(
    admission="fcfs", prefill="first", prefill_chunk=8192, max_batch=256
)
CHUNKED: dict[str, Any] = dict(
    admission="fcfs", prefill="chunked", prefill_chunk=2048, max_batch=256
)
# token_budget, the paper's B: 256 reproduces its figure 8 under the simulator's latencies; the
# released code has 512, see docs/papers.md.
ADASERVE: dict[str, Any] = dict(
    policy="adaserve", max_depth=8, max_width=3, token_budget=256, draft_budget=96,
    admission="fcfs", prefill="first", prefill_chunk=1024, max_batch=64,
)  # fmt: skip

# Oracles: their policies know the texts, so no SLOSpecConfig can name them
ORACLE = "oracle"
ADASERVE_ORACLE = "adaserve-oracle"
SYSTEMS: dict[str, dict[str, Any]] = {
    "auto": {},
    ORACLE: {},
    "vllm": dict(policy="none", **UNCHUNKED),
    "vllm-priority": dict(policy="none", **{**UNCHUNKED, "admission": "priority"}),
    **{
        f"vllm-spec{depth}": dict(policy="fixed", max_depth=depth, max_width=1, **UNCHUNKED)
        for depth in (2, 4, 6, 8)
    },
    "vllm-adaptive": dict(policy="vllm-adaptive", max_depth=7, max_width=1, **UNCHUNKED),
    "sarathi": dict(policy="none", **CHUNKED),
    "adaserve": ADASERVE,
    ADASERVE_ORACLE: ADASERVE,
    **{
        name: dict(policy=name, max_depth=8, max_width=1, **UNCHUNKED)
        for name in ("smartspec", "turbospec", "adaspec")
    },
    # guarantee: the paper's TPOT SLOs apply to every window of ten tokens.
    "slos-serve": dict(
        policy="slos-serve", max_depth=8, max_width=1, admission="slo", guarantee=0.9
    ),
}


def config_of(system: str) -> SLOSpecConfig:
    """Return the config of a system, given as a name, as a name with settings that override the
    system's (``auto {"max_depth": 4}``), or as settings alone.

    Raises:
        InvalidInputError: there is no such system, or the settings are invalid.
    """
    name, brace, settings = system.partition("{")
    name = name.strip()
    if name not in SYSTEMS and (name or not brace):
        raise InvalidInputError(f"unknown system {name!r}; known are: {', '.join(SYSTEMS)}")
    try:
        overrides = json.loads(brace + settings) if brace else {}
        return SLOSpecConfig.model_validate({**SYSTEMS.get(name, {}), **overrides})
    except json.JSONDecodeError as error:
        column = system.index("{") + error.colno
        raise InvalidInputError(f"system {system!r}: column {column}: {error.msg}") from error
    except ValidationError as error:
        raise InvalidInputError(f"system {system!r}: {describe_validation_error(error)}") from error
    except (
        RecursionError,
        ValueError,
    ) as error:  # nested too deeply, or a number with too many digits
        raise InvalidInputError(f"system {system[:40]!r}: {error}") from error


def is_oracle(system: str) -> bool:
    """Return whether the system is an oracle, with or without other settings."""
    return system.partition("{")[0].strip() in (ORACLE, ADASERVE_ORACLE)


@dataclass(frozen=True)
class Arrival:
    """A request at the router, with the information that routers may use."""

    request: Request
    need: Need
    loads: Sequence[ReplicaLoad]  # as reported by each replica
    refused_by: Sequence[int]  # indices of replicas that did not guarantee its SLOs
    schedulers: Sequence[ContinuousScheduler]  # for the oracle only
    now_s: float


@dataclass(frozen=True)
class Destination:
    """The replica that a router sends a request to."""

    replica: int
    # The replica may return the request to the router instead of guaranteeing its SLOs
    may_refuse: bool = False


Router = Callable[[Arrival], Destination]
# Times that a refused request is sent on to the next replica; SLOs-Serve's paper, which has up to
# four replicas, gives no number.
MAX_HOPS = 3
# Need of a request without SLOs: ranked() sorts replicas by unfinished requests, then by prefill
WITHOUT_SLO = Need(0, 0)


def by_guarantees(arrival: Arrival) -> Destination:
    """Return the best-ranked replica that has not refused the request; for a request without SLOs,
    or if all replicas have refused it, the least loaded one.
    """
    if not arrival.need.has_slo or len(arrival.refused_by) == len(arrival.loads):
        return Destination(ranked(arrival.loads, WITHOUT_SLO)[0])
    order = ranked(arrival.loads, arrival.need)
    return Destination(
        next(index for index in order if index not in arrival.refused_by), may_refuse=True
    )


def sequential(seed: int) -> Router:
    """Return SLOs-Serve's router: requests go to the replicas in turn, and a refused request moves
    on to the next replica.

    A request that has moved on :data:`MAX_HOPS` times, or that all replicas have refused, stays at
    the last one as best effort."""
    number = itertools.count()

    def choose(arrival: Arrival) -> Destination:
        if not arrival.refused_by:
            return Destination(next(number) % len(arrival.loads), may_refuse=arrival.need.has_slo)
        last = arrival.refused_by[-1]
        if len(arrival.refused_by) > min(MAX_HOPS, len(arrival.loads) - 1):
            return Destination(last)
        return Destination((last + 1) % len(arrival.loads), may_refuse=True)

    return choose


def by_full_knowledge(arrival: Arrival) -> Destination:
    """Return the replica whose requests the new request endangers least: the sum of (expected time
    / SLO) ** POWER over all SLOs of its requests rises least.

    Besides the reported loads, this uses the current state of every replica, and the progress and
    output length of every request.
    """
    costs = [
        _closeness(arrival, index, True) - _closeness(arrival, index, False)
        for index in range(len(arrival.loads))
    ]
    return Destination(int(np.argmin(costs)))


def _closeness(arrival: Arrival, index: int, is_added: bool) -> float:
    """Return the sum of (expected time / SLO) ** POWER over all SLOs of a replica's requests,
    including the arriving request if ``is_added``.
    """
    scheduler = arrival.schedulers[index]
    load = arrival.loads[index]
    requests = [*scheduler.running, *scheduler.waiting, *([arrival.request] if is_added else [])]
    prefill_tokens = sum(request.num_uncached for request in requests if not request.is_decoding)
    prefill_s = load.step_s(prefill_tokens) if prefill_tokens else 0.0
    token_s = load.decoding_s(len(requests))
    total = 0.0
    for request in requests:
        elapsed_s, emitted = request.decoded(arrival.now_s) if request.num_emitted else (0.0, 0)
        if request.pace_s is not None:
            left_s = request.num_left * token_s + prefill_s
            total += (
                (elapsed_s + left_s) / (request.pace_s * (emitted + request.num_left))
            ) ** POWER
        if request.params.ttft_slo_s is not None and not request.num_emitted:
            total += (
                (arrival.now_s - request.stats.arrived_s + prefill_s) / request.params.ttft_slo_s
            ) ** POWER
    return total


def round_robin(seed: int) -> Router:
    """Return a router that sends requests to the replicas in turn."""
    number = itertools.count()
    return lambda arrival: Destination(next(number) % len(arrival.loads))


def by_shortest_queue(arrival: Arrival) -> Destination:
    """Return the first replica with the fewest unfinished requests."""
    return Destination(int(np.argmin([load.num_requests for load in arrival.loads])))


def power_of_two(seed: int) -> Router:
    """Return a router that draws two replicas and takes the one with fewer unfinished requests."""
    rng = np.random.default_rng([seed, 2])

    def choose(arrival: Arrival) -> Destination:
        pair = rng.choice(len(arrival.loads), 2, replace=False).tolist()
        return Destination(min(pair, key=lambda index: arrival.loads[index].num_requests))

    return choose


OURS = "guarantees"
ROUTERS: dict[str, Callable[[int], Router]] = {  # name -> function from a seed to a router
    OURS: lambda seed: by_guarantees,
    "shortest-queue": lambda seed: by_shortest_queue,
    "power-of-two": power_of_two,
    "round-robin": round_robin,
    "sequential": sequential,
    "oracle": lambda seed: by_full_knowledge,
}


def router_of(name: str, seed: int) -> Router:
    """Return a router by its name.

    Raises:
        InvalidInputError: there is no router of this name.
    """
    if name not in ROUTERS:
        raise InvalidInputError(f"unknown router {name!r}; known are: {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)
