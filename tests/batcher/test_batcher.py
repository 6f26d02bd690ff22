"""The batcher's thread over the toy model: cancelling, full queues, faults, many threads."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from hf_slospec.errors import QueueFull, RequestCancelledError
from tests.support.served_pair import written
from tests.support.toys.server import WAIT_S, Server, alone


def test_a_full_queue_refuses_or_waits():
    server = Server(max_queue=2, max_batch=1)
    server.batcher.start()
    server.toy.gate.clear()
    handles = []
    with contextlib.suppress(QueueFull):
        for _ in range(5):
            handles.append(server.submit(3))  # noqa: PERF401  those before a refused one stay
    assert 2 <= len(handles) <= 3
    with pytest.raises(QueueFull, match="max_queue"):
        server.submit(3)
    with pytest.raises(QueueFull):
        server.submit(3, block=True, timeout=0.01)
    threading.Timer(0.05, server.toy.gate.set).start()
    handles.append(server.submit(3, block=True, timeout=WAIT_S))
    assert all(handle.result(WAIT_S).token_ids == alone(3) for handle in handles)
    server.batcher.stop(drain=True, timeout=None)


def test_a_request_that_alone_runs_out_of_memory_fails(server):
    server.toy.most_requests = 0
    with pytest.raises(MemoryError):
        server.submit(3).result(WAIT_S)
    server.toy.most_requests = 10**9
    assert written(server, 3) == alone(3)


def test_many_threads_submit_cancel_and_fail_and_nothing_is_lost():
    server = Server(max_queue=50)
    lock = threading.Lock()
    outcomes = {}
    server.batcher.start()

    def user(seed):
        rng = random.Random(seed)
        for _ in range(60):
            new = rng.randrange(1, 12)
            fails = rng.random() < 0.1
            with lock:  # submit counts
                stop = (lambda tokens: 1 / 0) if fails else (lambda tokens: False)
                handle = None
                with contextlib.suppress(QueueFull):
                    handle = server.submit(new, is_stop=stop, priority=rng.randrange(3))
            if handle is None:
                outcome = "full"
            else:
                if rng.random() < 0.2:
                    handle.cancel()
                try:
                    result = handle.result(WAIT_S)
                    assert result.token_ids == alone(new)
                    outcome = "finished"
                except RequestCancelledError:
                    outcome = "cancelled"
                except ZeroDivisionError:
                    outcome = "failed"
            with lock:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

    threads = [threading.Thread(target=user, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    server.batcher.stop(drain=True, timeout=None)
    assert sum(outcomes.values()) == 8 * 60
    assert outcomes["finished"] > 100
    assert not server.toy.cached
    assert len(server.books.ended) == 8 * 60 - outcomes.get("full", 0)
    assert len({request.index for request in server.books.ended}) == len(server.books.ended)
