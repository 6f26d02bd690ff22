"""Captures of CUDA graphs on a CPU stand-in for the device: their memory, their failures and what
other threads do.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_slospec.cuda.graphs import CaptureError, CudaGraphs, Graphs, Run
from hf_slospec.model import transfer as device_calls
from hf_slospec.model.memory import as_memory_error
from tests.support.stand_ins.cuda import Stream
from tests.support.stand_ins.cuda_tensors import CUDA, Device

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.usefixtures("device"),
]


def doubled() -> Run:
    there = torch.ones(3, device="cuda")
    out = torch.zeros(3, device="cuda")
    return lambda: out.copy_(there * 2)


def test_graphs_that_go_while_another_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    held = CudaGraphs(CUDA)
    replays = [held.capture(doubled())]
    memory_of_first = held._memory
    monkeypatch.setattr(Stream, "synchronize", lambda stream: replays.clear())
    assert held.capture(doubled())().tolist() == [2.0, 2.0, 2.0]
    assert held._memory == memory_of_first
    assert held.capture(doubled())().tolist() == [
        2.0,
        2.0,
        2.0,
    ]  # into other memory, as no graph is left
    assert held._memory != memory_of_first


@pytest.mark.parametrize("num_alive", [0, 1])
def test_failed_captures_release_their_memory(device: Device, num_alive: int) -> None:
    held = CudaGraphs(CUDA)
    replays = [held.capture(doubled()) for _ in range(num_alive)]

    def synchronizing() -> None:
        torch.cuda.synchronize()

    def failing() -> None:
        raise ValueError("not of the device")

    for run, error in ((synchronizing, CaptureError), (failing, ValueError)):
        with pytest.raises(error):
            held.capture(run)
        gc.collect()
        assert device.users[held._memory] == num_alive and device.allocates_to is None
        torch.rand(3, device="cuda")
    replays.append(held.capture(doubled()))
    assert all(replay().tolist() == [2.0, 2.0, 2.0] for replay in replays)


def test_only_the_memory_of_captures_counts(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 0

    def run() -> torch.Tensor:
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


def test_other_threads_wait_with_calls_that_would_break_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = threading.Event()
    others = list[Future[None]]()
    plain = device_calls._LOCK

    class Watched:
        def __enter__(self) -> None:
            asked.set()
            plain.__enter__()

        def __exit__(self, *error: object) -> None:
            plain.__exit__(None, None, None)

    monkeypatch.setattr(device_calls, "_LOCK", Watched())
    held = CudaGraphs(CUDA)
    made = doubled()
    with ThreadPoolExecutor(1) as pool:
        for call in (device_calls.empty_cache, lambda: device_calls.synchronize(CUDA)):

            def run(call: Callable[[], None] = call) -> torch.Tensor:
                asked.clear()
                others.append(pool.submit(call))
                assert asked.wait(60)
                return made()

            held.capture(run)
            others[-1].result(60)


def test_out_of_memory_in_one_thread_does_not_break_captures_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed = list[bool]()
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: freed.append(is_held(device_calls._LOCK))
    )
    with pytest.raises(MemoryError), as_memory_error():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert freed == [True]


def is_held(lock: Any) -> bool:
    return bool(lock._lock._is_owned())
