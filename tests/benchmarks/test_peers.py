"""Figures of the comparison with other engines, without the engines."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.support.paths import ROOT


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import summary

    monkeypatch.delitem(sys.modules, "summary")
    monkeypatch.delitem(sys.modules, "contestants")
    return summary


def record(repeat: int, name: str, seconds: float, batch: int = 1) -> dict[str, object]:
    named = {"group": "g", "batch": batch, "repeat": repeat, "name": name}
    return named | {"seconds": seconds, "different_at": [None] * (batch - 1) + [3 if name == "peer" else None]}


def test_ratios_are_medians_within_repeats(summary: ModuleType) -> None:
    times = {"stock generate fp32": (8.0, 16.0, 80.0), "hf_slospec fp32": (2.0, 8.0, 10.0), "peer": (4.0, 4.0, 40.0)}
    records = [record(repeat, name, own[repeat]) for repeat in range(3) for name, own in times.items()]
    rows = {row["name"]: row for row in summary.summarize(records, new_tokens=64)}
    assert rows["peer"]["tokens_per_s"] == 16.0
    assert rows["peer"]["vs_stock"] == 2.0  # median of 2, 4 and 2
    assert rows["peer"]["ours_fp32_vs_it"] == 2.0  # median of 2, 0.5 and 4
    assert rows["peer"]["ours_bf16_vs_it"] is None
    assert rows["peer"]["rows_equal"] == "0/3"
    assert rows["hf_slospec fp32"]["vs_stock"] == 4.0
    assert rows["stock generate fp32"]["vs_stock"] == 1.0


def test_a_failed_contestant_is_named_and_keeps_its_earlier_repeats(summary: ModuleType) -> None:
    records = [record(0, "stock generate fp32", 8.0, batch=8), record(0, "peer", 2.0, batch=8)]
    records += [record(1, "stock generate fp32", 8.0, batch=8)]
    records += [{"group": "g", "batch": 8, "repeat": 1, "name": "peer", "error": "no answer"}]
    rows = summary.summarize(records, new_tokens=64)
    assert rows[1]["vs_stock"] == 4.0
    assert rows[1]["rows_equal"] == "7/8"
    assert rows[1]["error"] == "no answer"
    assert "| g | 8 | peer | 256.0 failed: no answer | 4.0 |" in summary.table(rows, {})


def test_first_difference_of_every_row(summary: ModuleType) -> None:
    assert summary.different_at([[1, 2, 3]] * 4, [[1, 2, 3], [1, 5, 3], [1, 2], [1, 2, 3, 4]]) == [None, 1, 2, 3]
