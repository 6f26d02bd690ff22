"""Ray Serve's request router by guarantees: ranks the replicas for every offer, and counts offers under way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hf_slospec.algo.prefixes import PrefixIndex
from hf_slospec.algo.replica_ranking import Need, ReplicaLoad, ranked
from hf_slospec.replicas.messages import LOAD, Offer, ToReplica
from hf_slospec.replicas.running import set_running

UNSEEN_S = 10.0  # seconds after which an offer is no longer counted; reports come twice a second


class SentOffer(NamedTuple):
    """An offer that was sent to a replica, with the fields that change the replica's load."""

    replica: str
    sender: str
    number: int
    need: Need
    is_guaranteed: bool
    at_s: float


class SentOffers:
    """Offers that were sent to replicas and that the replicas' reports do not contain yet.

    Without them a whole burst would be routed by the same report, to one replica.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._sent: dict[str, SentOffer] = {}  # by id of the call, oldest first

    def add(self, call: str, replica: str, offer: Offer) -> None:
        """Add an offer; it replaces that of the same call to another replica."""
        self.remove(call)
        now_s = self._now()
        while self._sent and next(iter(self._sent.values())).at_s < now_s - UNSEEN_S:
            del self._sent[next(iter(self._sent))]  # Serve does not report the end of every call
        self._sent[call] = SentOffer(replica, offer.sender, offer.number, offer.need, offer.must_guarantee, now_s)

    def remove(self, call: str) -> None:
        """Remove the offer of a call that is over or was never made."""
        self._sent.pop(call, None)

    def on(self, replica: str, reported: ReplicaLoad, seen: Mapping[str, int]) -> ReplicaLoad:
        """Return the load of a replica with the offers that its report does not contain.

        Args:
            seen: the last offer of each sender that the report contains.
        """
        for sent in self._sent.values():
            if sent.replica == replica and sent.number > seen.get(sent.sender, -1):
                reported = reported.with_request(sent.need, sent.is_guaranteed)
        return reported

    def keep(self, replicas: Sequence[str]) -> None:
        """Keep only offers to these replicas."""
        self._sent = {call: sent for call, sent in self._sent.items() if sent.replica in replicas}


class GuaranteeRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Router that offers a request to the replica which can most cheaply guarantee its SLOs.

    Requests are matched to the replica that was chosen for them, so Serve's FIFO mixin, which gives a replica to the
    request that waits longest, must not be mixed in.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._running: list[str] = []
        self._sent, self._prefixes = SentOffers(), PrefixIndex()
        self._reports: dict[str, tuple[dict[str, Any], ReplicaLoad]] = {}  # by replica: report, parsed load

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the running replicas and their reports."""
        super().update_replicas(replicas)
        names = [_name(replica.replica_id) for replica in replicas]
        for gone in set(self._running) - set(names):
            self._prefixes.forget(gone)
            self._reports.pop(gone, None)
        self._sent.keep(names)
        self._running = names
        set_running(self, names)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request is offered to them, one in each rank."""
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if no replica has room for a call, wait
        address = pending_request.args[0] if pending_request.args else None
        if isinstance(address, ToReplica):
            return [[by_name[address.replica]]] if address.replica in by_name else []
        loads = {name: self._load(name, replica.routing_stats) for name, replica in by_name.items()}
        order = self._in_order(address if isinstance(address, Offer) else None, loads)
        if order and isinstance(address, Offer):
            self._sent.add(pending_request.metadata.internal_request_id, order[0], address)
        return [[by_name[name]] for name in order]

    def _in_order(self, offer: Offer | None, loads: dict[str, ReplicaLoad]) -> list[str]:
        """Return the names of replicas, best first: by guarantees if the offer asks for them, else by load alone."""
        if offer is None:
            return [list(loads)[index] for index in ranked(list(loads.values()), Need(0, 0))]
        need = offer.need
        alive = [name for name in loads if name not in offer.failed] or list(loads)
        names = [name for name in alive if name not in offer.declined] or alive
        known = self._prefixes.num_known(names, offer.order.prompt, offer.order.arguments.get("cache_salt", ""))
        by_load = replace(need, tpot_slo_s=math.inf, ttft_slo_s=math.inf)
        order = ranked([loads[name] for name in names], need if offer.must_guarantee else by_load, known)
        return [names[index] for index in order]

    def _load(self, name: str, report: dict[str, Any]) -> ReplicaLoad:
        """Return the load of a replica, with the offers sent since its report."""
        if name not in self._reports or self._reports[name][0] is not report:  # parse every report once
            self._reports[name] = report, LOAD.validate_python(report["load"]) if report else ReplicaLoad()
        return self._sent.on(name, self._reports[name][1], report.get("seen", {}))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count an offer for the replica that got it, which may not be the first of the ranking."""
        if pending_request.args and isinstance(offer := pending_request.args[0], Offer):
            name = _name(replica_id)
            self._sent.add(pending_request.metadata.internal_request_id, name, offer)
            self._prefixes.record(name, offer.order.prompt, offer.order.arguments.get("cache_salt", ""))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove the offer of a call that is over."""
        self._sent.remove(internal_request_id)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
