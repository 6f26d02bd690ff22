"""Replicas that fall silent, answer late or die where a test says so, in an event loop whose clock
jumps.
"""

from __future__ import annotations

import asyncio
import selectors
from types import SimpleNamespace
from typing import Any, TypeVar

from ray.exceptions import RayError

from hf_slospec.replicas.failover import ReplicatedEngine
from hf_slospec.replicas.messages import (
    REPORT_S,
    Declined,
    Description,
    Report,
    Taken,
    Update,
)
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.replicas.replica import _with_signs_of_life
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.load import ReplicaLoad
from hf_slospec.server.engine import Order

STEP_S = 0.1
T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Selector that does not wait: the time at which an event loop wakes up next is now."""

    now_s = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen: a deadlock"
            self.now_s += timeout
        return events


def run_jumping(main):
    """Return the result of a coroutine that runs in a loop with a jumping clock."""

    def new_loop():
        selector = JumpingSelector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        loop.selector = selector
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())


def stand_still(seconds):
    """Let time pass in which the running loop does nothing, as on a busy machine."""
    asyncio.get_running_loop().selector.now_s += seconds


def token_of(order, index):
    """Return a token of the output, which is a function of the request."""
    return hash((tuple(order.prompt), index)) % 1000


class SilentReplica:
    """A replica that writes one token per step."""

    def __init__(self, name, silent_s):
        self.name = name
        self.silent_s = silent_s
        self.reaches = (
            asyncio.Event()
        )  # its messages arrive; else they wait, as if it were cut off or frozen
        self.reaches.set()
        self.died = asyncio.Event()
        self.delay_s = lambda: 0.0  # delay of each of its messages
        self.is_full = False
        self.guarantees = True
        self.answer_s = 0.0
        self.offers = []
        self.running = set()

    async def decode(self, offer):
        self.offers.append(offer)
        self.running.add(offer.number)
        await asyncio.sleep(self.answer_s)
        if self.is_full or (offer.must_guarantee and not self.guarantees):
            yield Declined(self.name, self.is_full)
            return
        yield Taken(self.name)
        async for answer in _with_signs_of_life(self._updates(offer), self.silent_s / 4):
            yield answer

    async def _updates(self, offer):
        number = offer.order.arguments["max_new_tokens"]
        await asyncio.sleep(offer.order.arguments.get("waits_s", 0.0))
        for index in range(len(offer.progress.tokens), number):
            await asyncio.sleep(STEP_S)
            if offer.number not in self.running:
                return
            metrics = Request(0, RequestParams(offer.order.prompt, 0)).metrics()
            yield Update(
                [token_of(offer.order, index)],
                [],
                metrics,
                "length" if index == number - 1 else None,
            )

    async def reports(self, address, sender, left):
        self.running -= {*left}
        for _ in range(20):
            yield Report(self.name, ReplicaLoad(), {})
            await asyncio.sleep(REPORT_S)


class HeldStream:
    """Answers of a replica, which wait while it reaches nobody."""

    def __init__(self, replica, answers):
        self.replica = replica
        self.answers = answers
        self.queue = asyncio.Queue[Any]()
        self.is_left = self.is_stuck = False
        self.num_late = 0  # answers that arrived after the stream was left
        self.pump = asyncio.ensure_future(self._pump())

    async def _pump(self):
        await self.replica.reaches.wait()
        async for answer in self.answers:
            await self.replica.reaches.wait()
            await asyncio.sleep(self.replica.delay_s())
            if self.is_left:
                self.num_late += 1
            elif not self.is_stuck:
                self.queue.put_nowait(answer)
        if not self.is_stuck:
            self.queue.put_nowait(StopAsyncIteration())

    async def __anext__(self):
        assert not self.is_left, "an answer is asked of a stream that was left"
        answer, death = (
            asyncio.ensure_future(self.queue.get()),
            asyncio.ensure_future(self.replica.died.wait()),
        )
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise RayError("the actor died")
            if isinstance(answer.result(), StopAsyncIteration):
                raise answer.result()
            return answer.result()
        finally:
            answer.cancel()
            death.cancel()

    def cancel(self):
        """Cancel the call; a replica that cannot be reached does not hear of it, as happens with
        Ray.
        """
        self.is_left = True
        if self.replica.reaches.is_set():
            self.pump.cancel()


class World:
    """Replicas, and the engine of a front before them."""

    def __init__(self, number, **options):
        self.options = ReplicaOptions(**options)
        self.replicas = {
            f"r{index}": SilentReplica(f"r{index}", self.options.silent_s)
            for index in range(number)
        }
        self.streams = []
        handle = SimpleNamespace(
            decode=SimpleNamespace(remote=self._decode),
            reports=SimpleNamespace(remote=self._reports),
        )
        handle.options = lambda stream: handle
        description = Description(None, None, 1000, 10_000, 8, None)
        self.engine = ReplicatedEngine(handle, description, self.running, self.options)
        self.watching = asyncio.ensure_future(self.engine.watch())

    def running(self):
        return list(self.replicas)

    def __getitem__(self, name):
        return self.replicas[name]

    def _decode(self, offer):
        self.streams.append(
            HeldStream(self.replicas[offer.replica], self.replicas[offer.replica].decode(offer))
        )
        return self.streams[-1]

    def _reports(self, address, sender, left):
        return HeldStream(
            self.replicas[address.replica],
            self.replicas[address.replica].reports(address, sender, left),
        )

    async def decoded(self, tokens, prompt=(1, 2), **arguments):
        """Return a decoding that has ended, checked, and its longest pause in seconds."""
        now_s = asyncio.get_running_loop().time
        order, last_s, pause_s = (
            Order(list(prompt), {"max_new_tokens": tokens} | arguments),
            now_s(),
            0.0,
        )
        decoding = await self.engine.submit(order)
        written = []
        async for new, _ in decoding.asteps():
            written += new
            pause_s = max(pause_s, now_s() - last_s)
            last_s = now_s()
        assert written == decoding.tokens == [token_of(order, index) for index in range(tokens)]
        return decoding, max(pause_s, now_s() - last_s)
