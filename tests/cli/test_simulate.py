"""``simulate`` from the command line."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from hf_slospec.cli.app import app
from hf_slospec.lab import comparison

RUN = CliRunner(env={"COLUMNS": "200"})
SMALL = ["--number", "6", "--system", "auto", "--system", "vllm"]


def run(*options):
    return RUN.invoke(app, ["simulate", *map(str, options)])


def test_table_json_csv_and_picture(tmp_path):
    made = tmp_path / "deep" / "r.json"
    lines = tmp_path / "other" / "r.csv"
    plot = tmp_path / "p" / "r.png"
    options = (
        "--rate",
        2,
        "--rate",
        5,
        "--seed",
        3,
        "--json",
        made,
        "--csv",
        lines,
        "--plot",
        plot,
    )
    result = run(*SMALL, *options)
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("auto", "vllm", "2/s", "5/s", "plotted to"))
    written = json.loads(made.read_text())
    facts = written["provenance"]
    assert (
        facts["seed"] == 3 and facts["rates"] == [2, 5] and facts["hardware"] == "llama-70b-4xa100"
    )
    assert (
        facts["systems"]["vllm"]["policy"] == "none"
        and facts["load"]["mix"] == "adaserve"
        and facts["date"]
    )
    places = [(record["load"], record["system"]) for record in written["results"]]
    assert places == [("2/s", "auto"), ("2/s", "vllm"), ("5/s", "auto"), ("5/s", "vllm")]
    assert all(
        record["requests"] == 6 and 0 <= record["attainment"] <= 1 for record in written["results"]
    )
    with lines.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 24
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = run(*SMALL, *options)
    assert (
        again.output == result.output
        and json.loads(made.read_text())["results"] == written["results"]
    )


def test_traces_and_latency_files_in_place_of_mixes_and_known_hardware(tmp_path):
    trace = tmp_path / "t.csv"
    latency = tmp_path / "l.json"
    trace.write_text(
        "arrival_s,input_tokens,output_tokens,slo_ratio,class\n0,5,4,1.2,$\\bad$\n1,5,4,,b\n"
    )
    latency.write_text(
        '{"target": {"tokens": [1], "ms": [20]}, "draft": {"tokens": [1], "ms": [0]}}'
    )
    options = (
        "--trace",
        trace,
        "--base-tpot",
        "0.02",
        "--hardware",
        latency,
        "--system",
        "vllm",
        "--replicas",
        5,
    )
    result = run(*options, "--json", tmp_path / "r.json", "--plot", tmp_path / "r.png")
    assert result.exit_code == 0 and "as traced" in result.output, result.output
    record = json.loads((tmp_path / "r.json").read_text())["results"][0]
    assert record["tpot_ms"] == pytest.approx(20.0) and record["kinds"]["b"]["attainment"] is None
    assert record["seconds"] == pytest.approx(1.0 + 4 * 0.02)
    result = run(*options, "--rate", 10)
    assert result.exit_code == 0 and "10/s" in result.output


def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.Simulation, "run", interrupted)
    result = run(*SMALL, "--json", tmp_path / "r.json")
    assert result.exit_code not in (0, 2) and not (tmp_path / "r.json").exists()
