"""The batcher's thread on the toy model: orders from many threads, faults, life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.protocols import Chunk, Plan
from hf_slospec.engine.request import Request, Stage
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler, Limits
from hf_slospec.engine.scheduling.pace import Pace
from hf_slospec.engine.step import Engine
from hf_slospec.errors import NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.serving.batcher import Batcher, Observer
from hf_slospec.serving.handle import RequestHandle, TextStream
from tests.toy_models import VOCAB, ToyDrafter, ToyTarget, WholeTrees, greedy, new_costs
from tests.toys import markov_model

WAIT_S = 20.0  # far more than anything here takes
MODEL = markov_model(np.random.default_rng(0), VOCAB)


class GatedTarget(ToyTarget):
    """Verifies when its gate is open, and may run out of memory."""

    def __init__(self) -> None:
        super().__init__(greedy(MODEL))
        self.gate = threading.Event()
        self.gate.set()
        self.most_requests = 10**9  # more in a step are more than there is memory for
        self.error: BaseException | None = None

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> list[Callable[[int], int]]:
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if len(requests) + len(chunks) > self.most_requests:
            raise MemoryError("no room for so many")
        return super().verify(requests, trees, chunks)


class Books(Observer):
    def __init__(self) -> None:
        self.ended = list[Request]()

    def on_end(self, request: Request) -> None:
        self.ended.append(request)


class Server:
    """A batcher over the toy model."""

    def __init__(self, max_queue: int = 1000, max_batch: int = 4):
        self.toy, self.books = GatedTarget(), Books()
        limits = Limits(max_batch, 10**12, 6, 8, 1e9)
        self.batcher = Batcher(
            lambda: ContinuousScheduler(limits, Pace(new_costs())), self._engine, max_queue, FairLock(), self.books
        )
        self.num_submitted = 0

    def _engine(self, scheduler: ContinuousScheduler) -> Engine:
        policy = WholeTrees(Plan(2, 2))
        return Engine(self.toy, ToyDrafter(MODEL), policy, scheduler, time.perf_counter, check_invariants=True)

    def submit(
        self, new: int = 10, block: bool = False, timeout: float | None = None, **fields: object
    ) -> RequestHandle:
        self.num_submitted += 1
        request = Request(self.num_submitted, [0, 1, 2], new, **fields)
        handle = RequestHandle(request, lambda ids: "".join(map(str, ids)), self.batcher.abort, None)
        self.batcher.submit(handle, block, timeout)
        return handle


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.batcher.start()
    yield made
    made.toy.gate.set()
    made.batcher.stop(drain=False, timeout=None)
    assert not made.toy.cached, "K/V was left behind"


def alone(new: int) -> list[int]:
    request = Request(0, [0, 1, 2], new)
    while not request.emit(greedy(MODEL)(request)):
        pass
    return request.tokens[3:]


def test_results_streams_and_awaits_agree(server: Server) -> None:
    handles = [server.submit(new) for new in (1, 7, 30)]
    for handle, new in zip(handles, (1, 7, 30), strict=True):
        result = handle.result(WAIT_S)
        assert result.token_ids == list(handle.tokens()) == handle.token_ids == alone(new)
        assert result.text == "".join(handle) == "".join(map(str, alone(new)))
        assert (result.finish_reason, handle.done(), result.metrics.tokens) == ("length", True, new)
    assert {request.index for request in server.books.ended} == {1, 2, 3}


def test_a_handle_says_which_tokens_the_draft_had_proposed(server: Server) -> None:
    handle = server.submit(12)
    handle.result(WAIT_S)
    origins, commits = handle.from_draft, handle.commits
    assert len(origins) == 12 == commits[-1].num_emitted
    assert sum(origins) == handle.metrics.accepted > 0
    assert not origins[0]  # chosen behind the prompt, where nothing is drafted
    ends = [commit.num_emitted for commit in commits]
    assert ends == sorted(set(ends))
    assert not any(origins[end - 1] for end in ends)  # a step's last token is the target's own
    assert [commit.at_s for commit in commits] == sorted(commit.at_s for commit in commits)
    assert sum(commit.num_nodes - 1 for commit in commits) == handle.metrics.drafted


def test_what_is_not_shown_yet_has_no_origin_either() -> None:
    request = Request(0, [0, 1, 2], 10)
    handle = RequestHandle(request, None, lambda handle, error: None, None)
    request.emit(1)
    request.account(0, 0, 1.0, PhaseTimes(), 1.0)
    assert handle.from_draft == handle.commits == handle.token_ids == []
    handle.advance()
    assert handle.from_draft == [False]
    assert handle.commits == [Commit(1, 1.0, 1, 0)]


def test_output_arrives_while_the_request_goes_on(server: Server) -> None:
    server.toy.gate.clear()
    handle = server.submit(8)
    tokens = handle.tokens()
    server.toy.gate.set()
    assert [next(tokens), *tokens] == alone(8)


def test_asyncio_streams_and_results(server: Server) -> None:
    async def collect(new: int) -> str:
        handle = server.submit(new)
        text = "".join([str(piece) async for piece in handle])
        assert (await handle.aresult(WAIT_S)).text == text
        return text

    async def main() -> list[str]:
        return await asyncio.gather(*(collect(new) for new in (3, 9, 20)))

    assert asyncio.run(main()) == ["".join(map(str, alone(new))) for new in (3, 9, 20)]


def test_an_await_may_time_out_and_be_asked_again(server: Server) -> None:
    async def main() -> None:
        server.toy.gate.clear()
        handle = server.submit(3)
        with pytest.raises(TimeoutError, match="goes on"):
            await handle.aresult(0.01)
        server.toy.gate.set()
        assert (await handle.aresult(WAIT_S)).token_ids == alone(3)

    asyncio.run(main())


def test_polling_leaves_nothing_behind(server: Server) -> None:
    async def main() -> None:
        server.toy.gate.clear()
        handle = server.submit(3)
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await handle.aresult(0.001)
        assert handle._wakers == []
        server.toy.gate.set()
        await handle.aresult(WAIT_S)
        assert handle._wakers == []

    asyncio.run(main())


def test_a_result_that_takes_too_long_times_out_and_goes_on(server: Server) -> None:
    server.toy.gate.clear()
    handle = server.submit(3)
    with pytest.raises(TimeoutError, match="goes on"):
        handle.result(0.01)
    server.toy.gate.set()
    assert handle.result(WAIT_S).token_ids == alone(3)


def test_a_cancelled_request_ends_alone(server: Server) -> None:
    server.toy.gate.clear()
    doomed, other = server.submit(10**6), server.submit(5)
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

    failing, others = server.submit(20, is_stop=broken), [server.submit(20) for _ in range(3)]
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
    assert (server.batcher.num_waiting, server.batcher.num_running, server.batcher.kv_held) == (0, 0, 0)


def test_starting_while_it_drains_waits_and_then_starts() -> None:
    server = Server()
    server.batcher.start()
    server.toy.gate.clear()
    last = server.submit(5)
    stopping = threading.Thread(target=server.batcher.stop, args=(True, None))
    stopping.start()
    until = time.monotonic() + WAIT_S
    while server.batcher._ending is None and time.monotonic() < until:
        time.sleep(0.001)
    with pytest.raises(NotRunningError, match="stopped"):
        server.submit(3)
    threading.Timer(0.05, server.toy.gate.set).start()
    server.batcher.start()
    assert last.done()
    stopping.join(WAIT_S)
    assert server.submit(3).result(WAIT_S).token_ids == alone(3)
    server.batcher.stop(drain=True, timeout=None)


def test_stopping_drains_or_cancels_and_starts_again() -> None:
    server = Server()
    with pytest.raises(NotRunningError, match="start"):
        server.submit()
    server.batcher.start()
    server.batcher.start()  # does nothing
    drained = [server.submit(20) for _ in range(9)]
    server.batcher.stop(drain=True, timeout=None)
    assert all(handle.done() and handle.result().token_ids == alone(20) for handle in drained)
    with pytest.raises(NotRunningError, match="stopped"):
        server.submit()
    server.batcher.stop(drain=True, timeout=None)  # does nothing

    server.batcher.start()
    assert server.submit(4).result(WAIT_S).token_ids == alone(4)
    endless = [server.submit(10**6) for _ in range(6)]
    server.batcher.stop(drain=False, timeout=None)
    for handle in endless:
        with pytest.raises(RequestCancelledError):
            handle.result(WAIT_S)
    server.batcher.start()
    endless = [server.submit(10**6) for _ in range(2)]
    server.batcher.stop(drain=True, timeout=0.05)
    assert all(handle.done() for handle in endless)


def test_a_blocked_submit_hears_of_the_stop() -> None:
    server = Server(max_queue=1, max_batch=1)
    server.batcher.start()
    for _ in range(2):
        with contextlib.suppress(QueueFull):
            server.submit(10**6, block=True, timeout=1.0)
    heard = list[str]()

    def blocked() -> None:
        try:
            server.submit(block=True)
        except NotRunningError as error:
            heard.append(str(error))

    thread = threading.Thread(target=blocked)
    thread.start()
    time.sleep(0.05)
    server.batcher.stop(drain=False, timeout=None)
    thread.join(WAIT_S)
    assert len(heard) == 1


def test_when_the_engine_dies_every_handle_hears_why_and_it_may_start_again() -> None:
    server = Server()
    server.batcher.start()
    server.toy.gate.clear()
    handles = [server.submit(50) for _ in range(6)]
    server.toy.error = RuntimeError("the device is gone")
    server.toy.gate.set()
    for handle in handles:
        with pytest.raises(RuntimeError, match="the device is gone"):
            handle.result(WAIT_S)
    with pytest.raises(NotRunningError, match="the device is gone"):
        server.submit()
    server.toy.error = None
    server.toy.cached.clear()
    server.batcher.start()
    assert server.submit(4).result(WAIT_S).token_ids == alone(4)
    server.batcher.stop(drain=True, timeout=None)


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


def test_an_idle_batcher_takes_no_time(server: Server) -> None:
    server.submit(3).result(WAIT_S)
    time.sleep(0.05)
    begun_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun_s < 0.1


def test_a_forked_child_is_told_so_and_may_start_its_own(server: Server) -> None:
    server.toy.gate.clear()
    parents, (read, write) = server.submit(3), os.pipe()  # its thread holds the turn while the child is made
    child = os.fork()
    if child == 0:
        for attempt in (lambda: server.submit(3), parents.result, lambda: list(parents)):
            with contextlib.suppress(NotRunningError):
                attempt()
                os._exit(1)
        server.toy.gate = threading.Event()
        server.toy.gate.set()
        server.toy.cached.clear()
        server.batcher.start()
        os.write(write, repr(server.submit(3).result(WAIT_S).token_ids).encode())
        os._exit(0)
    server.toy.gate.set()
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1000).decode() == repr(alone(3))
    assert parents.result(WAIT_S).token_ids == alone(3)
    assert server.submit(3).result(WAIT_S).token_ids == alone(3)


def test_the_interpreter_ends_with_work_in_flight() -> None:
    code = (
        "from tests.test_batcher import Server\n"
        "server = Server()\n"
        "server.batcher.start()\n"
        "handles = [server.submit(10**9) for _ in range(9)]\n"
        "next(handles[0].tokens())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


def test_many_threads_submit_cancel_and_fail_and_nothing_is_lost() -> None:
    server, lock, outcomes = Server(max_queue=50), threading.Lock(), dict[str, int]()
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


def test_finished_requests_are_let_go(server: Server) -> None:
    handle = server.submit(3)
    handle.result(WAIT_S)
    gone = weakref.ref(handle)
    del handle
    server.books.ended.clear()
    server.submit(3).result(WAIT_S)  # pushes the first one out of the engine's last step
    server.toy.steps.clear()
    server.toy.released.clear()
    gc.collect()
    assert gone() is None


def test_pieces_sum_to_the_text_whatever_tokens_have_none() -> None:
    words = {1: "Hello", 2: " world", 3: "", 4: " you"}  # 3 is special and skipped

    def to_text(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).lstrip()  # as SentencePiece decoders strip the first space

    for ids in ([1, 3, 2, 3, 3, 4], [3, 2, 4], [2, 3, 3, 3, 1], [3, 3]):
        for size in (1, 2, 3):
            stream, pieces = TextStream(to_text), list[str]()
            for begin in range(0, len(ids), size):
                pieces.append(stream.push(ids[begin : begin + size], begin + size >= len(ids)))
            assert "".join(pieces) == to_text(ids), (ids, size)


class TestFairLock:
    def test_it_is_handed_on_in_the_order_of_asking(self) -> None:
        lock, order = FairLock(), list[int]()

        def ask(name: int) -> None:
            with lock:
                order.append(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in range(5)]
        with lock, lock:  # its holder may enter again
            for name, thread in enumerate(threads):
                thread.start()
                until = time.monotonic() + WAIT_S
                while len(lock._waiting) <= name and time.monotonic() < until:
                    time.sleep(0.001)
        for thread in threads:
            thread.join(WAIT_S)
        assert order == [0, 1, 2, 3, 4]

    def test_a_thread_in_a_tight_loop_starves_nobody(self) -> None:
        lock, is_over = FairLock(), threading.Event()

        def loop() -> None:
            while not is_over.is_set():
                with lock:
                    time.sleep(0.001)

        greedy_thread = threading.Thread(target=loop)
        greedy_thread.start()
        for _ in range(20):
            with lock:
                pass
        is_over.set()
        greedy_thread.join(WAIT_S)
        assert not greedy_thread.is_alive()
