"""Rollouts over epochs: figures, and a file that is continued."""

from __future__ import annotations

import json

import pytest

from benchmarks import rollouts
from benchmarks.rollouts import OURS, RETRAINED
from hf_slospec.tiny.embedded import FOLDER

CONFIG = '{"policy": "fixed", "max_depth": 3, "max_width": 2, "compile": false}'


def test_epochs_are_measured_and_continued(tmp_path, capsys):
    file = tmp_path / "rollouts.json"
    small = ["--prompts", "2", "--per-batch", "1", "--completions", "2", "--tokens", "12"]
    arguments = [*small, "--config", CONFIG, "--systems", OURS, "--json", str(file)]
    rollouts.main([*arguments, "--epochs", "1"])
    first = json.loads(file.read_text(encoding="utf-8"))
    rollouts.main([*arguments, "--epochs", "2"])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["rows"][:2] == first["rows"] and found["provenance"] == first["provenance"]
    assert [(row["epoch"], row["batch"]) for row in found["rows"]] == [
        (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["rows"] == 2 and 0 < row["accepted"] + row["steps"] <= row["new_tokens"]
        assert row["drafted"] >= row["accepted"]
    assert all(epoch[OURS]["tokens_per_step"] >= 1.0 for epoch in found["epochs"].values())
    assert capsys.readouterr().out.count("epoch ") == 3
    with pytest.raises(SystemExit, match="another tokens"):
        rollouts.main([*arguments, "--epochs", "2", "--tokens", "13"])


def test_a_head_is_retrained_between_epochs(tmp_path):
    file = tmp_path / "rollouts.json"
    small = ["--prompts", "1", "--per-batch", "1", "--completions", "2", "--tokens", "16"]
    arguments = [*small, "--config", CONFIG, "--systems", RETRAINED, "--json", str(file)]
    arguments += ["--drafter", str(FOLDER / "eagle3"), "--epochs", "2"]
    rollouts.main(arguments)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["provenance"]["drafter"] == "eagle3"
    assert [epoch for epoch, training in found["training"].items() if training["loss"] > 0] == [
        "1", "2"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="another head"):
        rollouts.main(arguments)
