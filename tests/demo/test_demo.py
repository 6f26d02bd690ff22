"""The demo without a browser: what users may ask for, what they get, what is shown."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.demo import cards
from hf_slospec.demo.highlight import HighlightedText, Piece
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_CHARS, PERSONAS, Wish
from hf_slospec.demo.rates import HISTORY_S, Gain, gains, history, shares, tokens_per_s
from hf_slospec.demo.serve import only_with, plain_pace
from hf_slospec.demo.sessions import CONFIG, GONE_S, MAX_SIMULATED, MAX_VISITORS, POLICIES, Crowd, Scene
from hf_slospec.demo.stream import PAUSE_S, View
from hf_slospec.engine.events import Commit
from hf_slospec.errors import NotRunningError, SLOSpecError
from hf_slospec.generate.speculator import clock
from hf_slospec.policies import max_nodes_per_request

WAIT_S = 60.0
SHORT = Wish.of(prompt="def f(x):\n", tpot_slo_ms=50, max_new_tokens=12)
LONG = Wish.of(prompt="def f(x):\n", tpot_slo_ms=50, max_new_tokens=MAX_NEW_TOKENS)


class Clock:
    """The engine's, and what tests wait beyond it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return clock() + self.ahead_s


@pytest.fixture(scope="module")
def generator() -> Iterator[SLOSpecGenerator]:
    config = SLOSpecConfig(**CONFIG.model_dump(exclude={"kv_tokens"}), kv_tokens=40_000)
    with SLOSpecGenerator(*load_tiny_pair(), config) as generator:
        yield generator
        generator.stop(drain=False)


@pytest.fixture
def crowd(generator: SLOSpecGenerator) -> Iterator[Crowd]:
    made = Crowd(generator, Clock())
    yield made
    for visitor in list(made._visitors):
        made.leave(visitor)
    for place, view in enumerate(made.look("test").simulated):
        if view is not None:
            made.remove(place)
    generator.set_policy(POLICIES["auto"])


def until(crowd: Crowd, is_reached: Callable[[Scene], Any], visitor: str = "a") -> Scene:
    end = time.monotonic() + WAIT_S
    while not is_reached(scene := crowd.look(visitor)):
        assert time.monotonic() < end, scene
        time.sleep(0.02)
    return scene


def at(scene: Scene, place: int) -> View:
    view = scene.simulated[place]
    assert view is not None
    return view


class TestWish:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            (dict(prompt=" \n"), "the prompt is empty"),
            (dict(prompt="x" * (MAX_PROMPT_CHARS + 1)), "prompt"),
            (dict(tpot_slo_ms=0), "target ms"),
            (dict(tpot_slo_ms=-5), "target ms"),
            (dict(tpot_slo_ms=float("nan")), "target ms"),
            (dict(max_new_tokens=MAX_NEW_TOKENS + 1), "max new tokens"),
            (dict(max_new_tokens=1), "max new tokens"),
            (dict(temperature=-1), "temperature"),
            (dict(top_p=0), "top p"),
        ],
    )
    def test_limits_are_named_in_words(self, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidInputError, match=words):
            Wish.of(**dict(prompt="x", tpot_slo_ms=50) | fields)

    def test_it_becomes_arguments_of_submit(self) -> None:
        assert SHORT.options == dict(slo_tpot=0.05, best_effort=False, max_new_tokens=12)
        spare = Wish.of(prompt="x", tpot_slo_ms=None, temperature=0.5, top_p=0.9)
        assert spare.options == dict(
            slo_tpot=None, best_effort=True, max_new_tokens=128, do_sample=True, temperature=0.5, top_p=0.9
        )

    def test_simulated_users_differ_in_their_targets(self) -> None:
        wishes = [person.wish(0.1, is_embedded) for is_embedded in (True, False) for person in PERSONAS]
        assert [wish.tpot_slo_ms for wish in wishes[:4]] == [90, 150, 300, None]
        assert len({wish.prompt for wish in wishes}) == len(wishes)
        assert PERSONAS[0].wish(1e-9, True).tpot_slo_ms == 1


class TestPace:
    COMMITS = (Commit(1, 10.0, 1, 0), Commit(4, 11.0, 5, 2), Commit(5, 12.5, 1, 0))

    def test_gains_leave_out_the_prompt(self) -> None:
        assert gains(self.COMMITS) == [Gain(11.0, 3, 5, 2), Gain(12.5, 1, 1, 0)]
        assert gains(self.COMMITS[:1]) == gains([]) == []

    def test_speed_is_of_the_last_seconds_or_since_the_beginning(self) -> None:
        own = gains(self.COMMITS)
        assert tokens_per_s(own, 12.5, 0.0) == pytest.approx(4 / 3)
        assert tokens_per_s(own, 12.5, 10.5) == pytest.approx(4 / 2)
        assert tokens_per_s(own, 14.5, 0.0) == pytest.approx(1 / 3)
        assert tokens_per_s(own, 99.0, 0.0) == tokens_per_s([], 5.0, 5.0) == 0.0

    def test_history_counts_by_seconds(self) -> None:
        seen = history(gains(self.COMMITS), 13.0)
        assert len(seen) == HISTORY_S
        assert seen[-3:] == [3.0, 0.0, 1.0] or seen[-3:] == [0.0, 3.0, 1.0]
        assert sum(seen) == 4
        assert sum(history(gains(self.COMMITS), 13.0 + HISTORY_S)) == 0

    def test_shares_sum_to_one_or_are_none(self) -> None:
        assert shares([3, 1]) == [0.75, 0.25]
        assert shares([0, 0]) == [0.0, 0.0]


