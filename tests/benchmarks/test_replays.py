"""What the replays of papers share."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hf_slospec.lab.hardware import HARDWARE
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job
from tests.support.paths import ROOT


def script(monkeypatch: pytest.MonkeyPatch, name: str, *imported: str) -> ModuleType:
    """Import a script of the replays; it and the scripts that it imports are not in ``sys.modules``
    during the test.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    module = importlib.import_module(name)
    for each in (name, *imported):
        monkeypatch.delitem(sys.modules, each)
    return module


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script(monkeypatch, "replays")


def test_finished_runs_are_not_repeated(replays: ModuleType, tmp_path: Path) -> None:
    kept = tmp_path / "runs.jsonl"
    ran = list[int]()

    def task(number: int) -> dict[str, int]:
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


def test_shares_count_from_the_best_other(replays: ModuleType) -> None:
    runs = [
        {"x": 4.0, "y": 5.0, "ours": 3.0, "best": 2.0},  # seconds: lower is better
        {"x": 0.5, "y": 0.2, "ours": 0.75, "best": 1.0},  # attainment
        {"x": 1.0, "y": 0.2, "ours": 1.0, "best": 1.0},  # no distance
    ]
    assert replays.shares_closed(runs, ("x", "y"), "best", "ours") == [0.5, 0.5]


def test_intervals_in_tables(replays: ModuleType) -> None:
    assert replays.shown(None, 1) == ""
    assert replays.shown({"mean": 0.5}, 1, 100.0) == "50.0"
    assert replays.shown({"mean": 2.0, "low": 1.5, "high": 2.5}, 2) == "2.00 ±0.50"
    assert replays.shown({"mean": 0.99, "low": 0.9, "high": 1.0}, 0, 100.0) == "99 -9+1"


def test_bounds_hold_for_the_widest_system(replays: ModuleType) -> None:
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
def slos_serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script(monkeypatch, "slos_serve", "replays")


def test_requests_with_tools_are_pairs_one_after_the_other(slos_serve: ModuleType) -> None:
    jobs = slos_serve.SCENARIOS["toolllm"].load(1.0, 1, 1).jobs
    arriving = [job for job in jobs if job.after is None]
    followed = {job.after for job in jobs}
    assert len(arriving) == 300 and len(jobs) == pytest.approx(2.7 * 300, rel=0.1)
    assert [job.arrival_s for job in arriving] == sorted(job.arrival_s for job in arriving)
    for index, job in enumerate(jobs):
        assert (
            job.after == index - 1 and job.arrival_s == 0.0
            if job.after is not None
            else job.arrival_s > 0.0
        )
        assert job.tpot_slo_s == (0.05 if index in followed else 0.1)


def test_a_request_with_tools_attains_what_all_its_pairs_attain(slos_serve: ModuleType) -> None:
    jobs = [
        Job(0.0, 1, 1),
        Job(0.0, 1, 1, after=0),
        Job(1.0, 1, 1),
        Job(0.0, 1, 1, after=2),
        Job(2.0, 1, 1),
    ]
    outcomes = [
        SimpleNamespace(tpot_slo_s=0.1, ttft_slo_s=None, worst_tpot_s=worst_s, think_tokens=0)
        for worst_s in (0.1, 0.1, 0.1, 0.2, 0.2)
    ]
    assert slos_serve.attained_share(jobs, SimpleNamespace(outcomes=outcomes)) == pytest.approx(
        1 / 3
    )


@pytest.fixture
def goodput_figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script(monkeypatch, "goodput_figures", "turbospec", "replays")


def test_figures_of_goodput_are_kept_by_phase(goodput_figures: ModuleType) -> None:
    keys = [key for key, _ in goodput_figures.tasks()]
    assert len(keys) == len(set(keys))
    phases = [
        goodput_figures.Phase(
            name, 4.0, 1.0, (20.0, 5.0), (output, 1.0), goodput_figures.constant(acceptance)
        )
        for name, output, acceptance in (("hard", 10.0, 0.05), ("easy", 30.0, 0.95))
    ]
    found = goodput_figures.Task(phases, goodput_figures.H100, goodput_figures.CHAINS["k=3"]).run()
    assert found["hard, steps"] == pytest.approx(
        9, abs=1
    )  # a token per step, the first by the prefill
    assert found["easy, steps"] == pytest.approx(29 / 3.7, abs=1.5)
    assert (
        found["hard, latency_s"] < found["p99_s"] <= max(found["easy, p99_s"], found["hard, p99_s"])
    )
    tree = goodput_figures.nested(
        {("a", "1", "Org"): {"x": 0.12345}, ("a", "1", "k=1"): {"x": 1.0}}
    )
    assert tree == {"a": {"1": {"Org": {"x": 0.1235}, "k=1": {"x": 1.0}}}}


def test_further_candidates_have_the_acceptance_of_the_first(goodput_figures: ModuleType) -> None:
    text = goodput_figures.constant(0.6, 3).write(np.random.default_rng(0), 4000)
    assert text.child_probs[0] == pytest.approx([0.6, 0.24, 0.096])
    assert np.bincount(text.ranks) / 4000 == pytest.approx([0.6, 0.24, 0.096, 0.064], abs=0.03)


@pytest.fixture
def adaserve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script(monkeypatch, "adaserve", "replays")


def test_workloads_change_shares_and_slos(adaserve: ModuleType) -> None:
    jobs = [Job(float(at), 10 * (at % 3 + 1), 5, (0.036, 0.05, 0.15)[at % 3]) for at in range(300)]
    rng = np.random.default_rng(0)
    as_published = adaserve.of_kinds(jobs, adaserve.Parameters(), rng)
    assert [job.kind for job in as_published[:3]] == ["urgent", "chat", "summary"]
    urgent = adaserve.of_kinds(jobs, adaserve.Parameters(urgent=0.9), rng)
    assert sum(job.kind == "urgent" for job in urgent) == pytest.approx(270, abs=20)
    assert [job.arrival_s for job in urgent] == [job.arrival_s for job in jobs]
    assert all(job.input_tokens == 10 for job in urgent if job.kind == "urgent")
    scaled = adaserve.of_kinds(jobs, adaserve.Parameters(slo_scale=0.8), rng)
    assert {job.tpot_slo_s for job in scaled} == {0.8 * adaserve.BASE_TPOT_S, 0.05, 0.15}
