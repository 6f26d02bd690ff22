"""The parts of a whole run on a GPU: a dry run on a CPU, limits, and going on by version."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import serving
from benchmarks.gpu import bandwidth, contestants, floor, parts, speed
from benchmarks.gpu.__main__ import app
from benchmarks.gpu.goals import goals
from benchmarks.gpu.parts import (
    ABSENT,
    CUT_OFF,
    FAILED,
    FINISHED,
    PARTS,
    SKIPPED,
    TOTAL_S,
    Part,
    Run,
    lacks_some,
)
from benchmarks.gpu.variants import CONSTANTS
from hf_slospec.cli.benchmark import OURS, PLAIN, WITHOUT_DRAFTS
from hf_slospec.generate.speculator import MEASURE_S
from tests.support.paths import ROOT

RUN = CliRunner(env={"COLUMNS": "200"})
SLOW = {"load", "repeatable", "quantised", "compiled", "draft"}


@pytest.fixture
def _short(monkeypatch):
    for name in MEASURE_S:  # times say nothing here
        monkeypatch.setitem(MEASURE_S, name, 0.0)
    monkeypatch.setitem(bandwidth.READ_BYTES, "cpu", 2**20)
    monkeypatch.setattr(floor, "NUM_FORWARDS", 1)
    monkeypatch.setattr(speed, "MIN_WARM_UP", 1)
    for name, settings in serving.SYSTEMS.items():
        monkeypatch.setitem(serving.SYSTEMS, name, settings | dict(compile=False))


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    "names",
    [
        [part.name for part in PARTS if part.name not in SLOW],
        pytest.param([part.name for part in PARTS], marks=pytest.mark.nightly),
    ],
    ids=["quick", "all"],
)
def test_a_dry_run_measures_every_part_once(names, tmp_path):
    options = ["--dry-run", "--results", str(tmp_path), "--only", ",".join(names)]
    result = RUN.invoke(app, options)
    assert result.exit_code == 0, result.output
    ended = json.loads((tmp_path / "parts.json").read_text())["parts"]
    allowed = {FINISHED, ABSENT}  # torchao need not be there
    assert ended.keys() == set(names) and {one["status"] for one in ended.values()} <= allowed
    for name in ended:
        assert json.loads((tmp_path / f"{name}.json").read_text())["provenance"]["torch"]
    (cell,) = json.loads((tmp_path / "head.json").read_text())["results"]["speed"]
    rows = {row["name"]: row for row in cell["contestants"]}
    chain = rows[f"{OURS}, chain of 2"]
    assert chain["status"] == "measured" and chain["ms_per_draft_level"] > 0.0
    assert cell["draft_parameters"] == 1_328_128 + 2048 * 256  # with the embeddings it shares
    assert rows[PLAIN]["status"] == "measured"
    written = (tmp_path / "head.json").stat().st_mtime_ns
    again = RUN.invoke(app, options)
    assert again.exit_code == 0 and (tmp_path / "head.json").stat().st_mtime_ns == written


def test_parts_are_documented_and_fit_their_time():
    text = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    listed = re.findall(r"`--only (\w+)`", text)
    assert listed == [part.name for part in PARTS]
    assert TOTAL_S < 660.0 and all(part.limit_s < 600.0 for part in PARTS)


WRITES = """
import json, sys, time
path = sys.argv[sys.argv.index("--json") + 1]
goes_on = "--resume" in sys.argv
json.dump({"status": "measured" if goes_on else "cut off"}, open(path, "w"))
if "--hang" in sys.argv and not goes_on:
    time.sleep(60)
sys.exit(int("--fail" in sys.argv))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "writes.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(parts, "MIN_LEFT_S", 0.01)
    return "writes"


def part(name, module, *options, limit_s=20.0, **others):
    return Part(name, "", limit_s, module, options, (), **others)


