"""Serve's request router: passes every call to the replica that the front chose for it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hf_slospec.replicas.directory import set_running
from hf_slospec.replicas.messages import Offer, ToReplica


class AddressRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Router that passes a call to the replica that its first argument names.

    Requests are matched to the replica that was chosen for them, so Serve's FIFO mixin, which gives
    a replica to the request that waits longest, must not be mixed in.
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
        """Return the named replica, or all of them if the call names none or is an offer to one
        that has just died.

        Serve would ask a replica for the length of its queue first, and let at most two calls per
        replica wait for such answers. One that does not answer would hold up the calls of all, so
        the length is set: there is no limit to it."""
        for replica in candidate_replicas:
            self.replica_queue_len_cache.update(replica.replica_id, 0)
        address: Any = None
        if pending_request is not None:
            # If no replica can be reached, wait
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
