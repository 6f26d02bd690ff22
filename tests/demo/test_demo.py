"""The demo without a browser: accepted input, generated text and displayed figures."""

from __future__ import annotations

import threading
import time

import pytest
from typer.testing import CliRunner

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.cli.app import app
from hf_slospec.demo import cards, race, serve
from hf_slospec.demo.generator import FIXED, DemoGenerator, HighlightedText, TextPiece
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_CHARS, PERSONAS, UserRequest
from hf_slospec.demo.race import Lane, Race
from hf_slospec.demo.serve import password_check
from hf_slospec.demo.sessions import (
    CONFIG,
    MAX_VISITORS,
    VISITOR_TIMEOUT_S,
    DemoSessions,
)
from hf_slospec.demo.stream import (
    PAUSE_S,
    Gain,
    gains,
    shares,
    tokens_per_s,
)
from hf_slospec.engine.events import Commit
from hf_slospec.errors import NotRunningError, SLOSpecError
from hf_slospec.generate.speculator import clock
from hf_slospec.policies import max_nodes_per_request

WAIT_S = 60.0
PROMPT = "def f(x):\n"
SHORT = UserRequest(prompt="def f(x):\n", tpot_slo_ms=50, max_new_tokens=12)
LONG = UserRequest(prompt="def f(x):\n", tpot_slo_ms=50, max_new_tokens=MAX_NEW_TOKENS)


