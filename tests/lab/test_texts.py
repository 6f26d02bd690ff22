"""Simulated texts: calibrated, ranked, and replayed as they were recorded."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.errors import InvalidFileError
from hf_slospec.lab.texts import Library, RecordedText, Recording, TextModel
from tests.support.toys.trees import SEEDS

TEXT_MODELS = st.builds(
    TextModel,
    acceptance=st.floats(0.05, 0.95),
    spread=st.sampled_from([0.5, 12.0, math.inf]),
    evenness=st.sampled_from([0.3, 2.0, math.inf]),
    sibling=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    sharpness=st.sampled_from([0.5, 1.0, 3.0]),
    num_children=st.integers(1, 6),
    distance=st.sampled_from([0.0, 0.2, 0.9]),
    coupled=st.booleans(),
)


@given(model=TEXT_MODELS, seed=SEEDS, length=st.integers(1, 60))
@settings(deadline=None)
def test_children_descend_and_ranks_name_them(model, seed, length):
    text = model.write(np.random.default_rng(seed), length)
    assert text.child_probs.shape == (length, model.num_children)
    assert len(text) == length
    assert (np.diff(text.child_probs, axis=1) <= 0.0).all()
    assert (text.child_probs >= 0.0).all() and (text.child_probs.sum(axis=1) <= 1.0 + 1e-9).all()
    assert ((text.ranks >= 0) & (text.ranks <= model.num_children)).all()


def hits(text):
    """Which child the target took.  -> [length, num_children] bool"""
    return text.ranks[:, None] == np.arange(text.child_probs.shape[1])


@pytest.mark.parametrize("sibling", [0.2, 0.5, 0.8])
def test_with_sharpness_1_probabilities_are_the_frequencies_of_hits(sibling):
    model = TextModel(0.7, spread=3.0, sibling=sibling)
    rng = np.random.default_rng(0)
    texts = [model.write(rng, 200) for _ in range(400)]
    probs, hit = (
        np.concatenate([t.child_probs for t in texts]),
        np.concatenate([hits(t) for t in texts]),
    )
    for rank in range(model.num_children):
        for least in np.arange(0.0, 1.0, 0.1):
            within = (probs[:, rank] >= least) & (probs[:, rank] < least + 0.1)
            if (number := np.count_nonzero(within)) > 200:
                shown = probs[within, rank].mean()
                found = hit[within, rank].mean()
                error = math.sqrt(max(shown * (1.0 - shown), 1e-3) / number)
                assert abs(found - shown) < 4.5 * error, (rank, least)


def test_a_sharp_draft_is_too_sure_and_a_dull_one_not_sure_enough():
    for sharpness, sign in ((3.0, 1.0), (0.4, -1.0)):
        text = TextModel(0.7, sharpness=sharpness).write(np.random.default_rng(0), 20_000)
        is_sure = text.child_probs[:, 0] > 0.75
        assert sign * (text.child_probs[is_sure, 0].mean() - hits(text)[is_sure, 0].mean()) > 0.03


def first_hits(distance, coupled, num_children=4):
    """How often the target takes the draft's first choice."""
    model = TextModel(
        0.5, evenness=6.0, num_children=num_children, distance=distance, coupled=coupled
    )
    return float(hits(model.write(np.random.default_rng(1), 20_000))[:, 0].mean())


def test_a_draft_further_away_is_accepted_less_often():
    for coupled in (False, True):
        rates = [first_hits(distance, coupled) for distance in (0.0, 0.15, 0.3, 0.5)]
        assert all(a > b + 0.02 for a, b in itertools.pairwise(rates)), rates
    alike = TextModel(0.5, evenness=6.0).write(np.random.default_rng(1), 20_000)
    assert first_hits(1e-6, coupled=False) == pytest.approx(
        float(hits(alike)[:, 0].mean()), abs=0.02
    )


@pytest.mark.parametrize("distance", [0.0, 0.2, 0.4])
def test_coupled_drafts_match_at_least_as_often_as_theory_says(distance):
    """(1 - TV) / (1 + TV), Daliri et al., arXiv 2408.07978."""
    assert first_hits(distance, coupled=True) >= (1 - distance) / (1 + distance) - 0.01
    assert first_hits(distance, coupled=True) > first_hits(distance, coupled=False) + 0.05


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_chains_are_accepted_as_often_as_asked_for(acceptance):
    model, rng = (
        TextModel(acceptance, sibling=0.0),
        np.random.default_rng(1),
    )  # without siblings the first one is best
    rates = [hits(model.write(rng, 100))[:, 0].mean() for _ in range(2000)]
    assert np.mean(rates) == pytest.approx(acceptance, abs=0.015)
    assert np.std(rates) > 0.07, "requests differ in how difficult they are"


