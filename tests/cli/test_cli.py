"""The command line, small."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_slospec import SLOSpecConfig, __version__, load_tiny_pair, tiny_prompts
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.cli import benchmark, profiling
from hf_slospec.cli.app import app
from hf_slospec.cli.commands import generate
from hf_slospec.model.measure import CURVE, HELD_OUT
from hf_slospec.server import loading
from hf_slospec.tiny.embedded import FOLDER
from tests.support.breadth import nightly_but

RUN = CliRunner(env={"COLUMNS": "200"})  # as wide in every terminal


EAGER = ["--config", '{"compile": false}']  # compiling takes long


def test_bench_writes_table_and_json(tmp_path):
    path = tmp_path / "deep" / "result.json"
    options = "--size tiny --dtype float32 --new-tokens 6 --repeats 1 --batch 1 --batch 2".split()
    result = CliRunner(env={"COLUMNS": "30"}).invoke(
        app, ["bench", *EAGER, *options, "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert "…" not in result.output  # complete in a narrow terminal
    written = json.loads(path.read_text())
    assert written["provenance"]["torch"] and written["provenance"]["new_tokens"] == 6
    names = [(row["batch"], row["name"]) for row in written["results"]]
    assert names == [
        (1, "generate"), (1, "assisted, defaults"), (1, "prompt lookup, 10"),
        (1, "hf_slospec, no drafts"), (1, "hf_slospec"),
        (2, "generate"), (2, "hf_slospec, no drafts"), (2, "hf_slospec"),
    ]  # fmt: skip
    gains = [row["gain"] for row in written["results"] if row["name"] == "hf_slospec"]
    assert [gain["batch"] for gain in gains] == [1, 2]
    for gain in gains:
        assert f"batch {gain['batch']}: {gain['total']:.2f}x" in result.stdout
    for row in written["results"]:
        assert row["rows_equal_to_generate"] == f"{row['batch']}/{row['batch']}"


def test_bench_waits_for_the_compiler(monkeypatch):
    seen = []

    class Generator:
        def __init__(self, *given, **_):
            seen.append(given[3].compile)

    monkeypatch.setattr(benchmark, "SLOSpecGenerator", Generator)
    bench = benchmark.Bench(*load_tiny_pair(), tiny_prompts(), 8, 4)
    for config in (None, SLOSpecConfig(compile=False)):
        bench.ours(config)
    assert seen == ["wait", False]


def test_profile_draws_a_target_alone(tmp_path):
    plot = tmp_path / "curve.png"
    measured = [{"tokens": tokens, "requests": 1, "keys_each": 128, "ms": 1.0} for tokens in (1, 4)]
    record = {"measured": measured, "fit": {"tokens": [1, 4], "ms": [1.0, 1.0]}}
    profiling.draw({"target": record}, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_of_a_drafter_without_a_draft_model(tmp_path):
    target, _, tokenizer = load_tiny_pair()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    path = tmp_path / "result.json"
    options = f"--target {tmp_path / 'target'} --dtype float32 --new-tokens 4 --repeats 1 --batch 1 --json {path}"
    result = RUN.invoke(
        app, ["bench", "--drafter", f"lookup+{FOLDER / 'mtp'}", *options.split(), *EAGER]
    )
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["provenance"]["drafter"] == "prompt lookup + MTP layer"
    rows = {row["name"]: row for row in written["results"]}
    assert not any(name.startswith("assisted") for name in rows)
    assert rows["hf_slospec"]["rows_equal_to_generate"] == "1/1"


def test_profile_measures_fits_and_draws_what_drafts(tmp_path):
    plot = tmp_path / "curve.png"
    path = tmp_path / "profile.json"
    options = "--size tiny --dtype float32 --seconds 1 --no-keep --no-compile --drafter lookup+mtp"
    result = RUN.invoke(
        app, ["profile", *options.split(), "--plot", str(plot), "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert "measuring target and draft for at most about 2 s (--seconds)" in result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(path.read_text())
    assert written["provenance"]["drafter"] == "prompt lookup + MTP layer"
    assert set(written["results"]) == {"target", "draft"}
    for record in written["results"].values():
        measured = {size["tokens"] for size in record["measured"]}
        left_out = set(record["not_measured"])
        sizes = measured | left_out | {size["tokens"] for size in record["held_out"]}
        assert {size.num_tokens for size in (*CURVE, *HELD_OUT)} <= sizes
        assert not measured & left_out
        assert record["fit"]["ms"] == sorted(record["fit"]["ms"])


@pytest.mark.parametrize(
    ("options", "module", "extra"),
    [
        ("simulate --plot out.png", "matplotlib", "plot"),
        ("bench --drafter suffix --size tiny", "arctic_inference", "suffix"),
        ("generate x --drafter suffix", "arctic_inference", "suffix"),
        ("chat --drafter suffix+lookup", "arctic_inference", "suffix"),
        ("serve", "uvicorn", "serve"),
        ("serve --replicas 1", "ray", "ray"),
        ("demo", "gradio", "demo"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(options, module, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_tiny_pair", None)  # fails before models are loaded
    result = CliRunner(env={"COLUMNS": "40"}).invoke(app, options.split())
    assert result.exit_code == 1
    (line,) = result.output.strip().splitlines()
    assert f"needs {module}; install with: pip install" in line and f"[{extra}]" in line


def test_version_and_help():
    assert __version__ in RUN.invoke(app, ["--version"]).output
    assert "bench" in RUN.invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    "command",
    ["generate", "chat", "serve", "demo", "bench", "profile", "check", "simulate", "train-drafter"],
)
def test_help_teaches_by_example(command):
    output = RUN.invoke(app, [command, "--help"]).output
    assert f"hf_slospec {command} " in output
    assert "\x1b" not in output  # colours are for terminals


TEXT = "def f(x):\n    return"
FAST = ["--max-new-tokens", "12", "--dtype", "float32"]


def stock(text, **options):
    target, _, tokenizer = load_tiny_pair()
    inputs = tokenizer(text, return_tensors="pt")
    out = target.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=12, **options
    )
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_generate_writes_the_text_to_the_output_and_figures_beside_it():
    result = RUN.invoke(app, ["generate", TEXT, "--slo-tpot", "10", *FAST])
    assert result.exit_code == 0, result.output
    assert result.stdout == stock(TEXT) + "\n"
    assert "12 tokens" in result.stderr
    assert "SLO of 10000 ms met" in result.stderr
    assert "\x1b" not in result.output


def test_what_is_logged_while_text_is_streamed_stands_behind_it(monkeypatch):
    plain = RequestHandle.__iter__

    def noticed(self):
        for piece in plain(self):
            logging.getLogger("hf_slospec.policies.auto").warning("a notice")
            yield piece

    monkeypatch.setattr(RequestHandle, "__iter__", noticed)
    result = RUN.invoke(app, ["generate", TEXT, *FAST])
    assert stock(TEXT) + "\nWARNING: a notice\n" in result.output
    assert "6 M parameters, float32, on cpu" in result.stderr


@pytest.mark.parametrize("command", ["generate", "bench", "profile"])
def test_a_target_alone_is_drafted_for_by_its_text(command, tmp_path):
    target, _, tokenizer = load_tiny_pair()
    target.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    options = {
        "generate": [TEXT, "--max-new-tokens", "12"],
        "bench": ["--new-tokens", "4", "--repeats", "1", "--batch", "1", *EAGER],
        "profile": ["--seconds", "1", "--no-keep", "--no-compile"],
    }
    result = RUN.invoke(
        app, [command, "--target", str(tmp_path / "own"), "--dtype", "float32", *options[command]]
    )
    assert result.exit_code == 0, result.output
    assert (
        "M parameters, float32, on cpu" in result.stderr
        and "drafts: prompt lookup" in result.stderr
    )
    assert command != "generate" or result.stdout == stock(TEXT) + "\n"


@pytest.mark.parametrize(
    "drafter",
    nightly_but(
        ("mtp", "suffix+assistant"),
        ("lookup", "mtp", "assistant", "lookup+mtp", "suffix+assistant"),
    ),
)
def test_generate_drafts_as_it_is_told(drafter):
    result = RUN.invoke(app, ["generate", TEXT, "--drafter", drafter, *FAST])
    assert result.exit_code == 0, result.output
    assert result.stdout == stock(TEXT) + "\n"


def test_generate_compares_with_stock():
    options = ["--temperature", "0.8", "--seed", "3", *EAGER]
    result = RUN.invoke(app, ["generate", TEXT, "--compare", *options, *FAST])
    assert result.exit_code == 0, result.output
    assert "batch 1: " in result.stderr and "x the speed of stock generate" in result.stderr
    assert "batch 1" not in result.stdout


def test_generate_has_a_prompt_for_the_embedded_target(monkeypatch):
    terminal = type("Terminal", (), {"isatty": lambda self: True})()
    monkeypatch.setattr(generate, "sys", type("Sys", (), {"stdin": terminal}))
    result = RUN.invoke(app, ["generate", *FAST])
    assert result.stdout == generate.EMBEDDED_PROMPT + stock(generate.EMBEDDED_PROMPT) + "\n"


def test_generate_reads_a_pipe_or_a_file(tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text(TEXT)
    for options, piped in (([], TEXT), (["-"], TEXT), (["--file", str(path)], None)):
        result = RUN.invoke(app, ["generate", *options, *FAST], input=piped)
        assert result.stdout == stock(TEXT) + "\n", result.output


def test_generate_samples_as_stock_does_and_writes_json(tmp_path):
    path = tmp_path / "deep" / "result.json"
    options = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "40", "--seed", "3"]
    result = RUN.invoke(app, ["generate", TEXT, *options, *FAST, "--json", str(path)])
    written = json.loads(path.read_text())
    torch.manual_seed(3)
    assert written["text"] + "\n" == result.stdout
    assert written["text"] == stock(TEXT, do_sample=True, temperature=0.8, top_p=0.9, top_k=40)
    assert (written["seed"], written["finish_reason"], written["metrics"]["tokens"]) == (
        3,
        "length",
        12,
    )
    assert len(written["from_draft"]) == len(written["token_ids"]) == 12
    result = RUN.invoke(app, ["generate", TEXT, *FAST, "--json", "-"])
    assert json.loads(result.stdout)["prompt"] == TEXT  # and nothing else there


def test_generate_stops_at_a_text_and_says_when_a_target_was_missed():
    result = RUN.invoke(app, ["generate", TEXT, *FAST, "--stop", "x"])
    assert result.stdout.rstrip("\n").endswith("x")
    result = RUN.invoke(app, ["generate", TEXT, *FAST, "--slo-tpot", "1e-9", "--strict"])
    assert (result.exit_code, "missed" in result.stderr) == (3, True)
    assert RUN.invoke(app, ["generate", TEXT, *FAST, "--slo-tpot", "1e-9"]).exit_code == 0
