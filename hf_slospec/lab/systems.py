"""Serving systems by name: settings of policy, admission and prefill."""

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
# B = 256 reproduces the paper's figure 8 under the simulator's latencies; the artifact has 512, see
# docs/papers.md.
ADASERVE: dict[str, Any] = dict(
    policy="adaserve", max_depth=8, max_width=3, token_budget=256, draft_budget=96,
    admission="fcfs", prefill="first", prefill_chunk=1024, max_batch=64,
)  # fmt: skip

ORACLE, ADASERVE_ORACLE = (
    "oracle",
    "adaserve-oracle",
)  # their policies need the texts, so no config can name them
SYSTEMS: dict[str, dict[str, Any]] = {
    "auto": {},
    ORACLE: {},
    "vllm": dict(policy="none", **UNCHUNKED),
    "vllm-priority": dict(policy="none", **{**UNCHUNKED, "admission": "priority"}),
    "vllm-spec2": dict(policy="fixed", max_depth=2, max_width=1, **UNCHUNKED),
    "vllm-spec4": dict(policy="fixed", max_depth=4, max_width=1, **UNCHUNKED),
    "vllm-spec6": dict(policy="fixed", max_depth=6, max_width=1, **UNCHUNKED),
    "vllm-spec8": dict(policy="fixed", max_depth=8, max_width=1, **UNCHUNKED),
    "vllm-adaptive": dict(policy="vllm-adaptive", max_depth=7, max_width=1, **UNCHUNKED),
    "sarathi": dict(policy="none", **CHUNKED),
    "adaserve": ADASERVE,
    ADASERVE_ORACLE: ADASERVE,
    "smartspec": dict(policy="smartspec", max_depth=8, max_width=1, **UNCHUNKED),
    "turbospec": dict(policy="turbospec", max_depth=8, max_width=1, **UNCHUNKED),
    "adaspec": dict(policy="adaspec", max_depth=8, max_width=1, **UNCHUNKED),
    # The paper's TPOT SLOs are those of every window of ten tokens.
    "slos-serve": dict(
        policy="slos-serve", max_depth=8, max_width=1, admission="slo", guarantee=0.9
    ),
}


def config_of(system: str) -> SLOSpecConfig:
    """Return the config of a name, of a name with other settings (``auto {"max_depth": 4}``), or of
    settings alone.

    Raises:
        InvalidInputError: there is no such system, or the settings are invalid.
    """
    name, brace, settings = system.partition("{")
    name = name.strip()
    if name not in SYSTEMS and (name or not brace):
        raise InvalidInputError(f"unknown system {name!r}; known are: {', '.join(SYSTEMS)}")
    try:
        given = json.loads(brace + settings) if brace else {}
        return SLOSpecConfig.model_validate({**SYSTEMS.get(name, {}), **given})
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
    refused_by: Sequence[int]  # indices of replicas
    schedulers: Sequence[ContinuousScheduler]  # for the oracle only
    now_s: float


@dataclass(frozen=True)
class Choice:
    """The replica that a request is sent to."""

    replica: int
    may_refuse: bool = (
        False  # the replica may return the request to the router instead of guaranteeing its SLOs
    )


Router = Callable[[Arrival], Choice]
MAX_HOPS = 3  # from one replica to the next; the paper, with up to four replicas, does not say
WITHOUT_SLO = Need(
    0, 0
)  # goes to the replica with the fewest unfinished requests, then the least prefill


def by_guarantees(arrival: Arrival) -> Choice:
    """Return the best replica that has not refused the request; the least loaded one if all have."""
    if not arrival.need.has_slo or len(arrival.refused_by) == len(arrival.loads):
        return Choice(ranked(arrival.loads, WITHOUT_SLO)[0])
    order = ranked(arrival.loads, arrival.need)
    return Choice(
        next(index for index in order if index not in arrival.refused_by), may_refuse=True
    )


def sequential(max_hops: int = MAX_HOPS) -> Router:
    """Return SLOs-Serve's router: each replica in turn, and from one that refuses a request to the
    next.

    A request that has moved on ``max_hops`` times, or that all have refused, stays at the last one
    as best effort."""
    number = itertools.count()

    def choose(arrival: Arrival) -> Choice:
        if not arrival.refused_by:
            return Choice(next(number) % len(arrival.loads), may_refuse=arrival.need.has_slo)
        last = arrival.refused_by[-1]
        if len(arrival.refused_by) > min(max_hops, len(arrival.loads) - 1):
            return Choice(last)
        return Choice((last + 1) % len(arrival.loads), may_refuse=True)

    return choose


def by_full_knowledge(arrival: Arrival) -> Choice:
    """Return the replica where the request brings all requests least closer to missing their SLOs.

    In addition to reports, the current state of every replica is used, and the progress and output
    length of every request.
    """
    costs = [
        _closeness(arrival, index, True) - _closeness(arrival, index, False)
        for index in range(len(arrival.loads))
    ]
    return Choice(int(np.argmin(costs)))


def _closeness(arrival: Arrival, index: int, is_added: bool) -> float:
    """Return the sum of (expected time / SLO) ** POWER over a replica's requests and their SLOs."""
    scheduler = arrival.schedulers[index]
    load = arrival.loads[index]
    requests = [*scheduler.running, *scheduler.waiting, *([arrival.request] if is_added else [])]
    prefill_tokens = sum(request.num_uncached for request in requests if not request.is_decoding)
    prefill_s = load.step_s(prefill_tokens) if prefill_tokens else 0.0
    step_s = load.draft_s + load.step_s(len(requests) * load.nodes)
    total = 0.0
    for request in requests:
        elapsed_s, emitted = request.decoded(arrival.now_s) if request.num_emitted else (0.0, 0)
        if request.pace_s is not None:
            left_s = request.num_left * step_s / load.acceptance_length + prefill_s
            total += (
                (elapsed_s + left_s) / (request.pace_s * (emitted + request.num_left))
            ) ** POWER
        if request.params.ttft_slo_s is not None and not request.num_emitted:
            total += (
                (arrival.now_s - request.stats.arrived_s + prefill_s) / request.params.ttft_slo_s
            ) ** POWER
    return total


def _round_robin(seed: int) -> Router:
    number = itertools.count()
    return lambda arrival: Choice(next(number) % len(arrival.loads))


def _power_of_two(seed: int) -> Router:
    rng = np.random.default_rng([seed, 2])
    return lambda arrival: Choice(power_of_two(arrival.loads, rng))


def shortest_queue(loads: Sequence[ReplicaLoad]) -> int:
    """Return the first replica with the fewest unfinished requests."""
    return min(range(len(loads)), key=lambda index: (loads[index].num_requests, index))


def power_of_two(loads: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
    """Return the one of two random replicas with fewer unfinished requests."""
    if len(loads) == 1:
        return 0
    first, second = rng.choice(len(loads), 2, replace=False).tolist()
    return int(second if loads[second].num_requests < loads[first].num_requests else first)


OURS = "guarantees"
ROUTERS: dict[str, Callable[[int], Router]] = {  # functions of a seed
    OURS: lambda seed: by_guarantees,
    "shortest-queue": lambda seed: lambda arrival: Choice(shortest_queue(arrival.loads)),
    "power-of-two": _power_of_two,
    "round-robin": _round_robin,
    "sequential": lambda seed: sequential(),
    "oracle": lambda seed: by_full_knowledge,
}


def router_of(name: str, seed: int) -> Router:
    """Return a router by its name.

    Raises:
        InvalidInputError: there is none of this name.
    """
    if name not in ROUTERS:
        raise InvalidInputError(f"unknown router {name!r}; known are: {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)
