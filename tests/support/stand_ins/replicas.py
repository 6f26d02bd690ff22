"""Replicas in this process behind what looks like Serve's handle; they die where a test says so."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from ray.exceptions import RayError

from hf_slospec.replicas import replica as replica_module
from hf_slospec.replicas.failover import ReplicatedEngine
from hf_slospec.replicas.messages import Offer
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.replicas.replica import ModelReplica
from hf_slospec.request.state import Progress
from hf_slospec.scheduler.load import Need
from hf_slospec.server.engine import Order
from tests.support.served_pair import CONFIG


class FakeStream:
    """Answers of a replica, as they arrive through Ray."""

    def __init__(self, answers, dies_after, on_death):
        self._answers, self._left, self._on_death, self.was_cancelled = (
            answers,
            dies_after,
            on_death,
            False,
        )

    async def __anext__(self):
        if self._left == 0:
            await self._answers.aclose()
            self._on_death()
            raise RayError("the actor died")
        self._left = None if self._left is None else self._left - 1
        try:
            return pickle.loads(pickle.dumps(await anext(self._answers)))
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise RayError(repr(error)) from error  # as errors of a replica arrive

    def cancel(self):
        self.was_cancelled = True
        self._closing = asyncio.ensure_future(self._answers.aclose())


class FakeHandle:
    """Handle of replicas, which passes calls to those that they are for."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.offers = []
        self.dies_after = lambda offer: None  # answers that a replica gives before
        self.decode = SimpleNamespace(remote=self._decode)
        self.families = SimpleNamespace(remote=self._families)
        self.streams = []

    def options(self, stream):
        return self

    def running(self):
        return list(self.replicas)

    def first(self):
        return next(iter(self.replicas.values()))

    def _decode(self, offer):
        offer = pickle.loads(pickle.dumps(offer))
        self.offers.append(offer)
        chosen = offer.replica if offer.replica in self.replicas else next(iter(self.replicas))
        stream = FakeStream(
            self.replicas[chosen].decode(offer),
            self.dies_after(offer),
            lambda: self._replace(chosen),
        )
        self.streams.append(stream)
        return stream

    def rename(self):
        """Give the replicas their first names again."""
        replicas = list(self.replicas.values())
        self.replicas.clear()
        for index, replica in enumerate(replicas):
            replica.name = f"r{index}"
            self.replicas[replica.name] = replica

    def _replace(self, name):
        """Let a replica come back under another name, as Serve starts a new one."""
        replica = self.replicas.pop(name)
        replica.name = f"{name}'"
        self.replicas[replica.name] = replica

    async def _families(self, address, prefix):
        return pickle.loads(pickle.dumps(self.replicas[address.replica].families(address, prefix)))


@contextmanager
def replicated(number=2, **config):
    """Yield an engine of so many replicas of the embedded pair."""
    options = ReplicaOptions(dtype="float32", config=CONFIG.model_copy(update=config), hang_s=0.2)
    replicas = {}
    for index in range(number):
        serve_parts = {
            "_own_name": lambda index=index: f"r{index}",
            "_end_when_orphaned": lambda replica: None,
        }
        with mock.patch.multiple(replica_module, **serve_parts):
            replicas[f"r{index}"] = ModelReplica(options)
    handle = FakeHandle(replicas)
    try:
        description = pickle.loads(pickle.dumps(handle.first().describe(None)))
        yield ReplicatedEngine(handle, description, handle.running, options), handle
    finally:
        for replica in replicas.values():
            replica.generator.stop(drain=False)


def order_of(prompt, **arguments):
    return Order(prompt, {"max_new_tokens": 40} | arguments)


def offer_of(order, number=0, **fields):
    return Offer("r0", order, Need(len(order.prompt), 100), Progress([]), "test", number, **fields)
