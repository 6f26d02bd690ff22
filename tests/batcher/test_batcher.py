"""The batcher's thread over the toy model: cancelling, full queues, faults, many threads."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.errors import QueueFull, RequestCancelledError
from hf_slospec.request.slo import Stage
from tests.support.toys.server import WAIT_S, Server, alone


def test_a_cancelled_request_ends_alone(server: Server) -> None:
    server.toy.gate.clear()
    doomed = server.submit(10**6)
    other = server.submit(5)
    doomed.cancel()
    server.toy.gate.set()
    with pytest.raises(RequestCancelledError):
        doomed.result(WAIT_S)
    with pytest.raises(RequestCancelledError):
        list(doomed)
    assert other.result(WAIT_S).token_ids == alone(5)
    doomed.cancel()  # once more does nothing
    assert doomed.done()


def test_a_request_that_waits_is_cancelled_too(server: Server) -> None:
    server.toy.gate.clear()
    running = [server.submit(3) for _ in range(4)]
    waiting = server.submit(3)
    waiting.cancel()
    server.toy.gate.set()
    with pytest.raises(RequestCancelledError):
        waiting.result(WAIT_S)
    assert all(handle.result(WAIT_S).token_ids == alone(3) for handle in running)


def test_a_fault_of_a_requests_own_fails_that_request_only(server: Server) -> None:
    def broken(tokens: list[int]) -> bool:
        if len(tokens) > 6:
            raise ZeroDivisionError("of the criterion")
        return False

    failing = server.submit(20, is_stop=broken)
    others = [server.submit(20) for _ in range(3)]
    with pytest.raises(ZeroDivisionError, match="of the criterion"):
        failing.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        list(failing.tokens())
    assert all(handle.result(WAIT_S).token_ids == alone(20) for handle in others)
    assert failing.request.finish_reason == "error"


def test_a_full_queue_refuses_or_waits() -> None:
    server = Server(max_queue=2, max_batch=1)
    server.batcher.start()
    server.toy.gate.clear()
    handles = list[RequestHandle]()
    with contextlib.suppress(QueueFull):
        for _ in range(5):
            handles.append(server.submit(3))
    assert 2 <= len(handles) <= 3
    with pytest.raises(QueueFull, match="max_queue"):
        server.submit(3)
    with pytest.raises(QueueFull):
        server.submit(3, block=True, timeout=0.01)
    threading.Timer(0.05, server.toy.gate.set).start()
    handles.append(server.submit(3, block=True, timeout=WAIT_S))
    assert all(handle.result(WAIT_S).token_ids == alone(3) for handle in handles)
    server.batcher.stop(drain=True, timeout=None)


def test_giving_everything_up_empties_the_queue() -> None:
    server = Server(max_queue=3, max_batch=1)
    server.batcher.start()
    server.toy.gate.clear()
    handles = list[RequestHandle]()
    with contextlib.suppress(QueueFull):
        for _ in range(9):
            handles.append(server.submit(10**6))
    for handle in handles:
        handle.cancel()
    server.toy.gate.set()
    for handle in handles:
        with pytest.raises(RequestCancelledError):
            handle.result(WAIT_S)
    assert server.submit(3, block=True, timeout=WAIT_S).result(WAIT_S).token_ids == alone(3)
    server.batcher.stop(drain=True, timeout=None)
    assert (server.batcher.num_waiting, server.batcher.num_running, server.batcher.kv_held) == (
        0,
        0,
        0,
    )


def test_out_of_memory_sheds_work_before_anyone_fails(server: Server) -> None:
    server.toy.gate.clear()
    promised = [server.submit(12, stages=(Stage(1e6),), ttft_slo_s=1e6) for _ in range(2)]
    spare = [server.submit(12) for _ in range(2)]
    server.toy.most_requests = 2
    server.toy.gate.set()
    assert all(handle.result(WAIT_S).token_ids == alone(12) for handle in (*promised, *spare))


def test_a_request_that_alone_runs_out_of_memory_fails(server: Server) -> None:
    server.toy.most_requests = 0
    with pytest.raises(MemoryError):
        server.submit(3).result(WAIT_S)
    server.toy.most_requests = 10**9
    assert server.submit(3).result(WAIT_S).token_ids == alone(3)


def test_many_threads_submit_cancel_and_fail_and_nothing_is_lost() -> None:
    server = Server(max_queue=50)
    lock = threading.Lock()
    outcomes = dict[str, int]()
    server.batcher.start()

    def user(seed: int) -> None:
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
