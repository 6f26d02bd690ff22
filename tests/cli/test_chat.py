"""``chat``, driven by lines of standard input on the embedded pair."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from examples.drop_in import CHAT_TEMPLATE
from hf_slospec import SLOSpecGenerator, load_tiny_pair
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.cli.app import app
from hf_slospec.cli.commands import chat
from hf_slospec.errors import InvalidInputError

RUN = CliRunner(env={"COLUMNS": "200"})
OPTIONS = ["--dtype", "float32", "--max-new-tokens", "12", "--config", '{"compile": false}']
FIRST = "def copy_file(src, dst):"
SECOND = "def walk(path):"


def written_by_stock(text):
    target, _, tokenizer = load_tiny_pair()
    inputs = tokenizer(text, return_tensors="pt")
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_lines_of_a_pipe_are_answered_as_by_stock_generate():
    first = written_by_stock(FIRST)
    commands = ["/policy", "/slo 10", "/slo", "/policy none", "", "/nothing", "/slo x"]
    commands += ["/policy nothing", "/help"]
    lines = [FIRST, *commands, SECOND, "/clear", FIRST, "/quit", "never"]
    result = RUN.invoke(app, ["chat", *OPTIONS], input="\n".join(lines))
    assert result.exit_code == 0, result.output
    second = written_by_stock(f"{FIRST}{first}\n{SECOND}")
    assert result.stdout == "\n".join((first, second, first, ""))
    said = result.stderr
    assert said.count("no chat template") == 1
    assert said.count("12 tokens, ") == 3 and said.count("SLO of 10000 ms met") == 2
    assert "tokens per step" in said and said.count("nothing drafted") == 2
    assert "policy: auto\n" in said and "policy: none\n" in said
    assert said.count("SLO: 10000 ms\n") == 2
    assert "/nothing is no command" in said and "got x" in said
    assert "there is no policy 'nothing'" in said
    assert "the conversation is empty" in said


def test_options_are_checked():
    for option in (["--slo-tpot", "-1"], ["--system", "Be brief."]):
        assert RUN.invoke(app, ["chat", *OPTIONS, *option], input="").exit_code == 2


@pytest.fixture(scope="module")
def generator():
    target, draft, tokenizer = load_tiny_pair()
    tokenizer.chat_template = CHAT_TEMPLATE
    with SLOSpecGenerator(target, draft, tokenizer) as running:
        yield running


@pytest.fixture
def conversation(generator):
    return chat.Conversation(generator, {"max_new_tokens": 40}, "system")


def test_messages_are_kept_and_their_kv_is_reused(conversation):
    handle = conversation.ask(FIRST)
    answer = handle.result().text
    conversation.add(FIRST, answer, handle)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant"]
    prompt = [*conversation.messages, {"role": "user", "content": SECOND}]
    ids = conversation.generator.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    second = conversation.ask(SECOND)
    second.result()
    assert second.request.tokens[: len(ids)] == ids
    assert second.metrics.reused > 0
    conversation.clear()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_an_interrupt_stops_the_answer_and_keeps_its_text(conversation, monkeypatch, capsys):
    plain = RequestHandle.__iter__

    def interrupted(self):
        yield next(plain(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestHandle, "__iter__", interrupted)
    chat._answer(conversation, FIRST, chat.Console(stderr=True))
    said = capsys.readouterr()
    assert "stopped" in said.err
    assert said.out.endswith("\n")  # before "stopped"
    assert conversation.messages[-1] == {"role": "assistant", "content": said.out.rstrip("\n")}


def test_figures_are_below_the_text_in_a_terminal(monkeypatch, capsys):
    terminal = chat.Console(force_terminal=True, highlight=False, _environ={})
    monkeypatch.setattr(chat, "Console", lambda **_: terminal)
    with chat._view(lambda: "12 tokens, at" + " 9.9 ms per token" * 9) as show:
        show("one\ntw")
        show("o\nthree")
    out = capsys.readouterr().out
    assert "12 tokens, at" in out and "…" in out  # in one line
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out).splitlines()
    assert [line for line in lines if line in ("one", "two", "three")] == ["one", "two", "three"]


def test_a_pace_that_is_no_number_is_refused(conversation):
    for seconds in ("0", "-1", "nan", "inf"):
        with pytest.raises(InvalidInputError, match=f"such as 0.05, or none; got {seconds}"):
            conversation.command(f"/slo {seconds}")
    assert conversation.slo_tpot is None
