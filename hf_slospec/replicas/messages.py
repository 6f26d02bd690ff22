"""Messages between the front (the HTTP deployment) and the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_slospec.algo.replica_ranking import Need, ReplicaLoad
from hf_slospec.engine.request import FinishReason, Progress, RequestMetrics
from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.serving.openai.engine import Order

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
    """End of a replica's answers because the replica has failed; another one can resume from the updates so far."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Update:
    """Newly committed tokens of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one per token, empty unless requested
    metrics: RequestMetrics
    finish_reason: FinishReason | None  # None before the last update
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # in the first update of each replica, if requested


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
