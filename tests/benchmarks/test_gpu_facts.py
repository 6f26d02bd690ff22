"""What the GPU check reads of devices, traces, errors and weights, and of the results of the
repository's GPU tests.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import environment
from benchmarks.gpu.bandwidth import datasheet_bandwidth
from benchmarks.gpu.comparison import order_of
from benchmarks.gpu.failures import outcome_of
from benchmarks.gpu.floor import weight_bytes
from benchmarks.gpu.profiling import count_events, places_at_peak
from benchmarks.gpu.suite import gpu_tests
from hf_slospec import UnsupportedModelError, UnsupportedOptionError, load_tiny_pair


def test_bandwidth_of_known_devices() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 3.35, "NVIDIA H100 PCIe": 2.0, "NVIDIA A100-SXM4-80GB": 2.04,
        "NVIDIA A100-PCIE-40GB": 1.56, "NVIDIA A10": 0.6, "NVIDIA L4": 0.3, "NVIDIA L40S": 0.864, "Tesla T4": 0.32,
    }  # fmt: skip
    assert {name: datasheet_bandwidth(name) for name in names} == {
        name: rate * 1e12 for name, rate in names.items()
    }
    assert datasheet_bandwidth("NVIDIA A1000") is None and datasheet_bandwidth(None) is None


def test_what_is_allocated_at_the_peak() -> None:
    def action(name: str, addr: int, mib: int = 0, *lines: int) -> dict[str, Any]:
        frames = [{"filename": "/lib/site-packages/torch/nn.py", "line": line} for line in lines]
        return {"action": name, "addr": addr, "size": mib * 2**20, "frames": frames}

    trace = [
        action("alloc", 1, 5, 10, 20), action("segment_alloc", 9, 100), action("alloc", 2, 3, 11, 20),
        # Allocated before
        action("free_requested", 1), action("free_completed", 1), action("free_requested", 7),
        action("alloc", 1, 4, 11, 20), action("alloc", 3, 2, 12), action("free_requested", 2), action("alloc", 4, 1),
    ]  # fmt: skip
    assert places_at_peak(trace) == [  # 3 + 4 + 2 MiB; at the end there are 7
        {"mib": 7.0, "tensors": 2, "at": "torch/nn.py:11 < torch/nn.py:20"},
        {"mib": 2.0, "tensors": 1, "at": "torch/nn.py:12"},
    ]
    assert places_at_peak([]) == []


def test_profile_of_a_trace() -> None:
    """Two draft levels, of which one is a replay, a verify step, and a wait."""

    def event(
        category: str, name: str, ts: float, dur: float = 1.0, correlation: int | None = None
    ) -> dict[str, Any]:
        arguments = {} if correlation is None else {"correlation": correlation}
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}

    spans = [
        ("step", 0, 100),
        ("draft", 10, 30),
        ("forward", 11, 8),
        ("forward", 25, 8),
        ("verify", 50, 40),
    ]
    trace = [
        event("user_annotation", f"hf_slospec {name}", ts, dur)
        for name, ts, dur in (*spans, ("forward", 51, 20))
    ]
    trace += [event("gpu_user_annotation", "hf_slospec verify", 300, 50)]
    trace += [
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, 1),
        event("cuda_runtime", "cudaGraphLaunch", 26, 1, 2),
    ]
    trace += [
        event("cuda_runtime", "cudaMemcpyAsync", 52, 1, 3),
        event("cuda_runtime", "cudaStreamSynchronize", 80),
    ]
    trace += [
        event("kernel", "a", 200, 1, 1),
        *(event("kernel", "b", 201 + i, 1, 2) for i in range(5)),
    ]
    trace += [
        event("gpu_memcpy", "c", 220, 1, 3),
        event("cpu_op", "aten::add", 53),
        {"ph": "M", "name": "thread"},
    ]
    found = count_events(trace)
    assert (found["steps"], found["draft_levels"], found["per_draft_level"]) == (
        1,
        2,
        {"kernels": 3.0},
    )
    assert found["per_step"]["draft"] == {"kernels": 6.0}
    assert found["per_step"]["verify"] == {"copies": 1.0, "waits": 1.0, "operators": 1.0}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (MemoryError("9 KV slots"), "out of memory"),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "out of memory",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed"),
        (UnsupportedOptionError("no kernel"), "refused"),
        (UnsupportedModelError("its forward failed on a packed row"), "failed"),
    ],
)
def test_what_an_error_says(error: Exception, status: str) -> None:
    found = outcome_of(error)
    assert found["status"] == status and str(error) in found["reason"]


def test_small_batches_first_and_the_largest_shape_before_all() -> None:
    assert order_of(["1B", "8B"], [64, 1, 4]) == [
        ("8B", 1),
        ("1B", 1),
        ("1B", 4),
        ("8B", 4),
        ("8B", 64),
        ("1B", 64),
    ]


def test_weights_that_a_forward_reads() -> None:
    target, _, _ = load_tiny_pair(torch.bfloat16)
    assert (
        weight_bytes(target) == 2 * target.num_parameters()
    )  # tied: the table is the output's weight
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach().clone())
    table = 2 * target.get_input_embeddings().weight.numel()
    assert weight_bytes(target) == 2 * target.num_parameters() - table


TESTS = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("text", ["a b", "c PASSED"])
def test_bad(text): assert not text
@pytest.mark.skip
def test_left_out(): pass
pytestmark = pytest.mark.gpu
"""
SKIPPED = """
@pytest.mark.skip
def test_left_out(): pass
"""


def test_gpu_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"
    )  # they take seconds to import, in each of its processes
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["gpu: needs one"]\n'
    )
    record = gpu_tests(300.0, tmp_path)
    assert record["status"] == "failed" and record["counts"] == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
    }
    assert len(record["failed"]) == 2 and any("2 failed" in line for line in record["output"])
    assert gpu_tests(0.0, tmp_path)["status"] == "cut off"
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n" + SKIPPED
    )
    record = gpu_tests(300.0, tmp_path)
    assert (record["status"], record["reason"]) == ("failed", "no test was run")
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text("import nothing_of_that_name")
    assert gpu_tests(300.0, tmp_path)["status"] == "failed"


def test_what_is_read_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a GPU: that every fact has its name and place."""
    properties = SimpleNamespace(name="GPU", multi_processor_count=132, uuid="0-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "kernel_on", lambda *_: "flash-attn cannot be imported")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout="GPU, 570.1, P0, 1980 MHz\n")

    monkeypatch.setattr(subprocess, "run", run)
    facts = environment.environment(torch.device("cuda:0"))
    assert (facts["gpu"], facts["capability"], facts["memory_gib"], facts["free_memory_gib"]) == (
        "GPU",
        [9, 0],
        2,
        1,
    )
    assert facts["kernels"]["bfloat16"].startswith("none: flash-attn")
    assert facts["nvidia_smi"] == {
        "name": "GPU",
        "driver_version": "570.1",
        "pstate": "P0",
        "clocks.sm": "1980 MHz",
    }
    assert "--id=GPU-0-1" in commands[0] and facts["tf32"] is False

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment.nvidia_smi(None) is None
