"""State of the running replicas as one front knows it: which ones respond, how loaded they are,
and which prompts' K/V they hold. ``failover.py`` chooses replicas by it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hf_slospec.replicas.messages import (
    FAULTS,
    REPORT_S,
    Offer,
    Report,
    ToReplica,
    call,
    next_within,
)
from hf_slospec.scheduler.load import ReplicaLoad, ranked

BLOCK = 32  # tokens per block; prefixes of prompts are compared by whole blocks
MAX_BLOCKS = 2**16  # blocks recorded in total; the least recently used are dropped


# Names of the running replicas, by router. The table is not in the router's module, because Ray
# pickles that module by value and would copy the table.
_names: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()


def set_running(router: object, names: Sequence[str]) -> None:
    _names[router] = tuple(names)


def running_replicas() -> list[str]:
    """Return the sorted names of the replicas that run according to this process's routers."""
    return sorted({name for names in list(_names.values()) for name in names})


class PrefixIndex:
    """Approximate record of which replicas hold the K/V of which prefixes.

    A block's key is a hash of the block's tokens and of all tokens before it, so prompts share the
    entries of their common prefix. A replica may have evicted K/V that is recorded here.
    """

    def __init__(self, block: int = BLOCK, max_blocks: int = MAX_BLOCKS):
        self.block = block
        self.max_blocks = max_blocks
        # by block key: names of the replicas that processed the block; least recently used first
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def record(self, replica: str, prompt: Sequence[int], salt: str = "") -> None:
        """Record that a replica processes a prompt. Prompts with different cache salts share no
        entries.
        """
        for key in self._keys(prompt, salt):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def num_known(
        self, replicas: Sequence[str], prompt: Sequence[int], salt: str = ""
    ) -> list[int]:
        """Return, for each replica, how many leading tokens of the prompt it has processed, in
        whole blocks.
        """
        known_lens = dict.fromkeys(replicas, 0)
        alive = set(replicas)
        for num_blocks, key in enumerate(self._keys(prompt, salt), 1):
            alive &= self._holders.get(key, set())
            if not alive:
                break
            known_lens |= dict.fromkeys(alive, num_blocks * self.block)
        return [known_lens[replica] for replica in replicas]

    def forget(self, replica: str) -> None:
        """Drop all entries of a replica, as it has stopped."""
        for key, holders in list(self._holders.items()):
            holders.discard(replica)
            if not holders:
                del self._holders[key]

    def _keys(self, prompt: Sequence[int], salt: str) -> Iterator[int]:
        key = hash(salt)
        for begin in range(0, len(prompt) - self.block + 1, self.block):
            key = hash((key, *prompt[begin : begin + self.block]))
            yield key


logger = logging.getLogger("ray.serve")


