"""The GPU check, tried out on a CPU."""

from __future__ import annotations

import json
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_slospec import UnsupportedModelError, UnsupportedOptionError, load_tiny_pair, tiny_prompts
from hf_slospec.cli.app import app
from hf_slospec.cli.benchmark import ASSISTED, OURS, PLAIN, Bench
from hf_slospec.cli.gpu_check import Plan, check, environment, exit_code, floor, phases, tables
from hf_slospec.cli.gpu_check import identity as identity_phase
from hf_slospec.cli.gpu_check.budget import Budget
from hf_slospec.cli.gpu_check.continuous import ContinuousBatching
from hf_slospec.cli.gpu_check.failures import outcome_of
from hf_slospec.cli.gpu_check.floor import weight_bytes
from hf_slospec.cli.gpu_check.phases import order_of
from hf_slospec.cli.gpu_check.speed import CONTINUOUS, measure_speed
from hf_slospec.cli.gpu_check.suite import gpu_tests
from hf_slospec.cli.gpu_check.variants import VARIANTS
from hf_slospec.models.attention import kernel_choice
from tests.support.flash_stand_in import StandIn

RUN = CliRunner(env={"COLUMNS": "200"})  # as wide in every terminal
ON_CPU = ["gpu-check", "--device", "cpu", "--shapes", "tiny", "--identity-shape", "tiny"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor.COPY_BYTES, "cpu", 2**20)  # times say nothing here
    monkeypatch.setattr(floor, "NUM_FORWARDS", 2)
    monkeypatch.setattr(identity_phase, "BATCH", 2)


def test_all_phases_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--batches", "2,1", "--prompt-tokens", "12", "--new-tokens", "6", "--repeats", "2", "--json", str(path)]
    result = RUN.invoke(app, [*ON_CPU, *options])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["provenance"]["device"] == written["results"]["environment"]["device"] == "cpu"
    assert written["provenance"]["batches"] == [2, 1] and written["provenance"]["torch"]
    found = written["results"]
    assert found["tests"]["status"] == "skipped" and "CUDA" in found["tests"]["reason"]

    outcomes = {(r["dtype"], r["name"]): r["status"] for r in found["identity"]}
    for dtype in ("float32", "bfloat16"):
        assert outcomes[dtype, OURS] == outcomes[dtype, f"{OURS}, sdpa"] == "passed"
        assert outcomes[dtype, f"{OURS}, flash"] == "refused"

    assert [(cell["size"], cell["batch"]) for cell in found["speed"]] == [("tiny", 1), ("tiny", 2)]
    for cell in found["speed"]:
        rows = {row["name"]: row for row in cell["contestants"]}
        stock = {PLAIN, ASSISTED, CONTINUOUS} if cell["batch"] == 1 else {PLAIN, CONTINUOUS}
        assert rows.keys() == stock | VARIANTS.keys() and cell["repeats"] == 2
        assert {name for name, row in rows.items() if row["status"] == "measured"} == stock | {OURS}
        assert rows[f"{OURS}, sdpa"]["reason"].endswith(f"same as {OURS}")
        assert rows[OURS]["attention"] == "sdpa_attention" and rows[OURS]["ms_per_step"]["verify"] > 0
        assert rows[PLAIN]["speedup_vs_generate"] == 1.0 and rows[OURS]["host_share"] is None
    for row, batch in zip(found["floor"], (1, 2), strict=True):
        assert (row["batch"], row["keys_each"]) == (batch, 15) and row["tokens"] >= batch
        assert row["kv_gb"] == round(batch * 15 * 8 * 2 * 2 * 64 * 2 / 1e9, 4)  # layers, K and V, heads, size, bytes
        assert row["forward_ms"] > 0 and row["verify_ms"] > 0
    assert "same as" in result.output and CONTINUOUS in result.output


def plan(**changed: Any) -> Plan:
    settings = {
        "device": "cpu", "sizes": ("tiny",), "batches": (1,), "prompt_tokens": 8, "new_tokens": 4, "repeats": 1,
        "budget_s": 1000.0, "runs_tests": False, "identity_size": "tiny",
    }  # fmt: skip
    return Plan(**settings | changed)


