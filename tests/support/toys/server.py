"""The batcher's thread over the toy model."""

from __future__ import annotations

import threading
import time

import numpy as np

from hf_slospec.batcher.batcher import Batcher
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.orders import Observer
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.interfaces import Plan
from hf_slospec.engine.step import Engine
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from tests.support.toys.models import VOCAB, ToyDrafter, ToyTarget, WholeTrees, greedy, new_costs
from tests.support.toys.trees import markov_model

WAIT_S = 20.0  # far more than anything here takes
MODEL = markov_model(np.random.default_rng(0), VOCAB)


class GatedTarget(ToyTarget):
    """Verifies when its gate is open, and may run out of memory."""

    def __init__(self):
        super().__init__(greedy(MODEL))
        self.gate = threading.Event()
        self.gate.set()
        self.most_requests = 10**9  # more in a step are more than there is memory for
        self.error = None

    def verify(self, requests, trees, chunks=()):
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if len(requests) + len(chunks) > self.most_requests:
            raise MemoryError("no room for so many")
        return super().verify(requests, trees, chunks)


class Books(Observer):
    def __init__(self):
        self.ended = []

    def on_step(self, step):
        """Count nothing."""

    def on_end(self, request):
        self.ended.append(request)


class Server:
    """A batcher over the toy model."""

    def __init__(self, max_queue=1000, max_batch=4):
        self.toy = GatedTarget()
        self.books = Books()
        self.limits = Limits(max_batch, 10**12, 6, 8, 1e9)
        self.batcher = Batcher(self._engine, max_queue, FairLock(), self.books)
        self.num_submitted = 0

    def _engine(self):
        costs = new_costs()
        policy = WholeTrees(Plan(2, 2))
        scheduler = ContinuousScheduler(self.limits, costs)
        return Engine(
            self.toy,
            ToyDrafter(MODEL),
            policy,
            scheduler,
            costs,
            time.perf_counter,
            check_invariants=True,
        )

    def submit(self, new=10, block=False, timeout=None, **fields):
        self.num_submitted += 1
        request = Request(self.num_submitted, RequestParams([0, 1, 2], new, **fields))
        handle = RequestHandle(
            request, lambda ids: "".join(map(str, ids)), self.batcher.abort, None
        )
        self.batcher.submit(handle, block, timeout)
        return handle


def alone(new):
    request = Request(0, RequestParams([0, 1, 2], new))
    while not request.emit(greedy(MODEL)(request)):
        pass
    return request.tokens[3:]
