"""The demo on a running server: texts, figures, and what is shown when the server is gone."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from hf_slospec import (
    InvalidInputError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOSpecError,
    SLOSpecGenerator,
    UnsupportedOptionError,
    tiny_prompts,
)
from hf_slospec.cli.app import app as command_line
from hf_slospec.demo import cards
from hf_slospec.demo.highlight import TextPiece
from hf_slospec.demo.personas import PERSONAS
from hf_slospec.demo.remote import RemoteGenerator, RemoteHandle, _split
from hf_slospec.demo.serve import Options, plain_tpot_s, prepare
from hf_slospec.demo.sessions import DemoSessions
from hf_slospec.demo.stream import RETRY_S
from hf_slospec.serving.openai.app import ServerSettings, make_app
from hf_slospec.serving.openai.engine import LocalEngine
from tests.demo.test_demo import LONG, SHORT, WAIT_S, Clock, at, until
from tests.serving.openai.conftest import KEY, Served, generator, guarded, listening, served
from tests.serving.openai.test_completions import alone, text_of
from tests.support.fixed_policy import always_drafting

__all__ = ["generator", "guarded", "served"]  # fixtures
PROMPT = tiny_prompts()[0][:120]
NUM_TOKENS = 40


@pytest.fixture(scope="module", autouse=True)
def _drafts_always(generator: SLOSpecGenerator) -> Iterator[None]:
    with always_drafting(generator):
        yield


@pytest.fixture(scope="module")
def completing(generator: SLOSpecGenerator) -> FastAPI:
    """Serves a tokenizer without a chat template."""
    engine = LocalEngine(generator)
    engine.tokenizer = copy.deepcopy(generator.tokenizer)
    engine.tokenizer.chat_template = None
    return make_app(engine, ServerSettings(model_name="without <template>"))


@pytest.fixture(scope="module")
def remote(completing: FastAPI) -> Iterator[RemoteGenerator]:
    with listening(completing) as url:
        made = RemoteGenerator(f"{url}/v1/")
        made.start()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def chatting(served: Served) -> Iterator[RemoteGenerator]:
    made = RemoteGenerator(served.url)
    made.start()
    yield made
    made.stop()


def wait_for(is_reached: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_figures(handle: RemoteHandle, num_tokens: int) -> None:
    commits, metrics = handle.commits, handle.metrics
    assert metrics is not None and metrics.tokens == commits[-1].num_emitted == num_tokens
    assert [c.num_emitted for c in commits] == sorted({c.num_emitted for c in commits})
    assert sum(commit.num_accepted for commit in commits) == metrics.accepted > 0
    assert sum(commit.num_nodes for commit in commits) == metrics.drafted + metrics.steps + 1
    assert [c.at_s for c in commits] == sorted(c.at_s for c in commits)


class TestStreams:
    def test_a_completion_is_the_text_of_generate_and_its_commits_add_up(
        self, served: Served, remote: RemoteGenerator
    ) -> None:
        assert not remote.is_chat and remote.model_name == "without <template>"
        handle = remote.submit(PROMPT, slo_tpot=5.0, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        metrics = handle.result()
        own = alone(served, PROMPT, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        assert "".join(piece.text for piece in handle.pieces) == text_of(served, own)
        assert {piece.is_draft for piece in handle.pieces} == {True, False}
        assert handle.finish_reason == "length" and handle.error is None
        assert metrics.attained and metrics.tpot_slo_s == 5.0 and metrics.tpot_s and metrics.ttft_s
        check_figures(handle, NUM_TOKENS)

    def test_a_chat_is_the_text_of_generate_too(self, served: Served, chatting: RemoteGenerator) -> None:
        assert chatting.is_chat and chatting.model_name == "tiny"
        handle = chatting.submit(PROMPT, max_new_tokens=NUM_TOKENS)
        num_tokens = handle.result().tokens
        messages = [{"role": "user", "content": PROMPT}]
        ids = served.generator.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        own = alone(served, ids, do_sample=False, max_new_tokens=NUM_TOKENS)
        assert "".join(piece.text for piece in handle.pieces) == text_of(served, own)
        check_figures(handle, num_tokens)

    def test_sampling_is_of_the_request(self, remote: RemoteGenerator) -> None:
        options = dict(do_sample=True, temperature=1.5, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        handles = [remote.submit(PROMPT, **options, seed=seed) for seed in (1, 1, 2)]
        for handle in handles:
            handle.result()
        one, same, other = ("".join(piece.text for piece in handle.pieces) for handle in handles)
        assert one == same != other

    def test_cancelling_ends_it_on_the_server(self, generator: SLOSpecGenerator, remote: RemoteGenerator) -> None:
        before = generator.stats().finished.get("cancelled", 0)
        handle = remote.submit(PROMPT, max_new_tokens=400, min_new_tokens=400)
        wait_for(lambda: handle.commits)
        handle.cancel()
        assert handle.finish_reason == "cancelled"
        with pytest.raises(RequestCancelledError):
            handle.result()
        wait_for(lambda: generator.stats().finished.get("cancelled", 0) == before + 1)
        handle.cancel()  # once more does nothing

    def test_stopping_the_page_ends_its_requests_alone(self, generator: SLOSpecGenerator, served: Served) -> None:
        made = RemoteGenerator(served.url)
        made.start()
        handle = made.submit(PROMPT, max_new_tokens=400, min_new_tokens=400)
        made.stop()
        assert handle.finish_reason == "cancelled"
        generator.check_running()

    def test_targets_are_chosen_by_requests_without_an_slo(self, remote: RemoteGenerator) -> None:
        assert 0 < plain_tpot_s(remote) < 60


class TestErrors:
    def test_address_and_key_are_checked_at_the_start(self, guarded: Served) -> None:
        for url, key, kind, words in (
            (guarded.url, None, SLOSpecError, "API key"),
            (guarded.url, "wrong", SLOSpecError, "API key"),
            ("http://127.0.0.1:9", None, NotRunningError, "127.0.0.1:9"),
            ("localhost", None, NotRunningError, "protocol"),
            (f"{guarded.url}/nothing", KEY, SLOSpecError, "Not Found"),
        ):
            made = RemoteGenerator(url, key)
            with pytest.raises(kind, match=words):
                made.start()
            made.stop()
        for url in ("http://a:b", "http://127.0.0.1:99999", "http://127.0.0.1:0"):
            with pytest.raises(InvalidInputError, match="--server"):
                RemoteGenerator(url)
        made = RemoteGenerator(guarded.url, KEY)
        made.start()
        assert made.submit("x", max_new_tokens=2).result().tokens == 2
        made.stop()

    def test_refused_fields_are_named(self, remote: RemoteGenerator) -> None:
        with pytest.raises(InvalidInputError, match="temperature"):
            remote.submit("x", temperature=-1).result()

    def test_a_full_queue_is_shown_and_the_user_asks_again(
        self, remote: RemoteGenerator, generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise QueueFull("the queue is full")

        sessions = DemoSessions(remote, Clock())
        monkeypatch.setattr(generator, "submit", full)
        place = sessions.add(PERSONAS[0], SHORT)
        scene = until(sessions, lambda scene: at(scene, place).state == "failed")
        assert "the queue is full" in cards.cards(scene)[0][place]
        monkeypatch.undo()
        sessions.clock.ahead_s += RETRY_S  # type: ignore[attr-defined]
        until(sessions, lambda scene: at(scene, place).state == "finished")

    def test_a_fault_in_the_stream_is_shown(
        self, remote: RemoteGenerator, generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit = generator.submit

        def failing(*arguments: Any, **options: Any) -> Any:
            handle = submit(*arguments, **options)
            handle.fail(RuntimeError("a fault of its own"))
            return handle

        monkeypatch.setattr(generator, "submit", failing)
        sessions = DemoSessions(remote, Clock())
        sessions.ask("a", SHORT)
        scene = until(sessions, lambda scene: scene.visitor and scene.visitor.state == "failed")
        assert "the server" in cards.cards(scene)[1] and "log" in cards.cards(scene)[1]

    @pytest.mark.parametrize(
        ("lines", "kind"),
        [
            ([], NotRunningError),
            (["data: [DONE]"], NotRunningError),
            (['data: {"error": {"type": "service_unavailable_error", "message": "it stops"}}'], NotRunningError),
            (['data: {"error": {"type": "internal_error", "message": "it failed"}}'], SLOSpecError),
            (['data: {"choices"'], json.JSONDecodeError),
        ],
    )
    def test_streams_that_end_early(self, lines: list[str], kind: type[Exception]) -> None:
        async def given() -> AsyncIterator[str]:
            for line in lines:
                yield line

        handle = RemoteHandle(lambda handle: None)  # type: ignore[arg-type, return-value]
        with pytest.raises(kind):
            asyncio.run(handle.read(given()))

    def test_when_the_server_is_gone_it_is_shown_and_users_go_on_when_it_is_back(self, completing: FastAPI) -> None:
        with listening(completing) as url:
            remote = RemoteGenerator(url)
            remote.start()
            sessions = DemoSessions(remote, Clock())
            place = sessions.add(PERSONAS[0], SHORT)
            until(sessions, lambda scene: at(scene, place).state == "finished")
        try:
            sessions.change(place, LONG)
            sessions.ask("a", SHORT)
            scene = until(sessions, lambda scene: at(scene, place).state == scene.visitor.state == "failed")
            assert f"the server at {url} does not answer" in cards.cards(scene)[0][place]
            assert 'role="alert"' in cards.cards(scene)[1]
            with listening(completing, int(url.rpartition(":")[2])):
                sessions.clock.ahead_s += RETRY_S  # type: ignore[attr-defined]
                until(sessions, lambda scene: at(scene, place).state in ("writing", "finished"))
                sessions.ask("a", SHORT)  # a visitor's own request waits for the visitor
                until(sessions, lambda scene: scene.visitor and scene.visitor.state == "finished")
        finally:
            remote.stop()


class TestPage:
    def test_the_policy_is_not_offered(self, remote: RemoteGenerator) -> None:
        sessions = DemoSessions(remote, Clock())
        scene = sessions.refresh("a")
        assert scene.policy is None
        assert "was chosen" not in cards.headline(scene)
        with pytest.raises(UnsupportedOptionError, match="policy"):
            sessions.set_policy("none")

    def test_it_shows_the_users_of_a_server(self, remote: RemoteGenerator) -> None:
        gr = pytest.importorskip("gradio", reason="gradio is not installed")
        messages: list[str] = []

        async def prepared() -> Any:  # without a running loop, gradio makes some and leaves them open
            return prepare(Options(server=remote.url), messages.append)

        sessions, page = asyncio.run(prepared())
        scene = until(sessions, lambda scene: all(at(scene, place).pieces for place in range(len(PERSONAS))))
        assert at(scene, 0).user_request.prompt == PERSONAS[0].code_prompt  # without a chat template
        assert "tokens/s in total" in cards.headline(scene)
        assert remote.url in messages[0]
        (policy,) = (block for block in page.blocks.values() if isinstance(block, gr.Radio))
        assert not policy.choices and "server" in policy.info
        assert any("without &lt;template&gt;" in str(getattr(block, "value", "")) for block in page.blocks.values())
        sessions.generator.stop()


@pytest.mark.parametrize(
    "options", [["--target", "a", "--assistant", "b"], ["--drafter", "mtp"], ["--size", "0.1B"], ["--device", "cpu"]]
)
def test_options_of_models_in_this_process_are_refused_with_a_server(options: list[str]) -> None:
    runner = CliRunner(env={"COLUMNS": "300"})
    result = runner.invoke(command_line, ["demo", "--server", "http://127.0.0.1:9", *options])
    assert result.exit_code == 2
    assert all(option in result.output for option in options if option.startswith("--"))


def test_a_key_without_a_server_is_refused_and_a_missing_server_is_named() -> None:
    runner = CliRunner(env={"COLUMNS": "300"})
    assert "--server" in runner.invoke(command_line, ["demo", "--api-key", "x"]).output
    result = runner.invoke(command_line, ["demo", "--server", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.output


@pytest.mark.parametrize(
    ("text", "tokens", "num_accepted", "pieces"),
    [
        (" a b c", [" a", " b", " c"], 2, [TextPiece(" a b", True), TextPiece(" c", False)]),
        (" a b c", ["a", "b", "c"], 2, [TextPiece(" a b ", True), TextPiece("c", False)]),  # as SentencePiece does
        (" a", [" a"], 0, [TextPiece(" a", False)]),
        (" a", [" a"], 1, [TextPiece(" a", True)]),
        (" a", [" a", "<end>"], 1, [TextPiece(" a", True)]),
        ("", ["\ufffd"], 0, []),
    ],
)
def test_texts_are_split_by_tokens(text: str, tokens: list[str], num_accepted: int, pieces: list[TextPiece]) -> None:
    assert _split(text, tokens, num_accepted) == pieces