class Clock:
    """The engine's, and what tests wait beyond it."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return clock() + self.ahead_s


@pytest.fixture(scope="module")
def generator():
    config = SLOSpecConfig(**CONFIG.model_dump(exclude={"kv_tokens"}), kv_tokens=40_000)
    with SLOSpecGenerator(*load_tiny_pair(), config) as generator:
        yield generator
        generator.stop(drain=False)


@pytest.fixture
def sessions(generator):
    made = DemoSessions(DemoGenerator(generator), Clock())
    yield made
    for visitor in list(made._visitors):
        made.leave(visitor)
    for place in range(len(made._simulated)):
        made.stop(place)
    generator.set_policy("auto")


def until(sessions, is_reached, visitor="a"):
    end = time.monotonic() + WAIT_S
    while not is_reached(scene := sessions.refresh(visitor)):
        assert time.monotonic() < end, scene
        time.sleep(0.02)
    return scene


def at(scene, place):
    return scene.simulated[place]


def add(sessions, persona, request):
    """Add a simulated user, and return its place."""
    sessions.add(persona, request)
    return len(sessions._simulated) - 1


class TestUserRequest:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            (dict(prompt=" \n"), "prompt: must not be empty"),
            (dict(prompt="x" * (MAX_PROMPT_CHARS + 1)), "prompt"),
            (dict(tpot_slo_ms=0), "tpot_slo_ms"),
            (dict(tpot_slo_ms=-5), "tpot_slo_ms"),
            (dict(tpot_slo_ms=float("nan")), "tpot_slo_ms"),
            (dict(max_new_tokens=MAX_NEW_TOKENS + 1), "max_new_tokens"),
            (dict(max_new_tokens=1), "max_new_tokens"),
            (dict(temperature=-1), "temperature"),
            (dict(top_p=0), "top_p"),
        ],
    )
    def test_limits_are_named_in_words(self, fields, words):
        with pytest.raises(InvalidInputError, match=words):
            UserRequest(**dict(prompt="x", tpot_slo_ms=50) | fields)

    def test_it_becomes_arguments_of_submit(self):
        assert SHORT.options == dict(slo_tpot=0.05, best_effort=False, max_new_tokens=12)
        without_slo = UserRequest(prompt="x", tpot_slo_ms=None, temperature=0.5, top_p=0.9)
        assert without_slo.options == dict(
            slo_tpot=None,
            best_effort=True,
            max_new_tokens=128,
            do_sample=True,
            temperature=0.5,
            top_p=0.9,
        )

    @pytest.mark.parametrize(
        ("plain_s", "drafted_s", "slos_ms"),
        [
            (0.1, 0.025, [50, 150, 300, None]),  # the first is met with drafts only
            (0.1, 0.1, [115, 150, 300, None]),  # drafts gain nothing
            (0.1, 0.2, [230, 150, 300, None]),  # drafts cost time
            (1e-9, 1e-9, [1, 1, 1, None]),
        ],
    )
    def test_slos_are_chosen_by_measured_speeds(self, plain_s, drafted_s, slos_ms):
        for is_chat in (True, False):
            requests = [persona.request(plain_s, drafted_s, is_chat) for persona in PERSONAS]
            assert [request.tpot_slo_ms for request in requests] == slos_ms
            assert len({request.prompt for request in requests}) == len(requests)


class TestRates:
    COMMITS = (Commit(1, 10.0, 1, 0), Commit(4, 11.0, 5, 2), Commit(5, 12.5, 1, 0))

    def test_gains_leave_out_the_prompt(self):
        assert gains(self.COMMITS) == [Gain(11.0, 3, 5), Gain(12.5, 1, 1)]
        assert gains(self.COMMITS[:1]) == gains([]) == []

    def test_speed_is_of_the_last_seconds_or_since_the_beginning(self):
        own = gains(self.COMMITS)
        assert tokens_per_s(own, 12.5, 0.0) == pytest.approx(4 / 3)
        assert tokens_per_s(own, 12.5, 10.5) == pytest.approx(4 / 2)
        assert tokens_per_s(own, 14.5, 0.0) == pytest.approx(1 / 3)
        assert tokens_per_s(own, 99.0, 0.0) == tokens_per_s([], 5.0, 5.0) == 0.0

    def test_shares_sum_to_one_or_are_none(self):
        assert shares([3, 1]) == [0.75, 0.25]
        assert shares([0, 0]) == [0.0, 0.0]


class TestHighlight:
    def test_pieces_are_the_text_and_say_their_origin(self):
        highlighted = HighlightedText(lambda ids: "".join("abcdef"[i] for i in ids))
        assert highlighted.update([0], [False]) == [TextPiece("a", False)]
        assert highlighted.update([0, 1, 2, 3], [False, True, True, False, False]) == [
            TextPiece("a", False), TextPiece("bc", True), TextPiece("d", False),
        ]  # fmt: skip

    def test_a_character_of_two_tokens_appears_whole(self):
        def to_text(ids):
            return bytes(ids).decode(errors="replace")

        first, second = "é".encode()
        highlighted = HighlightedText(to_text)
        assert highlighted.update([97, first], [False, True]) == [TextPiece("a", False)]
        assert highlighted.update([97, first, second], [False, True, False]) == [
            TextPiece("a", False),
            TextPiece("é", False),
        ]


class TestDemoSessions:
    def test_a_simulated_user_writes_pauses_and_asks_again_while_a_page_refreshes(self, sessions):
        place = add(sessions, PERSONAS[0], SHORT)
        scene = until(sessions, lambda scene: at(scene, place).state == "finished")
        view = at(scene, place)
        assert view.num_judged == 1
        assert scene.counts == (view.num_attained, 1)
        assert "".join(piece.text for piece in view.pieces)
        assert view.metrics.tokens == 12
        assert at(sessions.refresh("a"), place).state == "finished"  # it reads what it got
        sessions.clock.ahead_s += PAUSE_S
        until(sessions, lambda scene: at(scene, place).num_judged == 2)

    def test_stop_and_change(self, sessions):
        places = [add(sessions, persona, LONG) for persona in PERSONAS[:3]]
        before = until(sessions, lambda scene: all(at(scene, place).pieces for place in places))
        sessions.stop(places[1])
        scene = until(sessions, lambda scene: at(scene, places[1]).state == "stopped")
        assert at(scene, places[1]).pieces  # what was written stays
        sessions.change(places[1], SHORT)
        scene = until(sessions, lambda scene: at(scene, places[1]).state == "finished")
        assert at(scene, places[1]).user_request is SHORT
        assert at(scene, places[1]).version != at(before, places[1]).version
        assert at(scene, places[0]).version == at(before, places[0]).version

    def test_visitors_are_limited(self, sessions):
        for number in range(MAX_VISITORS):
            sessions.ask(str(number), LONG)
        with pytest.raises(InvalidInputError, match="visitors"):
            sessions.ask("one more", LONG)
        sessions.stop_own("0")
        sessions.ask("one more", LONG)

    def test_visitors_see_each_other_and_only_their_own_text(self, sessions):
        sessions.ask("a", LONG)
        sessions.ask("b", SHORT)
        scene = until(
            sessions,
            lambda scene: scene.visitor and scene.visitor.pieces and scene.other_visitors[0].pieces,
        )
        assert scene.visitor.user_request is LONG
        _, own = cards.cards(scene)
        assert "def f(x):" in own
        assert cards.cards(sessions.refresh("b"))[1] != own
        assert scene.other_visitors[0].name == "Visitor 2"
        assert "def f(x):" not in cards.headline(scene)
        assert scene.views[-2:] == [
            scene.visitor,
            *scene.other_visitors,
        ]  # behind those who were there before
        sessions.ask("a", SHORT)  # replaces the one before
        assert len(sessions.refresh("b").other_visitors) == 1
        sessions.leave("b")
        assert sessions.refresh("a").other_visitors == ()

    def test_who_does_not_look_any_more_has_left(self, sessions):
        sessions.refresh("b")
        sessions.ask("b", LONG)
        assert sessions.refresh("a").other_visitors
        sessions.clock.ahead_s += VISITOR_TIMEOUT_S + 1
        assert not sessions.refresh("a").other_visitors

    def test_a_change_of_the_policy_starts_answers_and_counts_again(self, sessions):
        long, short, stopped = (add(sessions, PERSONAS[0], each) for each in (LONG, SHORT, LONG))
        sessions.ask("a", SHORT)
        scene = until(
            sessions,
            lambda scene: scene.counts[1] == 2 and at(scene, long).pieces,
        )
        sessions.stop(stopped)
        handles = [stream._handle for stream in sessions._streams()]
        for name in ("none", "adaserve"):
            sessions.set_policy(name)
            scene = sessions.refresh("a")
            assert scene.policy == name
            assert scene.counts == (0, 0)
            assert at(scene, stopped).state == "stopped"
            assert {at(scene, short).state, scene.visitor.state} <= {"waiting", "writing"}
            view = at(scene, long)  # may have begun to write before this look
            assert view.pieces or view.tokens_per_s == view.nodes == 0
            until(sessions, lambda scene: scene.counts[1] == 2)
        again = [stream._handle for stream in sessions._streams()]
        assert [old is new for old, new in zip(handles, again, strict=True)] == [
            False, False, True, False,
        ]  # fmt: skip
        with pytest.raises(InvalidInputError, match="policy"):
            sessions.set_policy("best")

    def test_users_write_the_same_texts_with_each_policy(self, sessions):
        sampled = SHORT.model_copy(update={"temperature": 1.0})
        place = add(sessions, PERSONAS[0], sampled)
        texts = []
        for name in ("none", "fixed"):
            sessions.set_policy(name)
            until(sessions, lambda scene: at(scene, place).state == "finished")
            texts.append(sessions._simulated[place]._handle.token_ids)
        assert texts[0] == texts[1]

    def test_policies_fit_into_the_generator(self):
        assert max_nodes_per_request(FIXED) <= max_nodes_per_request(CONFIG)

    def test_a_prompt_that_is_too_long_shows_as_its_users_error(self, sessions):
        request = UserRequest(prompt="é☃" * (MAX_PROMPT_CHARS // 2), tpot_slo_ms=50)
        with pytest.raises(InvalidInputError, match="limit"):
            sessions.ask("a", request)
        own = sessions.refresh("a").visitor
        assert own.state == "failed"
        assert "limit" in cards.cards(sessions.refresh("a"))[1]
        sessions.ask("a", SHORT)
        until(sessions, lambda scene: scene.visitor and scene.visitor.state == "finished")

    def test_when_the_engine_dies_it_is_said_and_asking_again_revives_it(self, sessions):
        place = add(sessions, PERSONAS[0], LONG)
        until(sessions, lambda scene: at(scene, place).pieces)
        engine = sessions.generator.generator._service._engine()
        engine.target.verify = _fails
        scene = until(sessions, lambda scene: at(scene, place).state == "failed")
        assert at(scene, place).error == "the accelerator fell off"
        assert "the accelerator fell off" in cards.cards(scene)[0][place]
        sessions.change(place, SHORT)
        until(sessions, lambda scene: at(scene, place).state == "finished")

    def test_a_stopped_engine_is_started_by_the_next_request(self, sessions):
        sessions.generator.stop()
        with pytest.raises(NotRunningError):
            sessions.generator.generator.submit("x")
        sessions.ask("a", SHORT)
        until(sessions, lambda scene: scene.visitor and scene.visitor.state == "finished")


def _fails(*_):
    raise SLOSpecError("the accelerator fell off")


class TestCards:
    def test_everything_written_is_escaped(self, sessions):
        sessions.ask("a", SHORT.model_copy(update={"prompt": "<b>"}))
        until(sessions, lambda scene: scene.visitor and scene.visitor.state == "finished")
        text = cards._text([TextPiece("<script>", True), TextPiece("&", False)], True)
        assert "<script>" not in text
        assert '<span class="d">&lt;script&gt;</span>&amp;' in text

    def test_bars_share_a_scale_and_words_say_what_colours_say(self, sessions):
        slow = UserRequest(prompt="def f(x):\n", tpot_slo_ms=5000, max_new_tokens=12)
        hopeless = UserRequest(prompt="def f(x):\n", tpot_slo_ms=0.001, max_new_tokens=12)
        for place, request in enumerate(
            (slow, hopeless, slow.model_copy(update={"tpot_slo_ms": None}))
        ):
            sessions.add(PERSONAS[place], request)
        scene = until(
            sessions, lambda scene: all(at(scene, place).state == "finished" for place in range(3))
        )
        met, missed, unjudged = cards.cards(scene)[0][:3]
        assert "✓ SLO met" in met
        assert "✗ SLO missed" in missed
        assert "no SLO" in unjudged
        assert cards.full_scale(scene.views) >= max(
            cards.speed_of(view) or 0 for view in scene.views
        )
        head = cards.headline(scene)
        assert "1 of 2" in head
        assert "tokens/s in total" in head

    def test_long_answers_show_their_end(self):
        text = cards._text(
            [TextPiece("a" * 5000, False), TextPiece("z" * 1000, True), TextPiece("end", False)],
            False,
        )
        assert "end" in text
        assert len(text) < 2 * cards.MAX_CHARS

    def test_an_empty_stage_has_a_headline(self, sessions):
        assert "nothing is being decoded" in cards.headline(sessions.refresh("a"))


class TestRace:
    def test_three_lanes_decode_the_same_tokens_while_users_pause(self, sessions, monkeypatch):
        monkeypatch.setattr(race, "NUM_TOKENS", 24)
        place, stopped = (add(sessions, PERSONAS[0], LONG) for _ in range(2))
        sessions.stop(stopped)
        sessions.ask("b", SHORT)
        until(sessions, lambda scene: scene.other_visitors[0].state == "finished")
        racing = threading.Thread(target=sessions.race, args=("a", PROMPT))
        racing.start()
        scene = until(sessions, lambda scene: scene.race is not None and scene.race.lanes)
        if not scene.race.is_done:
            assert at(scene, place).state == "paused"
            for refused in (
                lambda: sessions.race("b", PROMPT),
                lambda: sessions.ask("b", SHORT),
                lambda: sessions.set_policy("none"),
                lambda: sessions.change(place, SHORT),
            ):
                with pytest.raises(InvalidInputError, match="race"):
                    refused()
        racing.join(WAIT_S)
        scene = sessions.refresh("a")
        stock, plain, drafted = scene.race.lanes
        assert scene.race.is_done and sessions.refresh("b").race is None
        assert len(stock.source.token_ids) == 24 == scene.race.num_same
        assert stock.tokens_per_step == plain.tokens_per_step == 1.0
        assert drafted.tokens_per_step >= 1.0
        assert all(lane.tpot_s > 0 for lane in scene.race.lanes)
        assert at(scene, place).state in ("waiting", "writing")
        assert at(scene, stopped).state == "stopped"
        assert scene.other_visitors[0].state == "finished"
        assert scene.policy == sessions.generator.policy == "auto"
        assert sessions.generator.generator.decoder.batcher_config.policy == "auto"

    def test_a_refused_prompt_ends_the_race(self, sessions):
        place = add(sessions, PERSONAS[0], LONG)
        with pytest.raises(InvalidInputError, match="limit"):
            sessions.race("a", "é☃" * MAX_PROMPT_CHARS)
        scene = sessions.refresh("a")
        assert scene.race is None
        assert at(scene, place).state in ("waiting", "writing")

    def test_the_result_divides_the_gain_into_steps_and_drafts(self):
        tokens = list(range(9))
        lanes = [
            lane(*((0.5 + 0.1 * i, [token], 0) for i, token in enumerate(tokens))),
            lane(*((0.2 + 0.05 * i, [token], 0) for i, token in enumerate(tokens))),
            lane((0.2, [0], 0), (0.3, tokens[1:5], 3), (0.4, tokens[5:], 3)),
        ]
        shown = Race("x", lanes, "auto", "compiled", is_done=True)
        said = cards.result(shown)
        assert "4.0 times the speed of stock generate" in said
        assert "100.0 → 25.0 ms per token" in said
        assert "2.0x</b> by faster steps (forwards compiled)" in said
        assert "2.0x</b> by drafts (auto: 4.00 tokens per step)" in said
        assert "the same 9 tokens" in said
        lanes[2] = lane((0.2, [0], 0), (0.3, [1, 7], 1))
        assert "The first 2 tokens are the same" in cards.result(shown)
        lanes[2] = lane((0.2, [0], 0), (0.3, [1], 0), (0.4, [2], 0))
        assert "no draft was accepted" in cards.result(shown)
        assert "by drafts" not in cards.result(shown)
        lanes[2] = lane((0.2, [0], 0))
        assert "a single token" in cards.result(shown)

    def test_a_race_is_played_back_when_it_is_done(self):
        steps = (0.25, [60], 0), (1.5, [97, 98, 62], 2)
        shown = Race("x", [lane(*steps)] * 3)
        text = cards.race_html(shown, text_of)
        assert "Lane 3 of 3" in text and "replay" not in text and "times" not in text
        shown.is_done = True
        text = cards.race_html(shown, text_of)
        assert text.count('style="--t:0.250s;--n:1">&lt;</span>') == 3
        assert '--t:1.500s;--n:3"><span class="d">ab</span>&gt;</span>' in text
        assert text.count("replay") == 3 and "--end:1.500s" in text


def lane(*steps):
    """Return a lane with steps, each of them (time, tokens, accepted tokens)."""
    source = race.Recorder()
    for at_s, tokens, num_accepted in steps:
        source.token_ids += tokens
        source.from_draft += [index < num_accepted for index in range(len(tokens))]
        source.commits.append(Commit(len(source.token_ids), at_s, 1, num_accepted))
    return Lane(source, 0.0)


def text_of(tokens):
    return bytes(tokens).decode()


def test_only_the_password_opens():
    opens = password_check("sésame")
    assert opens("anybody", "sésame")
    assert not opens("anybody", "")
    assert not opens("sésame", "sesame")


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--host", "0.0.0.0"], {}, "--no-password"),
        (["--host", "::"], {}, "--no-password"),
        ([], {"GRADIO_SERVER_NAME": "0.0.0.0"}, "--no-password"),
        (["--host", "0.0.0.0", "--password", ""], {}, "empty"),
        (["--password", ""], {}, "empty"),
    ],
)
def test_other_machines_need_a_password(options, environment, said, monkeypatch):
    monkeypatch.setattr(serve, "demo_generator", None)  # nothing is loaded
    result = CliRunner(env=environment | {"COLUMNS": "300"}).invoke(app, ["demo", *options])
    assert result.exit_code == 2 and said in result.output
