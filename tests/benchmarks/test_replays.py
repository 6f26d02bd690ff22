"""What the replays of papers share."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import numpy as np
import pytest

from hf_slospec.lab.hardware import HARDWARE
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job
from tests.support.paths import ROOT


def script(monkeypatch, name, *imported):
    """Import a script of the replays; it and the scripts that it imports are not in ``sys.modules``
    during the test.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    module = importlib.import_module(name)
    for each in (name, *imported):
        monkeypatch.delitem(sys.modules, each)
    return module


@pytest.fixture
def replays(monkeypatch):
    return script(monkeypatch, "replays")


def test_finished_runs_are_not_repeated(replays, tmp_path):
    kept = tmp_path / "runs.jsonl"
    ran = list[int]()

    def task(number):
        if number == 3 and 3 not in ran:
            ran.append(3)
            raise KeyboardInterrupt
        ran.append(number)
        return {"square": number**2}

    tasks = {("a", 0.5, number): partial(task, number) for number in range(5)}
    with pytest.raises(KeyboardInterrupt):
        replays.resumed(tasks, 1, kept)
    assert ran == [0, 1, 2, 3]
    found = replays.resumed(tasks, 1, kept)
    assert ran == [0, 1, 2, 3, 3, 4]
    assert found == {("a", 0.5, number): {"square": number**2} for number in range(5)}
    assert replays.resumed({("b", 0): partial(task, 7)}, 1, kept) == {("b", 0): {"square": 49}}
    assert len(kept.read_text().splitlines()) == 6


def test_shares_count_from_the_best_other(replays):
    runs = [
        {"x": 4.0, "y": 5.0, "ours": 3.0, "best": 2.0},  # seconds: lower is better
        {"x": 0.5, "y": 0.2, "ours": 0.75, "best": 1.0},  # attainment
        {"x": 1.0, "y": 0.2, "ours": 1.0, "best": 1.0},  # no distance
    ]
    assert replays.shares_closed(runs, ("x", "y"), "best", "ours") == [0.5, 0.5]


def test_intervals_in_tables(replays):
    assert replays.shown(None, 1) == ""
    assert replays.shown({"mean": 0.5}, 1, 100.0) == "50.0"
    assert replays.shown({"mean": 2.0, "low": 1.5, "high": 2.5}, 2) == "2.00 ±0.50"
    assert replays.shown({"mean": 0.99, "low": 0.9, "high": 1.0}, 0, 100.0) == "99 -9+1"


def test_bounds_hold_for_the_widest_system(replays):
    rng = np.random.default_rng(0)
    jobs = [Job(0.0, 10, 60)]
    library = Library([TextModel(0.95).write(rng, 60)])
    hardware = HARDWARE["llama-8b-h100"]
    shallow, deep, plain = (
        replays.bounds_of(jobs, library, hardware, [*names, 'auto {"max_depth": 2}']).latency_s()
        for names in ([], ['auto {"max_depth": 8}'], ["vllm"])
    )
    assert deep < shallow == plain  # plain decoding drafts nothing, whatever its max_depth


@pytest.fixture
def goodput_figures(monkeypatch):
    return script(monkeypatch, "goodput_figures", "turbospec", "replays")


def test_further_candidates_have_the_acceptance_of_the_first(goodput_figures):
    text = goodput_figures.constant(0.6, 3).write(np.random.default_rng(0), 4000)
    assert text.child_probs[0] == pytest.approx([0.6, 0.24, 0.096])
    assert np.bincount(text.ranks) / 4000 == pytest.approx([0.6, 0.24, 0.096, 0.064], abs=0.03)
