"""Spec-Bench: its questions, batches and figures, and a run on the embedded pair."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import spec_bench
from benchmarks.spec_bench import (
    CHAT,
    OURS,
    QUESTIONS,
    STOCK,
    Question,
    groups_of,
    questions_of,
    speedups,
)
from hf_slospec import SLOSpecConfig, load_tiny_pair

APP = typer.Typer()
APP.command()(spec_bench.main)


def test_questions_are_those_of_spec_bench_evenly_over_categories():
    questions = questions_of(QUESTIONS, 16)
    assert set(Counter(question.task for question in questions).values()) == {16}
    assert len({question.task for question in questions}) == 6
    categories = Counter(
        json.loads(line)["category"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()
    )
    assert sum(categories.values()) == 480 == len(questions_of(QUESTIONS, 480))
    chats = [question for question in questions if question.task == CHAT]
    assert (
        sorted(question.name[:3] for question in chats) == ["001"] * 8 + ["002"] * 8
    )  # two of eight categories
    assert all(len(question.turns) == 2 for question in chats)


def test_prompts_of_a_file_are_one_task(tmp_path):
    (tmp_path / "own.jsonl").write_text(
        '{"turns": ["a"]}\n\n{"turns": ["b", "c"]}\n', encoding="utf-8"
    )
    questions = questions_of(tmp_path / "own.jsonl", 10)
    assert [(question.task, question.turns) for question in questions] == [
        ("prompts", ["a"]),
        ("prompts", ["b", "c"]),
    ]


def test_batches_are_of_one_task_and_whole():
    questions = [Question(str(i), "ab"[i % 2], ["x"]) for i in range(9)]
    names = [[one.name for one in group] for group in groups_of(questions, 2)]
    assert names == [["0", "2"], ["1", "3"], ["4", "6"], ["5", "7"]]


def test_speedups_are_ratios_of_mean_speeds_of_the_same_questions():
    records: list[dict[str, Any]] = []
    for question, task, stock_s, ours_s in (
        ("1", "QA", 2.0, 1.0),
        ("2", "QA", 1.0, 1.0),
        ("3", "maths", 4.0, 1.0),
    ):
        key = dict(temperature=0.0, batch=1, task=task, question=question, turn=0, tokens=11)
        records += [
            key | dict(method=STOCK, seconds=stock_s, steps=10.0),
            key | dict(method=OURS + "suffix", seconds=ours_s, steps=4.0),
        ]
    rows = {(row["task"], row["method"]): row for row in speedups(records)}
    assert rows["QA", STOCK]["speedup"] == rows["overall", STOCK]["speedup"] == 1.0
    assert rows["QA", OURS + "suffix"]["speedup"] == pytest.approx(22 / 16.5, abs=1e-3)
    assert rows["overall", OURS + "suffix"]["speedup"] == pytest.approx(33 / 19.25, abs=1e-3)
    low, high = rows["overall", OURS + "suffix"]["interval"]
    assert 1.0 <= low < 33 / 19.25 < high <= 4.0
    assert (
        rows["overall", OURS + "suffix"]["tokens_per_step"] == 2.5
        and rows["QA", STOCK]["tokens_per_step"] == 1.0
    )


@pytest.mark.nightly
def test_a_run_is_continued_and_all_methods_write_the_same(tmp_path, monkeypatch):
    eager = {"compile": False}  # compiling takes long
    monkeypatch.setattr(
        spec_bench, "SLOSpecConfig", lambda **options: SLOSpecConfig(**options | eager)
    )
    target, draft, tokenizer = load_tiny_pair()
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    for part in (draft, tokenizer):
        part.save_pretrained(tmp_path / "draft")
    lines = [
        {"turns": ["def test_empty(self):", "    def test_full(self):"]},
        {"turns": ["class A:"]},
        {"turns": ["import os"]},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    file = tmp_path / "results.json"
    options: list[Any] = [
        "--target",
        tmp_path / "target",
        "--assistant",
        tmp_path / "draft",
        "--prompts",
        tmp_path / "own.jsonl",
    ]
    options += ["--drafters", "none,lookup,assistant/3,lookup/2x2"]
    options += "--new-tokens 6 --temperatures 0 --dtype float32 --batches 1,2 --json".split()
    options.append(file)
    run = CliRunner().invoke(APP, [*map(str, options), "--minutes", "0"])
    assert run.exit_code == 0, run.output
    assert not file.exists()  # no time for a question
    run = CliRunner().invoke(APP, [*map(str, options), "--plot", str(tmp_path / "plot.png")])
    assert run.exit_code == 0, run.output
    content = json.loads(file.read_text(encoding="utf-8"))
    records = content["records"]
    assert Counter((r["batch"], r["temperature"]) for r in records) == {
        (1, 0.0): 4 * 12, (2, 0.0): 11,
    }  # fmt: skip
    assert all(r["equal"] == r["batch"] for r in records) and all(r["tokens"] for r in records)
    assert {row["task"] for row in content["results"]} == {"prompts", "overall"}
    drafting = [row for row in content["results"] if row["method"].endswith("assistant/3")]
    assert drafting and all(row["expected_over_committed"] > 0 for row in drafting)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    again = CliRunner().invoke(APP, [*map(str, options)])
    assert (
        again.exit_code == 0 and json.loads(file.read_text(encoding="utf-8"))["records"] == records
    )


def test_stock_is_compiled_on_a_cpu_and_takes_a_step_per_token(monkeypatch):
    compiled = []

    def compile_of(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr("torch.compile", compile_of)
    target, _, tokenizer = load_tiny_pair()
    contest = spec_bench.Contest(target, None, tokenizer, 6, 0.0, 64)
    methods = contest.methods([], [], 1, has_compiled=True)
    inputs = contest.encoded([["def main():"]])
    answer = methods[spec_bench.COMPILED](inputs)
    assert len(compiled) == 1
    assert answer.texts == methods[STOCK](inputs).texts
    assert answer.num_steps == answer.num_tokens - 1 == 5
    assert len(compiled) == 1  # stock itself is eager


def test_the_longest_prompts_warm_up():
    target, _, tokenizer = load_tiny_pair()
    contest = spec_bench.Contest(target, None, tokenizer, 6, 0.0, 64)
    groups = groups_of([Question(str(n), "a", ["x" * n, "y" * 99]) for n in (3, 9, 5)], 1)
    assert contest.longest(groups)["input_ids"].equal(contest.encoded([["x" * 9]])["input_ids"])


@pytest.mark.parametrize(
    ("name", "drafter", "options"),
    [
        ("none", "none", dict(policy="none")),
        ("lookup", "lookup", dict(policy="auto")),
        ("lookup/4x2", "lookup", dict(policy="fixed", max_depth=4, max_width=2)),
        ("a/head/3", "a/head", dict(policy="fixed", max_depth=3, max_width=1)),
        ("a/head", "a/head", dict(policy="auto")),
    ],
)
def test_a_drafter_may_have_a_shape_or_be_a_folder(name, drafter, options):
    assert spec_bench.shaped(name) == (drafter, options)
