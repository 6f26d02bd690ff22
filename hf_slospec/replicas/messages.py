"""Messages between the front of the application and its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from hf_slospec.algo.routing import Need, ReplicaLoad
from hf_slospec.engine.request import FinishReason, Progress, RequestMetrics
from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.serving.openai.engine import Order

LOAD = TypeAdapter(ReplicaLoad)  # reports are plain data, so that Serve's controller needs nothing of this package


@dataclass(frozen=True)
class Offer:
    """A request that is offered to a replica."""

    order: Order
    need: Need
    progress: Progress  # of its output, on the replicas that served it before
    sender: str
    number: int  # the sender's offers are numbered as they are sent
    declined: frozenset[str] = frozenset()  # by these replicas, which are asked only where no other is left
    failed: frozenset[str] = frozenset()  # replicas that died with it, and may still be listed as running
    must_guarantee: bool = False  # the replica declines it unless its SLOs can be guaranteed


@dataclass(frozen=True)
class ToReplica:
    """First argument of a call that goes to one replica, whatever its load."""

    replica: str


@dataclass(frozen=True)
class Taken:
    """Answer to an offer: the replica serves the request."""

    replica: str
    is_guaranteed: bool


@dataclass(frozen=True)
class Declined:
    """Answer to an offer: the replica does not serve the request, and has done nothing for it."""

    replica: str
    is_full: bool  # it has no place in its queue; otherwise it cannot guarantee the SLOs


@dataclass(frozen=True)
class Failed:
    """End of a request by an error of its own, which no other replica would avoid."""

    error: Exception


@dataclass(frozen=True)
class Broken:
    """End of a replica's answers because the replica has failed; another one can go on from the updates so far."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Update:
    """Newly committed tokens of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # of these tokens, if they were asked for
    metrics: RequestMetrics
    finish_reason: FinishReason | None  # of the last update
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # in the first update of each replica, if asked for


Answer = Taken | Declined | Failed | Broken | Update


@dataclass(frozen=True)
class Description:
    """Properties of the model that the front needs."""

    tokenizer: Any
    generation_config: Any
    vocab_size: int
    max_len: int  # tokens of prompt and output at most
    max_nodes: int  # tokens of K/V that speculation needs beside these
    response_template: dict[str, Any] | None