def test_what_was_cut_off_goes_on_and_what_is_finished_does_not(tmp_path, module):
    folder = tmp_path / "results"
    plan = [
        part("hangs", module, "--hang", limit_s=2.0, resumes="--resume"),
        part("fails", module, "--fail"),
        part("absent", module, package="not_a_package"),
        part("late", module, resumes="--resume"),
    ]
    shown: list[str] = []
    statuses = [
        {
            name: one["status"]
            for name, one in Run(folder, False, "a", shown.append).run(plan, total_s).items()
        }
        for total_s in (60.0, 60.0, 60.0)
    ]
    assert statuses[0] == {"hangs": CUT_OFF, "fails": FAILED, "absent": ABSENT, "late": CUT_OFF}
    assert statuses[1] == {"hangs": FINISHED, "fails": FAILED, "absent": ABSENT, "late": FINISHED}
    assert statuses[2] == statuses[1]
    assert sum("late" in line and "at most" in line for line in shown) == 2
    # Another version of the code measures all again.
    ended = Run(folder, False, "b", shown.append).run(plan[3:], 60.0)
    assert ended["late"]["status"] == CUT_OFF
    ended = Run(folder, False, "c", shown.append).run(plan, 0.0)
    assert {one["status"] for one in ended.values()} == {SKIPPED}


def test_results_that_lack_some_are_not_finished():
    late = {"results": {"speed": [{"contestants": [{"status": "timed out"}]}]}}
    assert (
        lacks_some(late) and lacks_some({"turns_left": 2}) and lacks_some([{"status": "cut off"}])
    )
    assert lacks_some({"status": "skipped", "reason": "no time was left"})
    assert not lacks_some({"tests": {"status": "skipped", "reason": "--skip-tests was given"}})
    assert not lacks_some({"turns_left": 0, "runs": [1]})


def test_goals_are_read_from_the_files(tmp_path):
    def row(name, tokens_per_s, gib=1.0):
        return dict(
            name=name, status="measured", tokens_per_s=tokens_per_s, peak_beyond_held_gib=gib
        )

    constant = next(iter(CONSTANTS))
    head = [
        {"batch": 8, "contestants": [row(OURS, 150.0), row(WITHOUT_DRAFTS, 100.0), row(constant, 160.0)]},
        {"batch": 16, "contestants": [row(OURS, 150.0), {"name": WITHOUT_DRAFTS, "status": "skipped"}]},
    ]  # fmt: skip
    compiled = [
        {"batch": 64, "contestants": [row(OURS, 9.0, 3.0), row(contestants.COMPILED, 3.0, 2.0)]}
    ]
    conditions = [{"name": "batch 8", "differ": 0, "tokens_per_s": 8.0}]
    default = [{"name": "batch 8", "differ": 3, "tokens_per_s": 10.0}]
    attained = {
        pressure: {
            "plain": {"attainment": {"mean": plain}},
            "auto": {"attainment": {"mean": auto}},
        }
        for pressure, plain, auto in (("10", 0.1, 0.3), ("2", 0.4, 0.9), ("1", 0.7, 0.95))
    }
    files = {
        "head": {"speed": head, "floor": [{"tokens": 10, "forward_over_floor": 1.3}]},
        "compiled": {"speed": compiled},
        "load": {"poisson": attained},
        "repeatable": {"self": {"conditions": conditions}, "default": {"conditions": default}},
    }
    for name, results in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))
    found = [(round(goal.measured, 4), goal.is_reached) for goal in goals(tmp_path)]
    assert found == [
        (1.5, False), (0.9375, False), (1.3, False), (1.5, False), (0.9, True), (0, True), (0.8, True),
    ]  # fmt: skip


def test_without_a_device_nothing_is_written(tmp_path):
    result = RUN.invoke(app, ["--results", str(tmp_path / "none")])
    assert result.exit_code == 2 and "no CUDA device" in result.output
    assert not (tmp_path / "none").exists() and sys.argv[0]
    assert RUN.invoke(app, ["--only", "nothing"]).exit_code == 2