def test_what_there_is_no_time_for_is_skipped_with_the_reason() -> None:
    written: list[str] = []
    results = check(plan(budget_s=1e-6), lambda so_far: written.append(json.dumps(so_far)), lambda _: None)
    assert {r["status"] for r in [*results["identity"], *results["speed"]]} == {"skipped"}
    assert {r["reason"] for r in [*results["identity"], *results["speed"]]} == {"no time was left"}
    assert exit_code(results) == 1  # nothing was looked at
    assert json.loads(written[0]).keys() == {"environment"}  # after each phase, in order
    assert [len(json.loads(each)) for each in written] == sorted(len(json.loads(each)) for each in written)
    assert json.loads(written[-1]) == json.loads(json.dumps(results))
    assert list(tables(results))


def test_a_shape_that_cannot_be_built_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def too_large(_: Plan, __: torch.device, size: str) -> Bench:
        tried.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(phases, "_bench", too_large)
    monkeypatch.setattr(phases, "identity", lambda *_: [])
    results = check(plan(batches=(1, 2)), lambda _: None, lambda _: None)
    assert [cell["status"] for cell in results["speed"]] == ["out of memory"] * 2
    assert tried == ["tiny"] and list(tables(results))


def test_one_shape_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Bench]] = []

    def build(_: Plan, __: torch.device, ___: str) -> Bench:
        assert all(ref() is None for ref in held)
        made = bench()
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(phases, "_bench", build)
    monkeypatch.setattr(phases, "identity", lambda *_: [])
    monkeypatch.setattr(phases, "measure_speed", lambda *_: {"contestants": [], "steps": None})
    results = check(plan(sizes=("tiny", "0.1B"), batches=(1, 2)), lambda _: None, lambda _: None)
    assert [cell["size"] for cell in results["speed"]] == ["0.1B", "tiny", "tiny", "0.1B"] and len(held) == 3
    assert all("floor_ms" in row and row["verify_ms"] is None for row in results["floor"])


def bench() -> Bench:
    return Bench(*load_tiny_pair(), tiny_prompts(), 8, 4, times_forwards=False)


@pytest.mark.parametrize("at_repeat", [0, 1])
def test_who_fails_is_left_out_and_the_rest_goes_on(at_repeat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {CONTINUOUS: 0, ASSISTED: 0}
    errors = {CONTINUOUS: RuntimeError("no block table"), ASSISTED: torch.OutOfMemoryError("CUDA out of memory")}
    plain = Bench.time

    def time(self: Bench, method: Any, repeat: int) -> Any:
        if method.name in calls:
            calls[method.name] += 1
            if calls[method.name] > at_repeat:
                raise errors[method.name]
        return plain(self, method, repeat)

    monkeypatch.setattr(Bench, "time", time)
    budget = Budget(1000.0)
    cell = measure_speed(bench(), 1, 1, budget, 1000.0)
    rows = {row["name"]: row for row in cell["contestants"]}
    assert rows[CONTINUOUS]["status"] == "failed" and "no block table" in rows[CONTINUOUS]["reason"]
    assert rows[ASSISTED]["status"] == "out of memory"
    assert rows[PLAIN]["status"] == rows[OURS]["status"] == "measured"
    assert calls == {CONTINUOUS: 1 + at_repeat, ASSISTED: 1 + at_repeat}


def test_flash_is_a_contestant_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    rows = {row["name"]: row for row in measure_speed(bench(), 2, 1, Budget(1000.0), 1000.0)["contestants"]}
    assert rows[f"{OURS}, flash"]["status"] == "measured"
    assert rows[f"{OURS}, flash"]["attention"] == "flash_attention[stand-in]"
    assert rows[f"{OURS}, flash"]["rows_equal_to_generate"] == "2/2"


def test_speed_without_stock_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Bench, "stock", stock)
    rows = {row["name"]: row for row in measure_speed(bench(), 2, 1, Budget(1000.0), 1000.0)["contestants"]}
    assert rows[PLAIN]["status"] == "out of memory"
    assert rows[OURS]["status"] == "measured" and rows[OURS]["speedup_vs_generate"] is None
    assert rows[OURS]["rows_equal_to_generate"] is None


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ({}, 0),
        ({"tests": {"status": "failed"}}, 1),
        ({"tests": {"status": "cut off"}}, 0),
        ({"identity": []}, 1),
        ({"identity": [{"dtype": "bfloat16", "status": "passed"}]}, 1),
        ({"identity": [{"dtype": "float32", "status": "passed"}, {"dtype": "bfloat16", "status": "failed"}]}, 1),
        ({"speed": [{"status": "measured", "contestants": [{"name": OURS, "status": "failed"}]}]}, 1),
        ({"speed": [{"status": "measured", "contestants": [{"name": CONTINUOUS, "status": "failed"}]}]}, 0),
        ({"speed": [{"status": "measured", "contestants": [{"name": OURS, "status": "out of memory"}]}]}, 0),
    ],
)
def test_exit_code(results: dict[str, Any], code: int) -> None:
    right = {"tests": {"status": "passed"}, "identity": [{"dtype": "float32", "status": "passed"}], "speed": []}
    assert exit_code(right | results) == code