class ReplicaDirectory:
    """Last reports of the running replicas, and the offers sent since then.

    Offers that a report does not include yet are added to the reported load. Otherwise all requests
    of a burst would be routed by the same reports, to one replica.
    """

    def __init__(self, running: Callable[[], Sequence[str]], silent_s: float):
        """Create a directory without reports.

        Args:
            running: returns the names of the running replicas.
            silent_s: seconds without a report after which a replica counts as silent.
        """
        self.running = running
        self.silent_s = silent_s
        self.silent = set[str]()  # replicas without a report for silent_s, or whose calls fail
        self._reports: dict[str, Report] = {}
        self._sent: dict[int, Offer] = {}  # offers that no report includes yet, by offer number
        # by replica: numbers of cancelled offers, to be sent with the next call of `reports`
        self._left: defaultdict[str, set[int]] = defaultdict(set)
        self._prefixes = PrefixIndex()

    def alive(self) -> set[str]:
        """Return the names of the running replicas that are not silent."""
        return {*self.running()} - self.silent

    def in_order(self, names: Collection[str], offer: Offer) -> list[str]:
        """Return the replicas' names in the order in which to offer them the request.

        If the offer asks for a guarantee, replicas are ranked by how well they can keep the SLOs of
        all their requests with this one; otherwise by load alone.
        """
        listed = sorted(names)
        need = offer.need
        if not offer.must_guarantee:
            need = replace(need, tpot_slo_s=math.inf, ttft_slo_s=math.inf)
        known_lens = self._prefixes.num_known(
            listed, offer.order.prompt, offer.order.arguments.get("cache_salt", "")
        )
        loads = [self.load(name) for name in listed]
        return [listed[index] for index in ranked(loads, need, known_lens)]

    def load(self, name: str) -> ReplicaLoad:
        """Return the load that a replica reported, plus the offers sent since then."""
        report = self._reports.get(name)
        load = self._idle() if report is None else report.load
        for sent in self._sent.values():
            if sent.replica == name:
                load = load.with_request(sent.need, sent.must_guarantee)
        return load

    def _idle(self) -> ReplicaLoad:
        """Return the load to assume for a replica without a report: the load of the replica with
        most free K/V, without its requests.
        """
        loads = [report.load for report in self._reports.values()]
        roomiest = max(loads, key=lambda load: load.kv_free, default=ReplicaLoad())
        return replace(roomiest, guaranteed=(), best_effort=0, prefill_tokens=0)

    def add_sent(self, offer: Offer) -> None:
        """Add an offer to its replica's load until a report of the replica includes it."""
        self._sent[offer.number] = offer

    def remove_sent(self, number: int) -> None:
        """Remove an offer from its replica's load, as the replica has not taken it."""
        self._sent.pop(number, None)

    def leave(self, replica: str, number: int) -> None:
        """Queue the cancellation of an offer; the next call of ``reports`` sends it to the replica.

        Cancelling the call in which the offer was sent does not suffice: that may be lost.
        """
        if replica in self.running():
            self._left[replica].add(number)

    def record_taken(self, replica: str, offer: Offer) -> None:
        """Record that a replica has taken an offer and will hold the K/V of its prompt."""
        self._prefixes.record(
            replica, offer.order.prompt, offer.order.arguments.get("cache_salt", "")
        )

    def hear(self, report: Report, sender: str) -> None:
        self._reports[report.replica] = report
        seen = report.seen.get(sender, -1)
        self._sent = {
            number: sent
            for number, sent in self._sent.items()
            if sent.replica != report.replica or number > seen
        }

    async def watch(self, streams: Any, sender: str) -> None:
        """Read the reports of all running replicas until cancelled.

        Args:
            streams: handle of the ``ModelReplica`` deployment for streaming calls.
            sender: name of this front.
        """
        listening: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                running = {*self.running()}
                self.silent &= running
                for name in listening.keys() - running:
                    listening.pop(name).cancel()
                    self._forget(name)
                for name in running:
                    if name not in listening or listening[name].done():
                        listening[name] = asyncio.ensure_future(self._listen(name, streams, sender))
                await asyncio.sleep(REPORT_S)
        finally:
            for task in listening.values():
                task.cancel()

    def _forget(self, name: str) -> None:
        self._reports.pop(name, None)
        self._prefixes.forget(name)
        self._left.pop(name, None)
        self._sent = {number: sent for number, sent in self._sent.items() if sent.replica != name}

    async def _listen(self, name: str, streams: Any, sender: str) -> None:
        """Read the reports of a replica until cancelled; while none come, mark it as silent."""
        while True:
            left = frozenset(self._left[name])
            stream = call(streams.reports, ToReplica(name), sender, left)
            try:
                while (answer := await next_within(stream, self.silent_s)) is not None:
                    self.silent.discard(name)
                    self._left[name] -= left
                    if isinstance(answer, Report):
                        self.hear(answer, sender)
                self.set_silent(name, f"it has sent nothing for {self.silent_s:g} s")
            except StopAsyncIteration:  # each call ends after some reports; call again
                pass
            except FAULTS as error:
                self.set_silent(name, repr(error))
            finally:
                stream.cancel()
            await asyncio.sleep(REPORT_S)

    def set_silent(self, name: str, reason: str) -> None:
        """Stop sending offers to a replica until its next report."""
        if name not in self.silent:
            logger.warning("replica %s gets no offers until its next report: %s", name, reason)
        self.silent.add(name)
