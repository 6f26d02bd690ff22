"""Captures of CUDA graphs on a CPU stand-in for the device: their memory, their failures and what
other threads do.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from hf_slospec.cuda.graphs import CaptureError, CudaGraphs, Graphs
from hf_slospec.model import transfer as device_calls
from hf_slospec.model.memory import as_memory_error
from tests.support.stand_ins.cuda import Stream
from tests.support.stand_ins.cuda_tensors import CUDA

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.usefixtures("device"),
]


def doubled():
    there = torch.ones(3, device="cuda")
    out = torch.zeros(3, device="cuda")
    return lambda: out.copy_(there * 2)


def test_graphs_stay_alive_while_another_is_captured(monkeypatch):
    held = CudaGraphs(CUDA)
    replays = [held.capture(doubled())]
    memory_of_first = held._memory
    monkeypatch.setattr(Stream, "synchronize", lambda stream: replays.clear())
    assert held.capture(doubled())().tolist() == [2.0, 2.0, 2.0]
    assert held._memory == memory_of_first
    # Into other memory, as no graph is left.
    assert held.capture(doubled())().tolist() == [2.0, 2.0, 2.0]
    assert held._memory != memory_of_first


@pytest.mark.parametrize("num_alive", [0, 1])
def test_failed_captures_release_their_memory(device, num_alive):
    held = CudaGraphs(CUDA)
    replays = [held.capture(doubled()) for _ in range(num_alive)]

    def synchronizing():
        torch.cuda.synchronize()

    def failing():
        raise ValueError("not of the device")

    for run, error in ((synchronizing, CaptureError), (failing, ValueError)):
        with pytest.raises(error):
            held.capture(run)
        gc.collect()
        assert device.users[held._memory] == num_alive and device.allocates_to is None
        torch.rand(3, device="cuda")
    replays.append(held.capture(doubled()))
    assert all(replay().tolist() == [2.0, 2.0, 2.0] for replay in replays)


def test_memory_reserved_outside_captures_does_not_count(device, monkeypatch):
    num_bytes = 0

    def run():
        nonlocal num_bytes
        num_bytes += 2**20 if device.captures else 2**30
        return made()

    made = doubled()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: num_bytes)
    held = CudaGraphs(CUDA)
    graphs = Graphs(held, CUDA)
    graphs.patience = 0
    for size in (1, 2):
        graphs.run({"x": torch.zeros(size)}, lambda inputs: run(), 0)
    assert (len(graphs), held.num_bytes) == (2, 2 * 2**20)


def test_calls_that_would_break_a_capture_wait(monkeypatch):
    asked = threading.Event()
    others = list[Future[None]]()
    plain = device_calls._LOCK

    class Watched:
        def __enter__(self):
            asked.set()
            plain.__enter__()

        def __exit__(self, *error):
            plain.__exit__(None, None, None)

    monkeypatch.setattr(device_calls, "_LOCK", Watched())
    held = CudaGraphs(CUDA)
    made = doubled()
    with ThreadPoolExecutor(1) as pool:
        for call in (device_calls.empty_cache, lambda: device_calls.synchronize(CUDA)):

            def run(call=call):
                asked.clear()
                others.append(pool.submit(call))
                assert asked.wait(60)
                return made()

            held.capture(run)
            others[-1].result(60)


def test_freeing_memory_waits_for_captures(monkeypatch):
    freed = list[bool]()
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: freed.append(is_held(device_calls._LOCK))
    )
    with pytest.raises(MemoryError), as_memory_error():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert freed == [True]


def is_held(lock):
    return bool(lock._lock._is_owned())