class TestMarks:
    def test_pieces_are_the_text_and_say_their_origin(self) -> None:
        marked = HighlightedText(lambda ids: "".join("abcdef"[i] for i in ids))
        assert marked.take([0], [False]) == [Piece("a", False)]
        assert marked.take([0, 1, 2, 3], [False, True, True, False, False]) == [
            Piece("a", False), Piece("bc", True), Piece("d", False),
        ]  # fmt: skip

    def test_a_character_of_two_tokens_appears_whole(self) -> None:
        def to_text(ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

        first, second = "é".encode()
        marked = HighlightedText(to_text)
        assert marked.take([97, first], [False, True]) == [Piece("a", False)]
        assert marked.take([97, first, second], [False, True, False]) == [Piece("a", False), Piece("é", False)]


class TestCrowd:
    def test_a_simulated_user_writes_pauses_and_asks_again_while_somebody_looks(self, crowd: Crowd) -> None:
        place = crowd.add(PERSONAS[0], SHORT)
        scene = until(crowd, lambda scene: at(scene, place).state == "finished")
        view = at(scene, place)
        assert view.judged == 1
        assert scene.record == (view.kept, 1)
        assert "".join(piece.text for piece in view.pieces)
        assert view.metrics is not None and view.metrics.tokens == 12
        assert at(crowd.look("a"), place).state == "finished"  # it reads what it got
        crowd.clock.ahead_s += PAUSE_S  # type: ignore[attr-defined]
        until(crowd, lambda scene: at(scene, place).judged == 2)

    def test_stop_change_and_remove(self, crowd: Crowd) -> None:
        places = [crowd.add(person, LONG) for person in PERSONAS[:3]]
        before = until(crowd, lambda scene: all(at(scene, place).pieces for place in places))
        crowd.stop(places[1])
        scene = until(crowd, lambda scene: at(scene, places[1]).state == "stopped")
        assert at(scene, places[1]).pieces  # what was written stays
        crowd.change(places[1], SHORT)
        scene = until(crowd, lambda scene: at(scene, places[1]).state == "finished")
        assert at(scene, places[1]).wish is SHORT
        assert at(scene, places[1]).version != at(before, places[1]).version
        assert at(scene, places[0]).version == at(before, places[0]).version
        crowd.remove(places[1])
        assert crowd.look("a").simulated[places[1]] is None
        assert crowd.look("a").record[1] >= 1  # what it got still counts
        with pytest.raises(InvalidInputError, match="removed"):
            crowd.stop(places[1])
        assert crowd.add(PERSONAS[3], SHORT) == places[1]

    def test_places_and_visitors_are_limited(self, crowd: Crowd) -> None:
        for _ in range(MAX_SIMULATED):
            crowd.add(PERSONAS[0], LONG)
        with pytest.raises(InvalidInputError, match="room"):
            crowd.add(PERSONAS[0], LONG)
        for number in range(MAX_VISITORS):
            crowd.ask(str(number), LONG)
        with pytest.raises(InvalidInputError, match="visitors"):
            crowd.ask("one more", LONG)
        crowd.stop_own("0")
        crowd.ask("one more", LONG)

    def test_visitors_see_each_other_and_only_their_own_text(self, crowd: Crowd) -> None:
        crowd.ask("a", LONG)
        crowd.ask("b", SHORT)
        scene = until(crowd, lambda scene: scene.own and scene.own.pieces and scene.others[0].pieces)
        assert scene.own is not None and scene.own.wish is LONG
        _, own, others = cards.cards(scene)
        assert 'class="text"' in own and 'class="text"' not in others
        assert scene.everybody[-2:] == [scene.own, *scene.others]  # behind those who were there before
        assert "Visitor 2" in others
        crowd.ask("a", SHORT)  # replaces the one before
        assert len(crowd.look("b").others) == 1
        crowd.leave("b")
        assert crowd.look("a").others == ()

    def test_who_does_not_look_any_more_has_left(self, crowd: Crowd) -> None:
        crowd.look("b")
        crowd.ask("b", LONG)
        assert crowd.look("a").others
        crowd.clock.ahead_s += GONE_S + 1  # type: ignore[attr-defined]
        assert not crowd.look("a").others

    def test_the_policy_changes_under_running_streams(self, crowd: Crowd) -> None:
        place = crowd.add(PERSONAS[0], LONG)
        until(crowd, lambda scene: at(scene, place).pieces)
        for name in POLICIES:
            crowd.set_policy(name)
            scene = crowd.look("a")
            assert scene.policy == name
            assert scene.record == (0, 0)
            before = at(scene, place)
            assert before.state in ("writing", "finished")
        with pytest.raises(InvalidInputError, match="policy"):
            crowd.set_policy("best")

    def test_policies_fit_into_the_generator(self) -> None:
        assert max(map(max_nodes_per_request, POLICIES.values())) <= max_nodes_per_request(CONFIG)

    def test_a_prompt_that_is_too_long_shows_as_its_users_error(self, crowd: Crowd) -> None:
        wish = Wish.of(prompt="é☃" * (MAX_PROMPT_CHARS // 2), tpot_slo_ms=50)
        with pytest.raises(InvalidInputError, match="limit"):
            crowd.ask("a", wish)
        own = crowd.look("a").own
        assert own is not None and own.state == "failed"
        assert "limit" in cards.cards(crowd.look("a"))[1]
        crowd.ask("a", SHORT)
        until(crowd, lambda scene: scene.own and scene.own.state == "finished")

    def test_when_the_engine_dies_it_is_said_and_asking_again_revives_it(self, crowd: Crowd) -> None:
        place = crowd.add(PERSONAS[0], LONG)
        until(crowd, lambda scene: at(scene, place).pieces)
        engine: Any = crowd.generator._service._engine()
        engine.target.verify = _fails
        scene = until(crowd, lambda scene: at(scene, place).state == "failed")
        assert at(scene, place).error == "the accelerator fell off"
        assert "the accelerator fell off" in cards.cards(scene)[0][place]
        crowd.change(place, SHORT)
        until(crowd, lambda scene: at(scene, place).state == "finished")

    def test_a_stopped_engine_is_started_by_the_next_request(self, crowd: Crowd) -> None:
        crowd.generator.stop(drain=False)
        with pytest.raises(NotRunningError):
            crowd.generator.submit("x")
        crowd.ask("a", SHORT)
        until(crowd, lambda scene: scene.own and scene.own.state == "finished")


def _fails(*_: Any) -> Any:
    raise SLOSpecError("the accelerator fell off")


class TestCards:
    def test_everything_written_is_escaped(self, crowd: Crowd) -> None:
        crowd.ask("a", SHORT.model_copy(update={"prompt": "<b>"}))
        scene = until(crowd, lambda scene: scene.own and scene.own.state == "finished")
        assert scene.own is not None
        text = cards._text([Piece("<script>", True), Piece("&", False)], True)
        assert "<script>" not in text
        assert '<span class="d">&lt;script&gt;</span>&amp;' in text

    def test_bars_share_a_scale_and_words_say_what_colours_say(self, crowd: Crowd) -> None:
        slow = Wish.of(prompt="def f(x):\n", tpot_slo_ms=5000, max_new_tokens=12)
        hopeless = Wish.of(prompt="def f(x):\n", tpot_slo_ms=0.001, max_new_tokens=12)
        for place, wish in enumerate((slow, hopeless, slow.model_copy(update={"tpot_slo_ms": None}))):
            crowd.add(PERSONAS[place], wish)
        scene = until(crowd, lambda scene: all(at(scene, place).state == "finished" for place in range(3)))
        kept, missed, spare = cards.cards(scene)[0][:3]
        assert "✓ target met" in kept
        assert "✗ target missed" in missed
        assert "no target" in spare
        assert cards.full_scale(scene.everybody) >= max(cards.speed_of(view) or 0 for view in scene.everybody)
        head = cards.headline(scene)
        assert "1 of 2" in head
        assert "tokens/s in all" in head

    def test_long_answers_show_their_end(self) -> None:
        text = cards._text([Piece("a" * 5000, False), Piece("z" * 1000, True), Piece("end", False)], False)
        assert "end" in text
        assert len(text) < 2 * cards.SHOWN_CHARS

    def test_an_empty_stage_has_a_headline(self, crowd: Crowd) -> None:
        assert "nothing is being decoded" in cards.headline(crowd.look("a"))


def test_targets_are_chosen_by_what_plain_decoding_takes(generator: SLOSpecGenerator) -> None:
    assert 0 < plain_pace(generator) < 60


def test_only_the_password_opens() -> None:
    opens = only_with("sésame")
    assert opens("anybody", "sésame")
    assert not opens("anybody", "")
    assert not opens("sésame", "sesame")


def test_the_package_imports_without_gradio_and_the_command_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['gradio'] = None\n"
        "import hf_slospec, hf_slospec.cli.app\n"
        "from typer.testing import CliRunner\n"
        "result = CliRunner().invoke(hf_slospec.cli.app.app, ['demo', '--size', 'tiny'])\n"
        "assert result.exit_code == 1, result\n"
        "assert 'hf_slospec[demo]' in result.output, result.output\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S * 3)
