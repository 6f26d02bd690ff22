"""Replicas in this process behind what looks like Serve's handle; they die where a test says so."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray.exceptions import RayError

from hf_slospec.algo.routing import Need
from hf_slospec.engine.request import Progress
from hf_slospec.server.engine import Order
from hf_slospec.serving.replicas import replica as replica_module
from hf_slospec.serving.replicas.front import ReplicatedEngine
from hf_slospec.serving.replicas.messages import Offer
from hf_slospec.serving.replicas.options import ReplicaOptions
from hf_slospec.serving.replicas.replica import ModelReplica
from tests.support.served_pair import CONFIG


class FakeStream:
    """Answers of a replica, as they arrive through Ray."""

    def __init__(self, answers: AsyncIterator[Any], dies_after: int | None):
        self._answers, self._left, self.was_cancelled = answers, dies_after, False

    async def __anext__(self) -> Any:
        if self._left == 0:
            await self._answers.aclose()  # type: ignore[attr-defined]
            raise RayError("the actor died")
        self._left = None if self._left is None else self._left - 1
        try:
            return pickle.loads(pickle.dumps(await anext(self._answers)))
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise RayError(repr(error)) from error  # as errors of a replica arrive

    def cancel(self) -> None:
        self.was_cancelled = True
        self._closing = asyncio.ensure_future(self._answers.aclose())  # type: ignore[attr-defined]


class FakeHandle:
    """Handle of replicas; offers go to the first that was not tried, in the order of ``names``."""

    def __init__(self, replicas: dict[str, ModelReplica]):
        self.replicas, self.offers = replicas, list[Offer]()
        self.dies_after: Callable[[Offer], int | None] = lambda offer: None  # answers that a replica gives before
        self.decode = SimpleNamespace(remote=self._decode)
        self.prompt_logprobs = SimpleNamespace(remote=lambda *given: self._first().prompt_logprobs(*given))
        self.families = SimpleNamespace(remote=self._families)
        self.streams = list[FakeStream]()

    def options(self, stream: bool) -> FakeHandle:
        return self

    def running(self) -> list[str]:
        return list(self.replicas)

    def _first(self) -> ModelReplica:
        return next(iter(self.replicas.values()))

    def _decode(self, offer: Offer) -> FakeStream:
        offer = pickle.loads(pickle.dumps(offer))
        self.offers.append(offer)
        left = [name for name in self.replicas if name not in offer.tried] or list(self.replicas)
        chosen = left[len(self.offers) % len(left)] if not offer.must_guarantee else left[0]
        self.streams.append(FakeStream(self.replicas[chosen].decode(offer), self.dies_after(offer)))
        return self.streams[-1]

    async def _families(self, address: Any, prefix: str) -> list[Any]:
        families: list[Any] = pickle.loads(pickle.dumps(self.replicas[address.replica].families(address, prefix)))
        return families


@contextmanager
def replicated(number: int = 2, **config: Any) -> Iterator[tuple[ReplicatedEngine, FakeHandle]]:
    """Yield an engine of so many replicas of the embedded pair."""
    options = ReplicaOptions(dtype="float32", config=CONFIG.model_copy(update=config), hang_s=0.2)
    replicas = dict[str, ModelReplica]()
    for index in range(number):
        with mock.patch.object(replica_module, "_own_name", lambda index=index: f"r{index}"):
            replicas[f"r{index}"] = ModelReplica(options)
    handle = FakeHandle(replicas)
    try:
        description = pickle.loads(pickle.dumps(handle._first().describe(None)))
        yield ReplicatedEngine(handle, description, handle.running), handle
    finally:
        for replica in replicas.values():
            replica.generator.stop(drain=False)


def order_of(prompt: list[int], **arguments: Any) -> Order:
    return Order(prompt, {"max_new_tokens": 40} | arguments)


def offer_of(order: Order, number: int = 0, **fields: Any) -> Offer:
    return Offer(order, Need(len(order.prompt), 100), Progress([]), "test", number, **fields)
