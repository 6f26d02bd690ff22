"""Figures, prompts and contestants of the comparison with other engines, without the engines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.contestants import CHECKPOINT_GROUPS, PAIR_GROUPS, STOCK, STOCK_BF16
from benchmarks.peers.export import models_folder, rope_factors, save
from benchmarks.peers.measure import HeldOut, Questions
from benchmarks.peers.protocol import Settings
from benchmarks.peers.summary import different_at, summarize, summarize_tasks, table, task_table
from hf_slospec import load_tiny_pair

SETTINGS = Settings(Path("a"), Path("b"), 2, "native", 2112, [2])


def record(
    repeat: int, name: str, seconds: float, batch: int = 1, task: str = "held-out"
) -> dict[str, object]:
    named = {"group": "g", "batch": batch, "task": task, "question": str(repeat), "name": name}
    differs = [None] * (batch - 1) + [3 if name == "peer" else None]
    return named | {"seconds": seconds, "tokens": 64 * batch, "different_at": differs}


def test_ratios_are_medians_within_repeats() -> None:
    times = {
        "stock generate fp32": (8.0, 16.0, 80.0),
        "hf_slospec fp32": (2.0, 8.0, 10.0),
        "peer": (4.0, 4.0, 40.0),
    }
    records = [
        record(repeat, name, own[repeat]) for repeat in range(3) for name, own in times.items()
    ]
    rows = {row["name"]: row for row in summarize(records, new_tokens=64)}
    assert rows["peer"]["tokens_per_s"] == 16.0
    assert rows["peer"]["vs_stock"] == 2.0  # median of 2, 4 and 2
    assert rows["peer"]["ours_fp32_vs_it"] == 2.0  # median of 2, 0.5 and 4
    assert rows["peer"]["ours_bf16_vs_it"] is None
    assert rows["peer"]["rows_equal"] == "0/3"
    assert rows["hf_slospec fp32"]["vs_stock"] == 4.0
    assert rows["stock generate fp32"]["vs_stock"] == 1.0


def test_a_failed_contestant_is_named_and_keeps_its_earlier_repeats() -> None:
    records = [record(0, "stock generate fp32", 8.0, batch=8), record(0, "peer", 2.0, batch=8)]
    records += [record(1, "stock generate fp32", 8.0, batch=8)]
    records += [
        {
            "group": "g",
            "batch": 8,
            "task": "held-out",
            "question": "1",
            "name": "peer",
            "error": "no answer",
        }
    ]
    rows = summarize(records, new_tokens=64)
    assert rows[1]["vs_stock"] == 4.0
    assert rows[1]["rows_equal"] == "7/8"
    assert rows[1]["error"] == "no answer"
    assert "| g | 8 | peer | 256.0 failed: no answer | 4.0 |" in table(rows, {})


def test_tasks_are_ratios_to_stock_in_bf16_and_keep_refusals() -> None:
    times = {"QA": (STOCK_BF16, 4.0, "peer", 2.0), "maths": (STOCK_BF16, 4.0, "peer", 1.0)}
    records = []
    for task, (stock, stock_s, peer, peer_s) in times.items():
        records += [record(0, stock, stock_s, task=task) | {"question": task}]
        records += [record(0, peer, peer_s, task=task) | {"question": task}]
        named = {"group": "g", "batch": 1, "task": task, "question": task, "name": "refusing"}
        records += [named | {"error": "no batches"}]
    rows = {(row["name"], row["task"]): row for row in summarize_tasks(records)}
    assert [rows["peer", task]["speedup"] for task in ("QA", "maths", "overall")] == [2.0, 4.0, 3.0]
    assert rows[STOCK_BF16, "overall"]["speedup"] == 1.0
    assert (
        rows["peer", "overall"]["rows_equal"] == "0/2" and rows["peer", "QA"]["rows_equal"] == "0/1"
    )
    assert ("refusing", "QA") not in rows and rows["refusing", "overall"]["error"] == "no batches"
    lines = task_table(
        list(rows.values()), {"g": {"peer": {"load_s": 3.0, "rss_gb": 0.5}}}
    ).splitlines()
    assert lines[3] == "| g | 1 | peer | 2.00 | 4.00 | 3.00 (2.00-4.00) | 0/2 | 3.0 | 0.5 |"
    assert lines[4] == "| g | 1 | refusing |  |  | failed: no batches |  |  |  |"


def test_first_difference_of_every_row() -> None:
    assert different_at([[1, 2, 3]] * 4, [[1, 2, 3], [1, 5, 3], [1, 2], [1, 2, 3, 4]]) == [
        None,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("groups", [PAIR_GROUPS, CHECKPOINT_GROUPS], ids=["pair", "checkpoint"])
def test_every_group_has_its_references_first_and_each_name_once(groups: dict) -> None:
    for contestants in groups.values():
        names = [contestant.name for contestant in contestants]
        assert names[0] == STOCK and len(set(names)) == len(names)
        assert groups is PAIR_GROUPS or names[1] == STOCK_BF16


def test_workers_read_the_settings_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["worker", replace(SETTINGS, threads=3).written(), "bf16", "none"]
    )
    assert Settings.read() == (replace(SETTINGS, threads=3), ["bf16", "none"])


def test_prompts_are_those_of_spec_bench_without_padding(tmp_path: Path) -> None:
    _, draft, tokenizer = load_tiny_pair()
    draft.generation_config.eos_token_id = [5, 3]
    save(tmp_path, tokenizer, target=draft)
    (tmp_path / "own.jsonl").write_text(
        '{"turns": ["a b c d", "later"]}\n{"turns": ["a"]}\n', encoding="utf-8"
    )
    questions = Questions(tmp_path, tmp_path / "own.jsonl", per_task=2, max_prompt=3)
    warm_up, (trial,) = questions.trials(2)
    assert questions.ends == [3, 5]
    assert trial.ids == [tokenizer("a b c d")["input_ids"][:3], tokenizer("a")["input_ids"]]
    assert len(warm_up.ids) == 2 and warm_up.task != trial.task
    assert (
        models_folder(tmp_path, "org/name")
        == tmp_path / "models-name"
        != models_folder(tmp_path, None)
    )


def test_repeats_of_the_pair_have_other_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text("[[1], [2], [3], [4], [5]]")
    warm_up, trials = HeldOut(tmp_path, 2).trials(2)
    assert (warm_up.ids, [trial.ids for trial in trials]) == ([[4], [5]], [[[1], [2]], [[3], [4]]])


def test_scaled_rotary_frequencies_are_factors() -> None:
    shape = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=8,
    )
    scaled = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    plain, linear = (
        LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope)) for rope in (None, scaled)
    )
    assert torch.tensor(rope_factors(plain)).allclose(torch.ones(8))
    assert torch.tensor(rope_factors(linear)).allclose(torch.full((8,), 4.0))
    linear.config.model_type = "other"
    with pytest.raises(SystemExit, match="other"):
        rope_factors(linear)
