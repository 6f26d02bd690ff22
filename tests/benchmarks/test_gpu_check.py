"""The GPU check, tried out on a CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gpu as checking
from benchmarks.gpu import (
    Plan,
    bandwidth,
    check,
    comparison,
    earlier_results,
    exit_code,
    floor,
    quantised,
    tables,
)
from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import identity as identity_phase
from benchmarks.gpu.__main__ import app
from benchmarks.gpu.contestants import COMPILED, CONTINUOUS, names_at
from benchmarks.gpu.continuous import ContinuousBatching
from benchmarks.gpu.resuming import is_done
from benchmarks.gpu.speed import MIN_WARM_UP, Repeats, measure
from benchmarks.gpu.variants import VARIANTS
from hf_slospec import InvalidInputError, UnsupportedOptionError, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import ASSISTED, OURS, PLAIN, Bench

RUN = CliRunner(env={"COLUMNS": "200"})  # as wide in every terminal
ON_CPU = ["--device", "cpu", "--shapes", "tiny", "--identity-shape", "tiny"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setitem(bandwidth.READ_BYTES, "cpu", 2**20)  # times say nothing here
    monkeypatch.setattr(floor, "NUM_FORWARDS", 2)
    monkeypatch.setattr(identity_phase, "BATCH", 2)
    monkeypatch.setattr(
        identity_phase, "tiny_prompts", lambda: [text[:30] for text in tiny_prompts()]
    )
    for name, config in VARIANTS.items():  # on a CPU, each would wait for the compiler
        monkeypatch.setitem(VARIANTS, name, config.model_copy(update={"compile": False}))


@pytest.mark.nightly
def test_all_phases_on_a_cpu_and_again(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    options = [
        "--batches",
        "1",
        "--prompt-tokens",
        "12",
        "--new-tokens",
        "6",
        "--repeats",
        "1",
        "--budget-s",
        "5000",
    ]
    options += ["--json", str(path), "--profile"]
    result = RUN.invoke(app, [*ON_CPU, *options])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["provenance"]["device"] == written["results"]["environment"]["device"] == "cpu"
    assert written["provenance"]["batches"] == [1] and written["provenance"]["torch"]
    found = written["results"]
    assert found["tests"]["status"] == "skipped" and "CUDA" in found["tests"]["reason"]

    outcomes = {(r["dtype"], r["name"]): r["status"] for r in found["identity"]}
    for dtype in ("float32", "bfloat16"):
        assert outcomes[dtype, OURS] == outcomes[dtype, f"{OURS}, sdpa"] == "passed"
        assert outcomes[dtype, f"{OURS}, flash"] == "refused"

    (cell,) = found["speed"]
    rows = {row["name"]: row for row in cell["contestants"]}
    assert list(rows) == names_at(1) and list(rows)[:4] == [PLAIN, OURS, COMPILED, ASSISTED]
    not_measured = {
        name: row["status"] for name, row in rows.items() if row["status"] != "measured"
    }
    others = {f"{OURS}, graphs off": "same", f"{OURS}, sdpa": "same", f"{OURS}, flash": "refused"}
    assert not_measured == others
    assert rows[f"{OURS}, sdpa"]["reason"].endswith(f"same as {OURS}")
    assert rows[OURS]["attention"] == "sdpa_attention" and rows[OURS]["ms_per_step"]["verify"] > 0
    assert rows[PLAIN]["speedup_vs_generate"] == 1.0 and rows[COMPILED]["compiled"] is False
    for row in rows.values():
        if row["status"] == "measured":
            assert row["warm_up"]["calls"] == MIN_WARM_UP and row["warm_up"]["is_warm"]
            assert len(row["seconds"]) == len(row["counts"]) == len(row["rows"]) == 1
    assert all(counts["eager"] == counts["forwards"] > 0 for counts in rows[OURS]["counts"])
    assert not any(counts["forwards"] for counts in rows[PLAIN]["counts"])
    assert cell["drift"] > 0 and cell["profile"]["per_step"]["verify"]["operators"] > 0
    (row,) = found["floor"]
    assert (row["batch"], row["keys_each"]) == (1, 15) and row["tokens"] >= 1
    assert row["kv_gb"] == round(
        15 * 8 * 2 * 2 * 64 * 2 / 1e9, 4
    )  # layers, K and V, heads, size, bytes
    assert row["forward_ms"] > 0 and row["verify_ms"] > 0 and row["verify_over_datasheet"] is None
    assert (
        "same as" in result.output
        and CONTINUOUS in result.output
        and "send it to us" in result.output
    )

    def measured_again(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(comparison, "measure", measured_again)
    monkeypatch.setattr(identity_phase, "_report", measured_again)
    again = RUN.invoke(app, [*ON_CPU, *options, "--resume"])
    assert again.exit_code == 0, again.output
    assert json.loads(path.read_text())["results"]["speed"] == found["speed"]
    refused = RUN.invoke(app, [*ON_CPU, *options, "--new-tokens", "7", "--resume"])
    assert refused.exit_code == 2 and "new_tokens: 6, now 7" in refused.output


def test_only_some_methods_are_timed(tmp_path, monkeypatch):
    def measured(_, batch, name, *__):
        return {"name": name, "batch": batch, "status": "skipped", "reason": "of no interest"}

    monkeypatch.setattr(comparison, "measure", measured)
    path = tmp_path / "check.json"
    result = RUN.invoke(
        app,
        [*ON_CPU, "--batches", "1", "--methods", f"{OURS}, no drafts;{PLAIN}", "--json", str(path)],
    )
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["results"]
    assert [row["name"] for row in contestants(found)] == [PLAIN, f"{OURS}, no drafts"]
    assert found["identity"] == [] and found["tests"]["reason"] == "--methods was given"
    refused = RUN.invoke(app, [*ON_CPU, "--methods", "vLLM", "--json", str(path)])
    assert refused.exit_code == 2 and "got vLLM" in refused.output


def plan(**changed):
    settings = {
        "device": "cpu", "sizes": ("tiny",), "batches": (1,), "prompt_tokens": 8, "new_tokens": 4, "repeats": 1,
        "budget_s": 5000.0, "runs_tests": False, "identity_size": "tiny",
    }  # fmt: skip
    return Plan(**settings | changed)


def contestants(results):
    return [row for cell in results["speed"] for row in cell["contestants"]]


def test_phases_without_time_left_are_skipped_with_the_reason():
    written: list[str] = []
    results = check(
        plan(budget_s=1e-6), lambda so_far: written.append(json.dumps(so_far)), lambda _: None
    )
    assert [row["name"] for row in contestants(results)] == names_at(1)
    assert {r["status"] for r in [*results["identity"], *contestants(results)]} == {"skipped"}
    assert {r["reason"] for r in [*results["identity"], *contestants(results)]} == {
        "no time was left"
    }
    assert exit_code(results) == 1  # nothing was looked at
    assert json.loads(written[0]).keys() == {"environment"}  # after each phase, in order
    assert json.loads(written[-1]) == json.loads(json.dumps(results))
    assert list(tables(results))


def bench():
    return Bench(*load_tiny_pair(), tiny_prompts(), 8, 4)


TWICE = Repeats(2, 2, 0.0)


def not_hanging():
    raise AssertionError("it does not hang")


@pytest.mark.parametrize("num_good", [0, MIN_WARM_UP + 1])
def test_an_error_is_recorded(num_good, monkeypatch):
    plain = Bench.time
    calls = list[str]()

    def time(self, method, repeat):
        calls.append(method.name)
        if len(calls) > num_good:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, method, repeat)

    monkeypatch.setattr(Bench, "time", time)
    record = measure(bench(), 1, ASSISTED, TWICE, 1000.0, not_hanging)
    assert record["status"] == "out of memory" and "CUDA" in record["reason"]
    assert len(calls) == num_good + 1


def test_a_method_that_ended_the_process_is_not_run_again(tmp_path):
    path = tmp_path / "result.json"
    cell = {
        "size": "tiny",
        "batch": 1,
        "contestants": [{"name": PLAIN, "batch": 1, "status": "started"}],
    }
    path.write_text(
        json.dumps({"provenance": {"torch": "2", "date": "a"}, "results": {"speed": [cell]}})
    )
    (record,) = contestants(earlier_results(path, {"torch": "2", "date": "b"}))
    assert record["status"] == "hung" and is_done(record)
    with pytest.raises(InvalidInputError, match="torch: '2', now '3'"):
        earlier_results(path, {"torch": "3"})


def test_a_restart_has_the_same_plan(monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    command_line._restart(plan(batches=(1, 4)), Path("out.json"), 77.0)
    seen: list[Plan] = []
    monkeypatch.setattr(checking, "earlier_results", lambda *_: {})
    monkeypatch.setattr(checking, "check", lambda plan, *_: seen.append(plan) or sys.exit(0))
    RUN.invoke(app, started[0][3:])
    assert started[0][1:3] == ["-m", "benchmarks.gpu"]
    assert seen == [plan(batches=(1, 4), budget_s=77.0)]


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ({}, 0),
        ({"tests": {"status": "failed"}}, 1),
        ({"tests": {"status": "cut off"}}, 0),
        ({"identity": []}, 1),
        ({"identity": [{"dtype": "bfloat16", "status": "passed"}]}, 1),
        (
            {
                "identity": [
                    {"dtype": "float32", "status": "passed"},
                    {"dtype": "bfloat16", "status": "failed"},
                ]
            },
            1,
        ),
        ({"speed": [{"contestants": [{"name": OURS, "status": "failed"}]}]}, 1),
        ({"speed": [{"contestants": [{"name": CONTINUOUS, "status": "failed"}]}]}, 0),
        ({"speed": [{"contestants": [{"name": OURS, "status": "out of memory"}]}]}, 0),
    ],
)
def test_exit_code(results, code):
    right = {
        "tests": {"status": "passed"},
        "identity": [{"dtype": "float32", "status": "passed"}],
        "speed": [],
    }
    assert exit_code(right | results) == code


def test_continuous_batching_says_what_stock_says():
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


@pytest.mark.parametrize(("built_for", "word"), [(None, "without CUDA"), ("13.0", "nvidia-smi")])
def test_a_missing_gpu_is_named(built_for, word, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    result = RUN.invoke(app, [])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output and word in result.output


@pytest.mark.nightly
def test_quantised_sizes_are_measured(tmp_path):
    pytest.importorskip("torchao.quantization")
    path = tmp_path / "quantised.json"
    options = [
        *(
            "--device",
            "cpu",
            "--shapes",
            "tiny-int4,tiny-fp8",
            "--batches",
            "1",
            "--json",
            str(path),
        ),
        *("--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"),
        *("--methods", f"{PLAIN};{OURS};{OURS}, no drafts"),
    ]
    result = RUN.invoke(app, options)
    assert result.exit_code == 0, result.output
    fp8, int4 = json.loads(path.read_text())["results"]["speed"]
    assert {row["status"] for row in fp8["contestants"]} == {"measured"}
    assert {row["status"] for row in int4["contestants"]} == {"refused"}
    assert "torchao has no int4 weights here" in int4["contestants"][0]["reason"]
    row = json.loads(path.read_text())["results"]["floor"][0]
    assert row["size"] == "tiny-fp8" and row["forward_ms"] > 0


def test_quantised_sizes(tmp_path, monkeypatch):
    pytest.importorskip("torchao.quantization")
    tiny, _, _ = quantised.load("tiny", "cpu")
    fp8, _, _ = quantised.load("tiny-fp8", "cpu")
    assert type(fp8.model.layers[0].mlp.up_proj.weight).__name__ == "Float8Tensor"
    assert 0.45 < floor.weight_bytes(fp8) / floor.weight_bytes(tiny) < 0.7
    with pytest.raises(UnsupportedOptionError, match="torchao has no int4 weights here"):
        quantised.load("tiny-int4", "cpu")

    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    path = tmp_path / "quantised.json"
    options = ["--device", "cpu", "--shapes", "tiny-fp8", "--batches", "1", "--json", str(path)]
    result = RUN.invoke(app, [*options, "--methods", f"{PLAIN};{OURS}"])
    assert result.exit_code == 0, result.output
    rows = contestants(json.loads(path.read_text())["results"])
    assert {row["status"] for row in rows} == {"refused"}
    assert all("pip install torchao" in row["reason"] for row in rows)
    refused = RUN.invoke(app, [*options, "--shapes", "tiny-nf4"])
    assert refused.exit_code == 2 and "8B-fp8" in refused.output
