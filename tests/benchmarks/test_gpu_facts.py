"""What the GPU check reads of devices, traces, errors and weights, and of the results of the
repository's GPU tests.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.bandwidth import datasheet_bandwidth
from benchmarks.gpu.comparison import order_of
from benchmarks.gpu.failures import outcome_of
from benchmarks.gpu.floor import weight_bytes
from benchmarks.gpu.suite import gpu_tests
from hf_slospec import UnsupportedModelError, UnsupportedOptionError, load_tiny_pair


def test_bandwidth_of_known_devices():
    names = {
        "NVIDIA H100 80GB HBM3": 3.35, "NVIDIA H100 PCIe": 2.0, "NVIDIA A100-SXM4-80GB": 2.04,
        "NVIDIA A100-PCIE-40GB": 1.56, "NVIDIA A10": 0.6, "NVIDIA L4": 0.3, "NVIDIA L40S": 0.864, "Tesla T4": 0.32,
    }  # fmt: skip
    assert {name: datasheet_bandwidth(name) for name in names} == {
        name: rate * 1e12 for name, rate in names.items()
    }
    assert datasheet_bandwidth("NVIDIA A1000") is None and datasheet_bandwidth(None) is None


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
def test_errors_are_failures_refusals_or_lack_of_memory(error, status):
    found = outcome_of(error)
    assert found["status"] == status and str(error) in found["reason"]


def test_small_batches_first_and_the_largest_shape_before_all():
    assert order_of(["1B", "8B"], [64, 1, 4]) == [
        ("8B", 1),
        ("1B", 1),
        ("1B", 4),
        ("8B", 4),
        ("8B", 64),
        ("1B", 64),
    ]


def test_weight_bytes_count_a_tied_table_once():
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


def test_gpu_tests_are_counted(tmp_path, monkeypatch):
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
