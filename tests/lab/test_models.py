"""Simulated models: beams against brute force, times against the formula, and texts for any draft
trees.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.interfaces import Chunk, Plan
from hf_slospec.lab.hardware import Hardware, lines
from hf_slospec.lab.models import SimulatedDrafter, SimulatedTarget, VirtualClock
from hf_slospec.lab.texts import Library, SimulatedText, TextModel
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.accept import accept
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.trees import SEEDS, path_to

HARDWARE = Hardware(
    lines((10.0, 0.5), per_request_ms=0.25, per_key_ms=0.001), lines((1.0, 0.1), per_request_ms=0.05, per_key_ms=0.002),
    mixed_s=0.003, host_s=0.002, drafting_request_s=0.0001,
)  # fmt: skip


def request_of(index, prompt=3, new=20):
    return Request(index, RequestParams([0] * prompt, new))


def library_of(seed, *lengths, num_children=4):
    rng = np.random.default_rng(seed)
    return Library(
        [TextModel(0.6, num_children=num_children).write(rng, length) for length in lengths]
    )


def drafter_of(library, clock=None):
    return SimulatedDrafter(library, HARDWARE, clock or VirtualClock())


@given(seed=SEEDS, depth=st.integers(1, 5), width=st.integers(1, 6), num_requests=st.integers(1, 4))
@settings(deadline=None)
def test_candidate_trees_are_sound_and_within_the_plan(seed, depth, width, num_requests):
    library = library_of(seed, *range(1, num_requests + 1), num_children=3)
    requests = [request_of(index) for index in range(num_requests)]
    for tree in drafter_of(library).draft(requests, Plan(depth, width)):
        tree.check()
        assert tree.max_depth == depth
        assert np.bincount(tree.depths)[1:].max() <= width
        children = [
            (int(p), int(t)) for p, t in zip(tree.parents[1:], tree.tokens[1:], strict=True)
        ]
        assert len(set(children)) == len(children)


@given(seed=SEEDS, depth=st.integers(1, 5), width=st.integers(1, 4), emitted=st.integers(0, 4))
@settings(deadline=None)
def test_the_beam_holds_the_best_paths_where_all_positions_are_alike(seed, depth, width, emitted):
    rng = np.random.default_rng(seed)
    row = np.sort(rng.dirichlet(np.ones(4)))[::-1][:3]
    library = Library(
        [SimulatedText(np.tile(row, (9, 1)), rng.integers(0, 4, 9))]
    )  # on and off the true path: the same
    request = request_of(0)
    request.tokens += [0] * emitted
    tree = drafter_of(library).draft([request], Plan(depth, width))[0]
    layer = [((), 1.0)]
    expected = {}
    for _ in range(depth):
        children = [
            ((*path, token), prob * row[token])
            for path, prob in layer
            for token in range(min(3, width))
        ]
        layer = sorted(children, key=lambda child: -child[1])[:width]
        expected |= dict(layer)
    found = {
        tuple(path_to(tree, node)): float(tree.path_probs[node])
        for node in range(1, tree.num_nodes)
    }
    assert sorted(found.values()) == pytest.approx(sorted(expected.values()))
    assert all(found[path] == pytest.approx(float(np.prod(row[list(path)]))) for path in found)


@given(seed=SEEDS, depth=st.integers(1, 6), emitted=st.integers(0, 12))
@settings(deadline=None)
def test_chains_on_the_true_path_hold_its_own_probabilities(seed, depth, emitted):
    library = library_of(seed, 10)
    library.ranks[:] = 0  # the first choice is always right
    request = request_of(0)
    request.tokens += [0] * emitted
    tree = drafter_of(library).draft([request], Plan(depth, 1))[0]
    places = np.minimum(emitted + np.arange(depth), 9)
    assert tree.path_probs[1:] == pytest.approx(np.cumprod(library.child_probs[places, 0]))


@given(seed=SEEDS, depth=st.integers(1, 6), width=st.integers(1, 4))
@settings(deadline=None)
def test_accepted_tokens_are_the_text_as_far_as_the_tree_holds_it(seed, depth, width):
    library = library_of(seed, 12)
    clock = VirtualClock()
    request = request_of(0)
    target = SimulatedTarget(library, HARDWARE, clock)
    tree = drafter_of(library).draft([request], Plan(depth, width))[0]
    chooser = target.verify([request], [tree])[0]
    nodes = accept(tree, chooser, lambda token: None if request.emit(token) else token)
    written = [library.token(0, place) for place in range(12)]
    assert request.tokens[3:] == written[: len(nodes) + 1]
    assert path_to(tree, nodes[-1] if nodes else 0) == written[: len(nodes)]


def test_drafting_takes_its_levels():
    library = library_of(0, 20, 20)
    clock = VirtualClock()
    drafter = drafter_of(library, clock)
    requests = [request_of(0, 5), request_of(1, 7)]
    draft = HARDWARE.draft
    trees = drafter.draft(requests, Plan(3, 2))
    expected = (
        draft(12, 2, 12) + 2 * draft(4, 2, 12) + 2 * 0.0001
    )  # first the prompts, then two beams of two
    assert clock.now_s == pytest.approx(float(expected))
    assert [tree.num_nodes for tree in trees] == [7, 7]
    requests[0].tokens += [0, 0, 0]
    before_s = clock.now_s
    drafter.draft(requests, Plan(1, 2))
    assert clock.now_s - before_s == pytest.approx(
        float(draft(3, 2, 15)) + 2 * 0.0001
    )  # only what is new
    drafter.release(requests[0])
    before_s = clock.now_s
    drafter.draft(requests[:1], Plan(1, 2))
    assert clock.now_s - before_s == pytest.approx(
        float(draft(8, 1, 8)) + 0.0001
    )  # it lost its K/V


@pytest.mark.parametrize("plan", [Plan(6, 2, 0.0, 1e9), Plan(6, 2, min_confidence=0.999)])
def test_drafting_stops_where_real_drafters_do(plan):
    library = library_of(0, 20)
    library.child_probs[:] = [0.5, 0.2, 0.1, 0.1]
    assert drafter_of(library).draft([request_of(0)], plan)[0].max_depth == 1
    assert drafter_of(library).draft([request_of(0)], Plan(6, 2, 0.0, 1e-9, 0.4))[0].max_depth == 6


@given(
    seed=SEEDS, depths=st.lists(st.integers(1, 4), min_size=1, max_size=4), width=st.integers(1, 3)
)
@settings(deadline=None)
def test_requests_leave_the_batch_after_their_own_levels(seed, depths, width):
    library, clock, whole_clock = (
        library_of(seed, *[20] * len(depths)),
        VirtualClock(),
        VirtualClock(),
    )
    requests = [request_of(index, 3 + index) for index in range(len(depths))]
    plan = Plan(4, width, depths=dict(zip(requests, depths, strict=True)))
    trees = drafter_of(library, clock).draft(requests, plan)
    whole = drafter_of(library, whole_clock).draft(requests, Plan(max(depths), width))
    num_tokens = sum(len(request.tokens) for request in requests)
    expected_s = float(HARDWARE.draft(num_tokens, len(depths), num_tokens))
    for level in range(2, max(depths) + 1):
        keys = [
            len(request.tokens)
            for request, depth in zip(requests, depths, strict=True)
            if depth >= level
        ]
        expected_s += float(HARDWARE.draft(len(keys) * width, len(keys), sum(keys)))
    assert clock.now_s == pytest.approx(expected_s + len(depths) * 0.0001)
    assert clock.now_s <= whole_clock.now_s + 1e-12
    for tree, full, depth in zip(trees, whole, depths, strict=True):
        assert tree.max_depth == depth
        assert tree.tokens.tolist() == full.up_to(depth).tokens.tolist()


@pytest.mark.parametrize(
    ("limits", "weights", "depths"),
    [
        ({"min_confidence": 0.5}, (1.0, 1.0), [3, 1]),
        ({"min_request_gain": 0.5}, (1.0, 1.0), [3, 1]),
        ({"min_request_gain": 0.5}, (0.5, 2.0), [1, 2]),
    ],
)
def test_requests_leave_the_batch_where_a_level_is_not_worth_its_time(limits, weights, depths):
    library = library_of(0, 20, 20)
    library.child_probs[:20] = [0.9, 0.05, 0.03, 0.02]
    library.child_probs[20:] = [0.4, 0.3, 0.2, 0.1]
    requests = [request_of(0), request_of(1)]
    plan = Plan(3, 1, weights=dict(zip(requests, weights, strict=True)), **limits)
    assert [tree.max_depth for tree in drafter_of(library).draft(requests, plan)] == depths


def test_verifying_takes_its_nodes_requests_and_keys():
    library = library_of(0, 20, 20, 20)
    clock = VirtualClock()
    target, decoding, fed = (
        SimulatedTarget(library, HARDWARE, clock),
        request_of(0, 5),
        request_of(1, 9),
    )
    decoding.tokens.append(1)
    decoding.kv.num_cached = 5
    chain = TokenTree.chain(1, [0, 0, 0], 0.5)
    target.verify([decoding], [chain])
    assert clock.now_s == pytest.approx(float(HARDWARE.target(4, 1, 6)) + 0.002)
    before_s = clock.now_s
    target.verify([decoding], [chain], [Chunk(fed, 8, False)])
    assert clock.now_s - before_s == pytest.approx(
        float(HARDWARE.target(12, 2, 14)) + 0.002 + 0.003
    )
    before_s = clock.now_s
    target.verify([fed], [TokenTree.root_only(0)])  # the whole of a prompt, nothing beside it
    assert clock.now_s - before_s == pytest.approx(float(HARDWARE.target(9, 1, 9)) + 0.002)
