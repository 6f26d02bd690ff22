"""The load of benchmarks/serving.py: its classes on real questions, its figures, and a run that is
continued.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import serving
from benchmarks.serving import ADASERVE_CLASSES, app, goodput, load_of, real_texts, tiny_texts
from hf_slospec import load_tiny_pair
from hf_slospec.server.loading import Pair


def test_questions_of_each_class_are_drawn_by_their_shares():
    texts = real_texts(Pair(*load_tiny_pair()), 100, 2048)
    assert {name: len(prompts) for name, prompts in texts.prompts.items()} == {
        "code": 10,
        "chat": 70,
        "summary": 160,
    }
    assert np.mean([len(ids) for ids in texts.prompts["summary"]]) > 3 * texts.mean_prompt / 2
    load = load_of(0, "poisson", 1.0, 400, 0.03, texts)
    for name, (share, tpot, _) in ADASERVE_CLASSES.items():
        own = [job for job in load if job["name"] == name]
        assert len(own) / 400 == pytest.approx(share, abs=0.08)
        assert all(job["ids"] in texts.prompts[name] and job["new"] == 100 for job in own)
        assert {job["targets"]["slo_tpot"] for job in own} == {tpot * 0.03}
    assert len({job["options"]["cache_salt"] for job in load}) == 400
    assert all("eos_token_id" not in job["options"] for job in load)


def test_the_embedded_pair_gets_excerpts_and_writes_on():
    load = load_of(0, "bursty", 1.0, 50, 0.03, tiny_texts(load_tiny_pair()[2]))
    assert all(job["options"] == {"eos_token_id": None} for job in load)
    assert {len(job["ids"]) <= 64 and 16 <= job["new"] < 64 for job in load} == {True}


def test_goodput_has_an_interval_over_requests():
    found = goodput(
        [
            dict(seconds=2.0, good_tokens=[10, 0, 10, 0] * 20),
            dict(seconds=2.0, good_tokens=[5] * 80),
        ]
    )
    assert found["mean"] == 200.0
    assert 170 < found["low"] < 200 < found["high"] < 230


@pytest.mark.nightly
def test_a_load_on_a_named_target_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "plain_token_s", lambda *_: 0.02)  # it takes longer than the loads
    target, _, tokenizer = load_tiny_pair()
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    file = tmp_path / "load.json"
    plot = tmp_path / "load.png"
    options: list[Any] = [
        "load",
        "--target",
        tmp_path / "target",
        "--systems",
        "auto,plain",
        "--number",
        3,
    ]
    options += "--new-tokens 5 --max-prompt 40 --pressures 1.0 --kinds poisson --dtype float32 --json".split()
    options = [*map(str, options), str(file)]
    run = CliRunner().invoke(app, [*options, "--repeats", "1", "--minutes", "0"])
    assert run.exit_code == 0 and not file.exists(), run.output  # no time for a load
    run = CliRunner().invoke(app, [*options, "--repeats", "1"])
    assert run.exit_code == 0, run.output
    first = json.loads(file.read_text(encoding="utf-8"))
    assert first["provenance"]["drafter"] == "suffix trees + prompt lookup"
    run = CliRunner().invoke(app, [*options, "--repeats", "2", "--plot", str(plot)])
    assert run.exit_code == 0, run.output
    second = json.loads(file.read_text(encoding="utf-8"))
    assert (
        len(first["runs"]) == 1 and second["runs"][:1] == first["runs"] and len(second["runs"]) == 2
    )
    for own in second["results"]["poisson"]["1.0"].values():
        assert (
            own["requests"]
            == 6
            == sum(run["requests"] for r in second["runs"] for run in [r["systems"]["plain"]])
        )
        assert own["goodput"]["low"] <= own["goodput"]["mean"] <= own["goodput"]["high"]
        assert all(0 <= c["attained_tpot"]["mean"] <= 1 for c in own["classes"].values())
    assert plot.stat().st_size > 10_000
