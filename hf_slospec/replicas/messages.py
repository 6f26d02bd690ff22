"""Messages between the front (the HTTP deployment) and the replicas."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.state import FinishReason, Progress
from hf_slospec.scheduler.load import Need, ReplicaLoad
from hf_slospec.server.engine import Order

LOOPBACK = "127.0.0.1"


@contextmanager
def on_loopback() -> Iterator[str]:
    """Let ``ray.init`` keep a loopback address inside the context, and yield the address for a
    local node, 127.0.0.1.

    Ray binds its ports to the node's address. ``ray.init`` replaces a loopback address by one that
    other machines can reach, except on systems where Ray has no clusters. Inside the context, Ray
    takes this system for one of those.
    """
    is_cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster


def keep_replica_on_loopback() -> None:
    """Keep the port of this process's Serve replica on the loopback interface, if the node's
    address is 127.0.0.1.

    Deployments call this in their constructor: Serve opens the port afterwards, normally on all
    interfaces.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: Any, address: str) -> int:
        port: int = bind(server, address.replace("[::]", LOOPBACK))
        return port

    replica.add_port_to_grpc_server = bind_to_loopback


# Errors of a call whose replica died, or for which there is no replica
FAULTS = (RayError, RayServeException, StopAsyncIteration)
PARTS = 5  # number of waits into which next_within splits its time limit


def call(method: Any, *arguments: Any) -> Any:
    """Return the response of a replica's method, called under a new Serve request id.

    Serve gives all calls made for one HTTP request the same id, and its routers confuse concurrent
    calls that have the same id."""
    return contextvars.Context().run(method.remote, *arguments)


async def next_within(
    stream: Any, limit_s: float, may_give_up: Callable[[], bool] = lambda: True
) -> Any:
    """Return the next answer of a stream, or None if it does not come within a time limit.

    Args:
        limit_s: seconds. They are waited for in several parts, so that a process that was suspended
            for longer still reads the answers that arrived meanwhile.
        may_give_up: called whenever the limit is over; if it returns False, the limit begins again.
    """
    answer = asyncio.ensure_future(_next(stream))
    try:
        while not await _is_done(answer, limit_s):
            if may_give_up():
                return None
        return answer.result()
    finally:
        answer.cancel()


async def _is_done(answer: asyncio.Future[Any], limit_s: float) -> bool:
    for _ in range(PARTS):
        if (await asyncio.wait({answer}, timeout=limit_s / PARTS))[0]:
            return True
    return False


async def _next(stream: Any) -> Any:
    """Return the next answer of a stream. If the task is cancelled, raise CancelledError, where
    Serve would raise its RequestCancelledError.
    """
    try:
        return await anext(stream)
    except serve.exceptions.RequestCancelledError as error:
        raise asyncio.CancelledError from error


REPORT_S = 0.5  # seconds between two reports of a replica


@dataclass(frozen=True)
class Offer:
    """A request that a front offers to a replica, which answers Taken or Declined."""

    replica: str  # name of the replica; if it has just died, another one gets the offer
    order: Order
    need: Need
    progress: Progress  # output so far, from replicas that failed
    sender: str  # name of the front that sends it
    number: int  # counts the offers of this sender
    must_guarantee: bool = False  # the replica declines it unless its SLOs can be guaranteed


@dataclass(frozen=True)
class ToReplica:
    """First argument of calls that are routed to one replica and are not offers."""

    replica: str


@dataclass(frozen=True)
class Alive:
    """Keep-alive message of a replica that has nothing else to send."""


@dataclass(frozen=True)
class Report:
    """Load of a replica, sent to every front twice a second."""

    replica: str
    load: ReplicaLoad
    seen: dict[str, int]  # by front: number of its last offer that the load includes


@dataclass(frozen=True)
class Taken:
    """Answer to an offer: the replica serves the request."""

    replica: str


@dataclass(frozen=True)
class Declined:
    """Answer to an offer: the replica does not serve the request, and has done nothing for it."""

    replica: str
    is_full: bool  # True: its queue is full; False: it cannot guarantee the SLOs


@dataclass(frozen=True)
class Failed:
    """Last message of a request that failed with an error that would occur on every replica."""

    error: Exception


@dataclass(frozen=True)
class Broken:
    """Last message of a replica that has failed; another replica can resume the request from the
    updates so far.
    """

    replica: str
    reason: str


@dataclass(frozen=True)
class Update:
    """Tokens of a request that were committed since the last update."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one per token, empty unless requested
    metrics: RequestMetrics
    finish_reason: FinishReason | None  # None before the last update
    # in the first update of each replica, if requested
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


Answer = Taken | Declined | Failed | Broken | Update | Alive


@dataclass(frozen=True)
class Description:
    """Properties of the model that the front needs."""

    tokenizer: Any
    generation_config: Any
    vocab_size: int
    max_len: int  # maximum tokens of prompt and output
    max_nodes: int  # K/V slots per request for the nodes of its draft tree, in addition
    response_template: dict[str, Any] | None
