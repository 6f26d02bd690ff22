"""Figures, prompts and contestants of the comparison with other engines, without the engines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.contestants import CHECKPOINT_GROUPS, PAIR_GROUPS, STOCK, STOCK_BF16
from benchmarks.peers.export import write_head
from benchmarks.peers.measure import HeldOut
from benchmarks.peers.protocol import Settings
from benchmarks.peers.summary import different_at, summarize, table
from hf_slospec import load_tiny_pair

SETTINGS = Settings(Path("a"), Path("b"), 2, "native", 2112, [2])


def record(repeat, name, seconds, batch=1, task="held-out"):
    named = {"group": "g", "batch": batch, "task": task, "question": str(repeat), "name": name}
    differs = [None] * (batch - 1) + [3 if name == "peer" else None]
    return named | {"seconds": seconds, "tokens": 64 * batch, "different_at": differs}


def test_ratios_are_medians_within_repeats():
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


def test_a_failed_contestant_is_named_and_keeps_its_earlier_repeats():
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


def test_first_difference_of_every_row():
    assert different_at([[1, 2, 3]] * 4, [[1, 2, 3], [1, 5, 3], [1, 2], [1, 2, 3, 4]]) == [
        None,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("groups", [PAIR_GROUPS, CHECKPOINT_GROUPS], ids=["pair", "checkpoint"])
def test_every_group_has_its_references_first_and_each_name_once(groups):
    for contestants in groups.values():
        names = [contestant.name for contestant in contestants]
        assert names[0] == STOCK and len(set(names)) == len(names)
        assert groups is PAIR_GROUPS or names[1] == STOCK_BF16


def test_workers_read_the_settings_that_are_written(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["worker", replace(SETTINGS, threads=3).written(), "bf16", "none"]
    )
    assert Settings.read() == (replace(SETTINGS, threads=3), ["bf16", "none"])


def test_repeats_of_the_pair_have_other_prompts(tmp_path):
    (tmp_path / "prompts.json").write_text("[[1], [2], [3], [4], [5]]")
    warm_up, trials = HeldOut(tmp_path, 2).trials(2)
    assert (warm_up.ids, [trial.ids for trial in trials]) == ([[4], [5]], [[[1], [2]], [[3], [4]]])


def test_a_head_is_exported_with_the_embeddings_that_it_shares(tmp_path):
    target, *_ = load_tiny_pair(torch.bfloat16)
    folder = tmp_path / "trained"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    assert write_head(tmp_path, folder, target)["head"] == "trained"
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written["embed_tokens.weight"].equal(target.get_input_embeddings().weight)
    assert written["fc.weight"].equal(torch.ones(2, 3))
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == config
    for other in ({"architectures": ["Eagle3DraftModel"]}, {"draft_vocab_size": None}):
        (folder / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(SystemExit, match="--layout sglang --draft-vocab"):
            write_head(tmp_path, folder, target)
