"""Every example runs and prints what its text describes; drop_in.py has its own test."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import partial

import pytest

from examples import (
    batch_with_slos,
    custom_drafter,
    custom_policy,
    generate_batch,
    hub_models,
    many_users,
    openai_client,
    quickstart,
    rollouts,
    streaming,
)
from examples.drop_in import CHAT_TEMPLATE
from hf_slospec import (
    Plan,
    Request,
    RequestParams,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cpu import operators
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.tiny.shapes import Shape
from tests.server.conftest import listening
from tests.server.test_serve import NO_COMPILER
from tests.support.paths import ROOT

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def rows_of(table):
    """The cells of a printed table by the first of each row."""
    lines = [line for line in table.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {own[0]: own[1:] for own in cells}


def number(cell):
    found = re.match(r"[\d.]+", cell)
    assert found is not None, f"no number in {cell!r}"
    return float(found[0])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_each_example_says_how_to_run_it_and_is_listed(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    if script.name != "quickstart.py":  # that one is `make run`
        assert f"python examples/{script.name}" in (ast.get_docstring(tree) or "")
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert f"[`{script.name}`]({script.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch):
    """Examples that compare speeds would wait for it."""
    monkeypatch.setattr(operators, "why_unsupported", lambda: "no compiler in these tests")


def test_quickstart(capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "SHAPES", {"0.1B": Shape(256, 1024, 8)})
    quickstart.main(new_tokens=16, repeats=1)
    said = capsys.readouterr().out
    assert re.search(r"^batch 4: [\d.]+x the speed of stock generate \(", said, re.MULTILINE)
    assert ("by drafts;" in said) != ("nothing was drafted: " in said)
    assert len(re.findall(r"^>>> [\d.]+ ms per token", said, re.MULTILINE)) == len(
        quickstart.PROMPTS
    )
    assert "identical tokens: yes" in said


@pytest.fixture
def _not_inflated(monkeypatch):
    """The quickstart inflates its target, by less than for its users; the others would have the
    same text, slower.
    """
    for example in (batch_with_slos, custom_drafter, many_users, streaming):
        monkeypatch.setattr(example, "inflate", lambda model, _: model)


@pytest.mark.usefixtures("_not_inflated")
def test_batch_with_slos(capsys):
    batch_with_slos.main(new_tokens=16)
    said = capsys.readouterr().out
    rows = rows_of(said)
    slos = [rows[name][0] for name in ("tight", "middling", "relaxed")]
    assert slos == sorted(slos, key=float) and float(slos[0]) < float(slos[2])
    assert rows["no SLO"][0] == rows["no SLO"][3] == ""
    assert rows["in two stages"][0] == rows["relaxed"][0]  # the stage it ended in counts
    for own in rows.values():
        assert number(own[1]) > 0.0 and number(own[6]) <= number(own[5])
    assert "identical tokens: yes" in said


@pytest.mark.usefixtures("_not_inflated")
def test_streaming(capsys):
    streaming.main(new_tokens=16)
    said = capsys.readouterr().out
    assert said.count("the same text: yes") == 2
    _, first, _, third = re.split(r"^---.*\n", said, flags=re.MULTILINE)
    pieces, _, figures = third.rpartition("|\n")
    assert pieces.replace("|", "").strip() == first.strip()
    num_tokens, num_steps = map(int, re.findall(r"(\d+) tokens in (\d+) steps", figures)[0])
    assert num_tokens == 16 and pieces.count("|") + 1 <= num_steps <= 16


@pytest.mark.usefixtures("_not_inflated")
def test_many_users(capsys):
    many_users.main(new_tokens=24)
    said = capsys.readouterr().out
    rows = rows_of(said)
    assert list(rows) == list(many_users.USERS)
    assert rows["impossible"][2:4] == ["no", "no"]
    assert rows["batch job"][2:4] == rows["no SLO"][2:4] == ["no", ""]
    assert rows["one line"][5] == "stop" and all(
        own[5] == "length" for name, own in rows.items() if name != "one line"
    )
    assert all(own[4] == "24" for own in rows.values() if own[5] == "length")


@pytest.mark.usefixtures("_not_inflated")
def test_custom_drafter(capsys, monkeypatch, tmp_path):
    # The default policy may find that drafting does not pay on a busy machine.
    always = partial(
        SLOSpecGenerator, config=SLOSpecConfig(policy="fixed", max_depth=4, max_width=2)
    )
    monkeypatch.setattr(custom_drafter, "SLOSpecGenerator", always)
    (tmp_path / "own.py").write_text(tiny_prompts()[0] * 2, encoding="utf-8")
    custom_drafter.main(str(tmp_path), new_tokens=24)
    said = capsys.readouterr().out
    assert re.match(r"\d+ n-grams from 1 files", said)
    rows = rows_of(said)
    num_accepted = 0
    for name in ("prompt lookup", "n-grams", "draft model"):
        assert rows[name][3] == "yes" and number(rows[name][0]) >= 1.0
        accepted, drafted = map(int, rows[name][1].split(" of "))
        assert accepted <= drafted
        num_accepted += accepted
    assert num_accepted


def test_generate_batch(capsys):
    generate_batch.main(new_tokens=12)
    said = capsys.readouterr().out
    assert said.count("mean log probability -") == len(generate_batch.TEXTS)
    assert re.search(r"req_0 came in \d+ parts: \d+ tokens\n4 others are done, too\n[1-9]", said)


@pytest.mark.nightly
def test_rollouts(capsys):
    rollouts.main(size="tiny", dtype="float32", repeats=1, new_tokens=24)
    rows = rows_of(capsys.readouterr().out)
    for name in ("hf_slospec, no drafts", "hf_slospec", "without the noise"):
        assert rows[name][2] == "8 of 8" and number(rows[name][0]) >= 1.0


@pytest.mark.filterwarnings("ignore")
def test_grpo(capsys):
    pytest.importorskip("trl")
    from examples import grpo

    grpo.main(epochs=2, new_tokens=24)
    assert (
        len(
            re.findall(
                r"^epoch \d: [\d.]+ tokens per step and row$", capsys.readouterr().out, re.MULTILINE
            )
        )
        == 2
    )


@pytest.mark.nightly
def test_openai_client(capsys, monkeypatch):
    plain = subprocess.Popen
    monkeypatch.setattr(
        openai_client.subprocess, "Popen", lambda given, **own: plain([*given, *NO_COMPILER], **own)
    )
    openai_client.main(["--size", "tiny", "--new-tokens", "16", "--slo-tpot", "100"])
    said = capsys.readouterr().out
    rows = rows_of(said)
    assert list(rows) == ["completion", *openai_client.USERS, "JSON"]
    assert [own[0] for own in rows.values()] == ["100000.0", "100000.0", "400000.0", ""]
    assert [own[4] for own in rows.values()] == ["yes", "yes", "yes", ""]
    assert all(number(cell) > 0.0 for own in rows.values() for cell in own[1:3])
    pieces = {
        user: re.findall(rf"^{user} \| (.*)$", said, re.MULTILINE) for user in openai_client.USERS
    }
    texts = {user: "".join(map(ast.literal_eval, own)) for user, own in pieces.items()}
    assert (
        texts["copilot"][:8] == texts["summary"][:8] != ""
    )  # one question, greedily; later tokens may be near ties
    assert re.search(r"^name='\w+' num_arguments=\d is_recursive=(True|False)$", said, re.MULTILINE)


def test_openai_client_of_a_server_that_runs_a_model_without_chat_template(capsys):
    """Which then gets prompts in place of messages."""
    with (
        SLOSpecGenerator(*load_tiny_pair()) as generator,
        listening(make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))) as url,
    ):
        openai_client.main(["--url", f"{url}/v1", "--new-tokens", "8", "--slo-tpot", "100"])
    assert list(rows_of(capsys.readouterr().out)) == ["completion", *openai_client.USERS]


def test_a_table_of_ngrams_expects_what_it_has_read():
    drafter = custom_drafter.NgramDrafter([[5, 6, 7, 8, 9], [5, 6, 7, 8, 4]])
    request = Request(0, RequestParams([3, 5, 6], 20))
    plan = Plan(depth=3, width=2)
    (tree,) = drafter.draft([request], plan)
    tree.check()
    assert tree.tokens.tolist() == [6, 7, 8, 9, 4] and tree.parents.tolist() == [-1, 0, 1, 2, 2]
    request.tokens += [1, 5, 6]  # its own text counts more than the files
    (tree,) = drafter.draft([request], plan)
    assert tree.tokens.tolist()[:3] == [6, 1, 5]
    drafter.release(request)
    assert not drafter.own


def test_custom_policy(capsys):
    custom_policy.main(number=20, rates=(0.5, 4.0))
    said = capsys.readouterr().out
    rows = [line.split("  ") for line in said.splitlines() if "/s " in line and "%" in line]
    assert len(rows) == 8
    lengths = [
        float(next(cell for cell in reversed(row[:-1]) if cell.strip()).split()[-1]) for row in rows
    ]
    own, auto, chains, plain = lengths[:4]
    assert plain == 1.0 <= own < chains < auto
    assert lengths[4] > own  # more requests are late under more load


@pytest.mark.parametrize("is_chat", [False, True])
def test_hub_models(capsys, tmp_path, is_chat):
    target, draft, tokenizer = load_tiny_pair()
    tokenizer.chat_template = CHAT_TEMPLATE if is_chat else None
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    prompts = [
        argument for prompt in ("def main():", "import os, ") for argument in ("--prompt", prompt)
    ]
    folders = ["--target", str(tmp_path / "target"), "--assistant", str(tmp_path / "draft")]
    hub_models.main([*folders, *prompts, "--new-tokens", "16", "--device-map", "cpu"])
    said = capsys.readouterr().out
    rows = rows_of(said)
    assert [own[4] for own in rows.values()] == ["yes", "yes"] and list(rows) == [
        "def main():",
        "import os,",
    ]
    assert re.search(r"[\d.]+x plain generate", said)