def test_continuous_batching_says_what_stock_says() -> None:
    target, _, tokenizer = load_tiny_pair()
    inputs = tokenizer(tiny_prompts()[:3], return_tensors="pt", padding=True, padding_side="left")
    encoded = {name: inputs[name][:, -40:] for name in ("input_ids", "attention_mask")}
    encoded["attention_mask"][1, :17] = 0
    target.generation_config.eos_token_id = None
    implementation = target.config._attn_implementation
    continuous = ContinuousBatching(target, 3, 40, 12)
    for _ in range(2):
        with continuous.running():
            ours = continuous(encoded)
        assert target.config._attn_implementation == implementation
        assert torch.equal(ours, target.generate(**encoded, do_sample=False, max_new_tokens=12))
    continuous.close()
    assert not hasattr(target, "_cached_continuous_batching_manager")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (MemoryError("9 KV slots"), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed"),
        (UnsupportedOptionError("no kernel"), "refused"),
        (UnsupportedModelError("its forward failed on a packed row"), "failed"),
    ],
)
def test_what_an_error_says(error: Exception, status: str) -> None:
    found = outcome_of(error)
    assert found["status"] == status and str(error) in found["reason"]


def test_small_batches_first_and_the_largest_shape_before_all() -> None:
    assert order_of(["1B", "8B"], [64, 1, 4]) == [("8B", 1), ("1B", 1), ("1B", 4), ("8B", 4), ("8B", 64), ("1B", 64)]


def test_weights_that_a_forward_reads() -> None:
    target, _, _ = load_tiny_pair(torch.bfloat16)
    assert weight_bytes(target) == 2 * target.num_parameters()  # tied: the table is the output's weight
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
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import, in each of its processes
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs one"]\n')
    record = gpu_tests(300.0, tmp_path)
    assert record["status"] == "failed" and record["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert len(record["failed"]) == 2 and any("2 failed" in line for line in record["output"])
    assert gpu_tests(0.0, tmp_path)["status"] == "cut off"
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n" + SKIPPED)
    record = gpu_tests(300.0, tmp_path)
    assert (record["status"], record["reason"]) == ("failed", "no test was run")
    (tmp_path / "tests" / "gpu" / "test_small.py").write_text("import nothing_of_that_name")
    assert gpu_tests(300.0, tmp_path)["status"] == "failed"
    assert gpu_tests(300.0, tmp_path / "elsewhere")["status"] == "not present"


@pytest.mark.parametrize(("built_for", "word"), [(None, "without CUDA"), ("13.0", "nvidia-smi")])
def test_without_a_gpu_it_says_so(built_for: str | None, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    result = RUN.invoke(app, ["gpu-check"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output and word in result.output


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--shapes", "7T"], "7T"), (["--batches", "1,0"], "--batches"), (["--batches", ""], "--batches")],
)
def test_bad_options_are_named(options: list[str], word: str) -> None:
    result = RUN.invoke(app, ["gpu-check", *options])
    assert result.exit_code == 2
    assert word in result.output


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
    assert (facts["gpu"], facts["capability"], facts["memory_gib"], facts["free_memory_gib"]) == ("GPU", [9, 0], 2, 1)
    assert facts["kernels"]["bfloat16"].startswith("none: flash-attn")
    assert facts["nvidia_smi"] == {"name": "GPU", "driver_version": "570.1", "pstate": "P0", "clocks.sm": "1980 MHz"}
    assert "--id=GPU-0-1" in commands[0] and facts["tf32"] is False

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment.nvidia_smi(None) is None
