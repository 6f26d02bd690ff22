"""The command line, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_slospec import __version__
from hf_slospec.cli import app

RUN = CliRunner()


def test_bench_writes_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    options = "--size tiny --dtype float32 --new-tokens 8 --repeats 2 --no-tune --batch 1 --batch 2".split()
    result = RUN.invoke(app, ["bench", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "hf_slospec" in result.output
    written = json.loads(path.read_text())
    assert written["provenance"]["torch"] and written["provenance"]["new_tokens"] == 8
    names = [(row["batch"], row["name"]) for row in written["results"]]
    assert names == [
        (1, "generate"), (1, "assisted, defaults"), (1, "prompt lookup, 10"), (1, "hf_slospec"),
        (2, "generate"), (2, "hf_slospec"),
    ]  # fmt: skip
    for row in written["results"]:
        assert row["rows_equal_to_generate"] == f"{2 * row['batch']}/{2 * row['batch']}"
        assert 0 <= row["host_share"] <= 1


def test_bench_writes_a_trace_of_our_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = "--size tiny --dtype float32 --new-tokens 6 --repeats 1 --no-tune --batch 2".split()
    result = RUN.invoke(app, ["bench", *options, "--trace", str(path)])
    assert result.exit_code == 0, result.output
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"prefill", "verify", "draft"} <= names


def test_profile_measures_fits_draws_and_keeps(tmp_path: Path) -> None:
    plot, path = tmp_path / "curve.png", tmp_path / "profile.json"
    options = ["--size", "tiny", "--dtype", "float32", "--seconds", "1", "--plot", str(plot), "--json", str(path)]
    result = RUN.invoke(app, ["profile", *options])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = json.loads(path.read_text())["results"]
    for name in ("target", "draft"):
        assert records[name]["measured"] and records[name]["held_out"]
        assert records[name]["fit"]["ms"] == sorted(records[name]["fit"]["ms"])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--target", "somewhere"], "--assistant"),
        (["--size", "7T"], "--size"),
        (["--config", '{"max_depht": 1}'], "max_depht"),
        (["--dtype", "float7"], "--dtype"),
    ],
)
def test_bad_options_are_named(options: list[str], word: str) -> None:
    result = RUN.invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert word in result.output


def test_version_and_help() -> None:
    assert __version__ in RUN.invoke(app, ["--version"]).output
    assert "bench" in RUN.invoke(app, ["--help"]).output
