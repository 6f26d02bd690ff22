"""Predicted path probabilities against committed tokens, on drafts of known quality."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hf_slospec.engine.acceptance import MAX_SHIFT, Acceptance, Drawing, Prediction, shifted
from hf_slospec.tree.tree import Forest, TokenTree
from tests.support.toys.trees import grow

DEPTH = 4


class Text:
    """Stands for a request; its true log-odds lie this far from those of all texts."""

    drawing = Drawing.SAMPLED

    def __init__(self, heat):
        self.heat = heat


def forget(acceptance):
    """Only shifts are left."""
    calibration = acceptance.calibrations[Text.drawing]
    calibration.trials[:] = calibration.hits[:] = 0.0


def over_confident_tree(rng):
    """On every level the best node so far has a favourite child and a lesser one."""
    parents = []
    conditionals = []
    last = 0
    for _ in range(DEPTH):
        favourite = rng.beta(5.0, 1.5)
        parents += [last, last]
        conditionals += [favourite, (1.0 - favourite) * rng.random()]
        last = len(parents) - 1
    return grow(parents, conditionals, [1, 2] * DEPTH)


def true_conditionals(tree, heat):
    """What a draft that says c is worth: favourites less than they claim, second children about as
    much.
    """
    said = np.ones(tree.num_nodes)
    said[1:] = tree.path_probs[1:] / tree.path_probs[tree.parents[1:]]
    first = slice(1, None, 2)
    second = slice(2, None, 2)
    worth = said.copy()
    worth[first] = shifted(0.75 * said[first] ** 1.5, np.array(heat))
    worth[second] = (1.0 - worth[first]) * 0.6 * said[second] / np.maximum(1.0 - said[first], 1e-9)
    return worth


def walk(rng, tree, heat, is_verified):
    """The nodes that a target commits, drawn from the true conditionals."""
    worth = true_conditionals(tree, heat)
    node = 0
    path = []
    while len(children := np.flatnonzero(tree.parents == node)):
        probs = worth[children]
        choice = int(rng.choice(len(children) + 1, p=[*probs, 1.0 - probs.sum()]))
        if choice == len(children) or not is_verified[children[choice]]:
            break
        node = int(children[choice])
        path.append(node)
    return path


def run(acceptance, texts, num_steps, threshold=0.0, seed=0):
    """Steps in which what is predicted above ``threshold`` is verified.

    Returns:
        Predicted and committed tokens, [num_steps, num_texts] f64 each.
    """
    rng = np.random.default_rng(seed)
    predicted, committed = np.zeros((2, num_steps, len(texts)))
    for step in range(num_steps):
        forest = Forest.of([over_confident_tree(rng) for _ in texts])
        prediction = acceptance.predict(texts, forest)
        verified = prediction.path_probs >= threshold
        parts = np.split(verified, forest.starts[1:])
        paths = [
            walk(rng, t, text.heat, v)
            for t, text, v in zip(forest.trees, texts, parts, strict=True)
        ]
        acceptance.observe(texts, prediction, verified, forest.indices(paths))
        predicted[step] = prediction.expected_tokens(verified)
        committed[step] = [1 + len(path) for path in paths]
    return predicted, committed


def one_child(conditional, num_requests=1):
    return Forest.of([grow([0], [conditional], [1])] * num_requests)


def step(acceptance, requests, forest, accepted):
    every = np.ones(len(forest.depths), dtype=np.bool_)
    acceptance.observe(
        requests, acceptance.predict(requests, forest), every, np.array(accepted, dtype=np.int64)
    )


@pytest.mark.parametrize("threshold", [pytest.param(0.0, marks=pytest.mark.nightly), 0.15])
def test_predictions_add_up_to_what_is_committed(threshold):
    texts = [Text(heat) for heat in (-1.2, -0.4, 0.4, 1.2)]
    acceptance = Acceptance()
    predicted, committed = run(acceptance, texts, 1500, threshold)
    predicted = predicted[-1000:]
    committed = committed[-1000:]
    assert predicted.sum() == pytest.approx(committed.sum(), rel=0.05)
    # Hot ones and cold ones each.
    np.testing.assert_allclose(predicted.mean(0), committed.mean(0), rtol=0.12)
    assert committed.mean(0).max() > 1.3 * committed.mean(0).min()  # so that this says something


def test_without_calibration_the_same_draft_promises_far_too_much():
    rng = np.random.default_rng(0)
    tree_sums = [over_confident_tree(rng).path_probs.sum() for _ in range(500)]
    committed = run(Acceptance(), [Text(0.0)], 500)[1]
    assert np.mean(tree_sums) > 1.15 * committed.mean()


def test_hot_and_cold_texts_are_told_apart():
    texts = [Text(heat) for heat in (-1.2, 0.0, 1.2)]
    acceptance = Acceptance()
    run(acceptance, texts, 400)
    cold, usual, hot = (acceptance.request_shifts[text] for text in texts)
    assert cold < usual < hot


def test_shifts_follow_surprises_and_stay_bounded():
    lucky = Text(0.0)
    unlucky = Text(0.0)
    new = Text(0.0)
    acceptance = Acceptance()
    forest = one_child(0.5, 2)
    step(acceptance, [lucky, unlucky], forest, [1])  # node 1 is the first tree's child
    assert acceptance.request_shifts[lucky] == -acceptance.request_shifts[unlucky] > 0.0
    believed = acceptance.predict([lucky, unlucky, new], one_child(0.5, 3)).path_probs[[1, 3, 5]]
    assert believed[0] > believed[2] > believed[1]
    # A draft that says even odds of what always comes, and of what never does.
    for _ in range(3000):
        forget(acceptance)
        step(acceptance, [lucky, unlucky], forest, [1])
    assert MAX_SHIFT >= acceptance.request_shifts[lucky] > 1.5
    assert -MAX_SHIFT <= acceptance.request_shifts[unlucky] < -1.5


@pytest.mark.parametrize(("accepted", "sign"), [([1, 3], 1.0), ([], -1.0)])
def test_new_requests_start_from_the_overall_shift(accepted, sign):
    texts = [Text(0.0), Text(0.0)]
    acceptance = Acceptance()
    forest = one_child(0.5, 2)
    step(acceptance, texts, forest, accepted)
    own = sign * acceptance.request_shifts[texts[0]]
    overall = sign * acceptance.overall
    assert own > 3 * overall > 0.0  # little of it: one text says more of itself than of others
    forget(acceptance)
    assert sign * (acceptance.predict([Text(0.0)], one_child(0.5)).path_probs[1] - 0.5) > 0.0


def test_nodes_that_were_not_verified_change_no_prediction():
    text = Text(0.0)
    acceptance = Acceptance()
    forest = one_child(0.9)
    roots_only = forest.depths == 0
    for _ in range(20):
        prediction = acceptance.predict([text], forest)
        acceptance.observe([text], prediction, roots_only, np.empty(0, dtype=np.int64))
    assert prediction.expected_tokens(roots_only).tolist() == [1.0]
    assert acceptance.predict([text], forest).path_probs[1] == pytest.approx(0.9)


def test_finished_requests_leave_no_shift():
    acceptance = Acceptance()
    kept = Text(0.0)
    for seed in range(5):
        run(acceptance, [Text(0.0), kept, Text(1.0)], 2, seed=seed)
    gc.collect()
    assert list(acceptance.request_shifts) == [kept]


def test_each_way_of_drawing_has_a_calibration_of_its_own():
    texts = []
    for drawing in Drawing:
        texts.append(Text(0.0))
        texts[-1].drawing = drawing
    acceptance = Acceptance()
    forest = one_child(0.5, len(texts))
    coupled_child = 2 * texts.index(texts[Drawing.COUPLED]) + 1
    for _ in range(200):
        step(acceptance, texts, forest, [coupled_child])
    acceptance.request_shifts.clear()
    acceptance.overall = 0.0
    greedy, sampled, coupled = acceptance.predict(texts, forest).path_probs[1::2]
    assert greedy < 0.05 and sampled < 0.05 and coupled > 0.95


def test_steps_learned_together_teach_what_they_teach_one_by_one():
    rng = np.random.default_rng(3)
    texts = [Text(0.0), Text(1.0), Text(-1.0)]
    texts[1].drawing = Drawing.COUPLED
    one_by_one = Acceptance()
    together = Acceptance()
    steps = [[over_confident_tree(rng) for _ in texts[:number]] for number in (3, 1, 2)]
    forests = [Forest.of(trees) for trees in steps]
    alone = [
        one_by_one.predict(texts[: len(trees)], forest)
        for trees, forest in zip(steps, forests, strict=True)
    ]
    paths = [
        [walk(rng, tree, 0.0, np.ones(tree.num_nodes, dtype=np.bool_)) for tree in trees]
        for trees in steps
    ]
    for prediction, nodes in zip(alone, paths, strict=True):
        one_by_one.observe(
            texts[: len(nodes)],
            prediction,
            np.ones(len(prediction.path_probs), dtype=np.bool_),
            prediction.forest.indices(nodes),
        )
    joined = Prediction.joined(alone)
    assert (
        joined.path_probs.tolist()
        == np.concatenate([prediction.path_probs for prediction in alone]).tolist()
    )
    gone = [*texts, texts[0], None, texts[1]]  # a request may end between a step and its lesson
    accepted = joined.forest.indices([nodes for own in paths for nodes in own])
    together.observe(gone, joined, np.ones(len(joined.path_probs), dtype=np.bool_), accepted)
    for drawing in Drawing:
        for sums in ("trials", "hits"):
            expected = getattr(one_by_one.calibrations[drawing], sums)
            assert getattr(together.calibrations[drawing], sums).tolist() == expected.tolist()
    assert together.overall == pytest.approx(one_by_one.overall)
    for text in texts[1:]:
        assert together.request_shifts[text] == pytest.approx(one_by_one.request_shifts[text])
    assert together.request_shifts[texts[0]] != one_by_one.request_shifts[texts[0]]


def test_steps_without_drafts_are_predicted_and_learned_like_others():
    """They take a shorter way, as half of the steps of prompt lookup do."""
    root = TokenTree.root_only(3)
    tree = over_confident_tree(np.random.default_rng(0))
    texts = [Text(0.0), Text(0.0)]
    acceptance = Acceptance()
    alone = acceptance.predict(texts[:1], Forest.of([root]))
    beside = acceptance.predict(texts, Forest.of([root, tree]))
    assert alone.path_probs.tolist() == beside.path_probs[:1].tolist() == [1.0]
    assert alone.expected_tokens(np.array([True])).tolist() == [1.0]
    joined = Prediction.joined([alone, acceptance.predict(texts[1:], Forest.of([tree]))])
    assert np.array_equal(joined.path_probs, beside.path_probs)
    is_verified = np.ones(len(beside.path_probs), dtype=np.bool_)
    accepted = np.array([2, 4])
    other = Acceptance()
    for learning, prediction in ((acceptance, joined), (other, beside)):
        learning.observe(texts, prediction, is_verified, accepted)
    assert acceptance.overall == other.overall != 0.0
    for drawing, calibration in acceptance.calibrations.items():
        assert np.array_equal(calibration.trials, other.calibrations[drawing].trials)
        assert np.array_equal(calibration.hits, other.calibrations[drawing].hits)
