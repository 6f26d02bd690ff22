"""Serve's request router: passes every call to the replica that the front chose for it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hf_slospec.replicas.directory import set_running
from hf_slospec.replicas.messages import Offer, ToReplica


class AddressRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Router that passes a call to the replica that the call's first argument names.

    Each call must get the replica that was chosen for it. So Serve's FIFO mixin, which gives a
    replica to the call that has waited longest, must not be mixed in.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._set_running()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_running()

    def _set_running(self) -> None:
        set_running(self, [_name(replica_id) for replica_id in self.curr_replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the call names; return all replicas if the call names none, or is
        an offer to a replica that has just died.

        Without a cached queue length, Serve would first ask a replica for its length, with at most
        two such calls in flight per replica. A replica that does not answer would delay all calls,
        so this caches the length 0; queues have no limit here."""
        for replica in candidate_replicas:
            self.replica_queue_len_cache.update(replica.replica_id, 0)
        address: Any = None
        if pending_request is not None:
            # Try again with a growing delay while no replica can be reached
            pending_request.routing_context.should_backoff = True
            address = next(iter(pending_request.args), None)
        if isinstance(address, Offer | ToReplica):
            named = [
                each for each in candidate_replicas if _name(each.replica_id) == address.replica
            ]
            if named or isinstance(address, ToReplica):
                candidate_replicas = named
        return [[replica] for replica in candidate_replicas]


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
