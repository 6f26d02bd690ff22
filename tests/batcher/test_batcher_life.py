"""The batcher's thread over the toy model: starting, draining, stopping, dying."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hf_slospec.errors import NotRunningError, RequestCancelledError
from tests.support.served_pair import written
from tests.support.toys.server import WAIT_S, Server, alone


def test_stopping_drains_or_cancels_and_starts_again():
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
    assert written(server, 4) == alone(4)
    endless = [server.submit(10**6) for _ in range(6)]
    server.batcher.stop(drain=False, timeout=None)
    for handle in endless:
        with pytest.raises(RequestCancelledError):
            handle.result(WAIT_S)
    server.batcher.start()
    endless = [server.submit(10**6) for _ in range(2)]
    server.batcher.stop(drain=True, timeout=0.05)
    assert all(handle.done() for handle in endless)


def test_when_the_engine_dies_every_handle_hears_why_and_it_may_start_again():
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
    assert written(server, 4) == alone(4)
    server.batcher.stop(drain=True, timeout=None)


def test_an_idle_batcher_takes_no_time(server):
    server.submit(3).result(WAIT_S)
    time.sleep(0.05)
    begun_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun_s < 0.1


def test_the_interpreter_ends_with_work_in_flight():
    code = (
        "from tests.support.toys.server import Server\n"
        "server = Server()\n"
        "server.batcher.start()\n"
        "handles = [server.submit(10**9) for _ in range(9)]\n"
        "next(handles[0].tokens())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


def test_a_thread_that_cannot_start_leaves_a_batcher_that_can(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    server = Server()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            server.batcher.start()
    assert not server.batcher.is_running
    server.batcher.start()
    assert written(server, 4) == alone(4)
    server.batcher.stop(drain=True, timeout=None)


def test_an_order_for_a_request_that_is_over_is_not_kept(server):
    handle = server.submit(3)
    handle.result(WAIT_S)
    server.batcher.stop(drain=True, timeout=None)
    server.batcher.abort(handle, None)  # as by a thread that found it running just before
    assert not server.batcher._orders
