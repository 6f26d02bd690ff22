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
    """Let ``ray.init`` in a ``with`` block take loopback addresses as they are, and yield that of a
    local node.

    Ray binds its ports to the address of the node. It would replace a loopback address by one that
    other machines can reach, except on systems where Ray has no clusters.
    """
    is_cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster


def keep_replica_on_loopback() -> None:
    """Keep the port of this process's Serve replica on the loopback interface, if the node has that
    address.

    Serve calls the constructor of a deployment first and then opens the port, on all interfaces.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: Any, address: str) -> int:
        port: int = bind(server, address.replace("[::]", LOOPBACK))
        return port

    replica.add_port_to_grpc_server = bind_to_loopback


FAULTS = (RayError, RayServeException, StopAsyncIteration)  # a replica died, or there is none
PARTS = 5  # of a time limit


def call(method: Any, *arguments: Any) -> Any:
    """Return the response of a replica's method, called under a new request id.

    Serve gives all calls made for one HTTP request the same id, and its routers confuse those under
    way at once."""
    return contextvars.Context().run(method.remote, *arguments)


async def next_within(
    stream: Any, limit_s: float, may_give_up: Callable[[], bool] = lambda: True
) -> Any:
    """Return the next answer of a stream, or None if there is none within a time limit.

    Args:
        limit_s: seconds. They are counted in parts, so that answers which arrive while this process
            stands still are not missing when it goes on.
        may_give_up: asked whenever the limit is over; if it returns False, the limit begins again.
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
    """Return the next answer of a stream. Serve turns a task's cancellation into another error;
    raise the original.
    """
    try:
        return await anext(stream)
    except serve.exceptions.RequestCancelledError as error:
        raise asyncio.CancelledError from error


REPORT_S = 0.5  # seconds between reports of a replica


@dataclass(frozen=True)
class Offer:
    """A request that is offered to a replica."""

    replica: str  # name of the replica; another one gets the offer if it has just died
    order: Order
    need: Need
    progress: Progress  # output so far, of replicas that served it before
    sender: str  # name of the front that sends it
    number: int  # consecutive for each sender
    must_guarantee: bool = False  # the replica declines it unless its SLOs can be guaranteed


@dataclass(frozen=True)
class ToReplica:
    """First argument of any other call that is routed to one replica."""

    replica: str


@dataclass(frozen=True)
class Alive:
    """Sign of life of a replica that has nothing else to send."""


@dataclass(frozen=True)
class Report:
    """State of a replica, sent to every front twice a second."""

    replica: str
    load: ReplicaLoad
    seen: dict[str, int]  # by sender, the number of the last offer that the load contains


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
    """End of a request by an error that would occur on every replica."""

    error: Exception


@dataclass(frozen=True)
class Broken:
    """End of a replica's answers because the replica has failed; another one can resume from the
    updates so far.
    """

    replica: str
    reason: str


@dataclass(frozen=True)
class Update:
    """Newly committed tokens of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one per token, empty unless requested
    metrics: RequestMetrics
    finish_reason: FinishReason | None  # None before the last update
    prompt_logprobs: Sequence[
        TokenLogprobs | None
    ] = ()  # in the first update of each replica, if requested


Answer = Taken | Declined | Failed | Broken | Update | Alive


@dataclass(frozen=True)
class Description:
    """Properties of the model that the front needs."""

    tokenizer: Any
    generation_config: Any
    vocab_size: int
    max_len: int  # maximum tokens of prompt and output
    max_nodes: int  # K/V slots that speculation needs in addition
    response_template: dict[str, Any] | None
