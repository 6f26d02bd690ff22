"""Acceptance while a target is trained: figures of the benchmark."""

from __future__ import annotations

import json

from benchmarks import retraining


def test_both_heads_draft_the_same_completions(tmp_path):
    file = tmp_path / "retraining.json"
    small = ["--prompts", "2", "--completions", "2", "--tokens", "16", "--epochs", "2"]
    retraining.main([*small, "--batch", "3", "--json", str(file)])
    found = json.loads(file.read_text(encoding="utf-8"))
    first, second = found["epochs"]
    assert first["kept"] == first["retrained"] > 1
    assert second["kept"] >= 1 and second["retrained"] >= 1 and second["loss"] > 0
    assert found["provenance"]["epochs"] == 2