def test_without_spread_requests_are_alike_and_positions_independent():
    model = TextModel(0.8, spread=math.inf, evenness=math.inf, sibling=0.0)
    text = model.write(np.random.default_rng(2), 50_000)
    assert text.child_probs[:, 0] == pytest.approx(0.8)
    in_a_row = hits(text)[:, 0].reshape(-1, 5).cumprod(axis=1).sum(axis=1)
    assert in_a_row.mean() == pytest.approx(sum(0.8**depth for depth in range(1, 6)), rel=0.01)


def test_a_library_repeats_the_last_token_beyond_the_end_of_a_text():
    model = TextModel(num_children=3)
    rng = np.random.default_rng(3)
    texts = [model.write(rng, length) for length in (4, 1, 7)]
    library = Library(texts)
    assert library.num_children == 3
    for index, text in enumerate(texts):
        for place in range(10):
            row = library.rows(np.array([index]), np.array([place]))[0]
            own = min(place, len(text) - 1)
            assert (library.child_probs[row] == text.child_probs[own]).all()
            assert library.ranks[row] == text.ranks[own] == library.token(index, place)


@given(seed=SEEDS, lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_recordings_read_what_was_written(seed, lengths, tmp_path_factory):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("recording") / "texts.json"
    texts = [TextModel().write(rng, length) for length in lengths]
    made = [
        RecordedText(input_tokens=3, child_probs=t.child_probs.tolist(), ranks=t.ranks.tolist())
        for t in texts
    ]
    Recording(provenance={"seed": seed}, texts=made).write(path)
    read = Recording.read(path)
    assert read.provenance == {"seed": seed}
    for text, back in zip(texts, read.texts, strict=True):
        assert (back.text().child_probs == text.child_probs).all()
        assert (back.text().ranks == text.ranks).all()


NARROW = '{"input_tokens": 1, "child_probs": [[0.5]], "ranks": [1]}'
GOOD = '{"texts": [\n {"input_tokens": 2,\n  "child_probs": [[0.9, 0.05], [0.5, 0.5]],\n  "ranks": [0, 2]}]}'


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("0.9, 0.05", "0.05, 0.9", r":2:2: texts\.0: child_probs must be in descending order"),
        ("0.9, 0.05", "0.9", r":2:2: texts\.0: child_probs must have the same number"),
        ("0.9, 0.05", "1.9, 0.05", r":2:2: texts\.0: child_probs must lie within 0\.\.1"),
        ("0.9, 0.05", "0.9, 0.9", r":2:2: texts\.0: child_probs of a token must not sum"),
        ("0.9, 0.05", "NaN, 0.05", r":2:2: texts\.0: child_probs must lie"),
        ("0.9, 0.05", '0.9, "x"', r":3:25: texts\.0\.child_probs\.0\.1: "),
        ("[0, 2]", "[0, 3]", r":2:2: texts\.0: ranks must be the index"),
        ("[0, 2]", "[0]", r":2:2: texts\.0: ranks must be the index"),
        ("[0, 2]", "[0, 1.5]", r":4:16: texts\.0\.ranks\.1: "),
        ('"input_tokens": 2', '"input_tokens": 0', r":2:19: texts\.0\.input_tokens: "),
        ('"input_tokens": 2', '"input_token": 2', r":2:2: texts\.0\.input_tokens: Field required"),
        ('{"texts"', '{"version": 2, "texts"', r":1:13: version: "),
        ("}]}", "}]", r":4:\d+: Expecting"),
        ("}]}", "}, " + NARROW + "]}", ":.*same number of children"),
    ],
)
def test_malformed_recordings_say_where(old, new, fault, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(GOOD)
    assert len(Recording.read(path).texts) == 1
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InvalidFileError, match=r"r\.json" + fault):
        Recording.read(path)


def test_of_many_faults_some_are_told_and_the_rest_counted(tmp_path):
    path = tmp_path / "r.json"
    text = {"input_tokens": 1, "child_probs": [[0.5]], "ranks": ["x"] * 900}
    path.write_text(json.dumps({"texts": [text]}))
    with pytest.raises(InvalidFileError, match="and 895 more faults") as error:
        Recording.read(path)
    assert len(str(error.value).splitlines()) == 6
