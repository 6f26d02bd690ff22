"""The depth and width that pay, from running averages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.policies.depth import DepthControl, Drafted, Looks, beam_ranks
from hf_slospec.tree.tree import Forest
from tests.support.toys.trees import SEEDS, UNEVEN, grow, random_tree

LOOK = DepthControl.PROBE_DEPTH
BEYOND = DepthControl.BEYOND
GAP = Looks.MIN_GAP
SHARE = DepthControl.LOOK_SHARE
FIRST = DepthControl.WARMUP_STEPS


def cheap_levels(depths, width, tokens, nodes):
    """A draft level costs a quarter of a plain step, a node a hundredth; the beam's width is free."""
    return 1.0 + 0.25 * depths + 0.01 * (nodes - 1.0)


def probe(depth, width):
    """A look while speculation is off costs its levels."""
    return 0.25 * depth


def beam(depth, width, favourite, other):
    """A chain of favourites with further children of equal probability on every level, as deep and
    wide as asked.
    """
    parents = []
    conditionals = []
    last = 0
    for _ in range(depth):
        parents += [last] * width
        conditionals += [favourite, *[other] * (width - 1)]
        last = len(parents) - width + 1
    return Forest.of([grow(parents, conditionals, range(len(parents)))])


def learn(control, forest, depth, width):
    """Let the control see a step that verified all candidates."""
    is_verified = np.ones(len(forest.depths), dtype=np.bool_)
    control.observe(
        forest, forest.path_probs, is_verified, [Drafted(depth, width, len(forest.trees))]
    )


def run(control, drafts, shape):
    """The shapes picked when every step's draft has these conditionals and all of it is verified."""
    picks = []
    for step, draft in enumerate(drafts):
        depth, width = control.best(*shape(step), 1, cheap_levels, probe)
        if depth:
            forest = beam(depth, width, *draft)
            learn(control, forest, depth, width)
        picks.append((depth, width))
    return picks


def chains(control, conditionals, max_depth=6):
    """The depths picked for chains."""
    return [
        depth
        for depth, _ in run(control, [(c, 0.0) for c in conditionals], lambda _: (max_depth, 1))
    ]


def looks(picks):
    return [step for step, depth in enumerate(picks) if depth]


@given(seed=SEEDS, sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_beam_ranks_count_earlier_nodes_of_the_same_depth(seed, sizes):
    rng = np.random.default_rng(seed)
    forest = Forest.of([random_tree(rng, size) for size in sizes])
    at = list(zip(forest.tree_of.tolist(), forest.depths.tolist(), strict=True))
    assert beam_ranks(forest).tolist() == [at[:v].count(at[v]) for v in range(len(at))]


@given(
    seed=SEEDS,
    level_s=st.floats(0.01, 0.5),
    node_s=st.floats(0.0, 0.2),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    num_trees=st.sampled_from([6, 24, 10**6]),
)
@settings(deadline=None)
def test_shape_is_the_brute_force_best_of_a_stationary_draft(
    seed, level_s, node_s, bounds, num_trees
):
    """With few trees known, the best shape is the one that loses least if the averages are too high
    or too low.
    """
    rng = np.random.default_rng(seed)
    forest = Forest.of([random_tree(rng, 8, UNEVEN) for _ in range(2)])
    is_verified = (forest.depths == 0) | (rng.random(len(forest.depths)) < 0.8)
    ranks = beam_ranks(forest)

    def seconds(depths, width, tokens, nodes):
        return 1.0 + level_s * depths * width**0.5 + node_s * nodes

    control = DepthControl(8, 8)
    for _ in range(12):
        control.observe(forest, forest.path_probs, is_verified, [Drafted(8, 8, 2)])
    control.num_trees = num_trees
    max_depth, max_width = bounds

    def rate(depth, width, error=0.0):
        tokens = nodes = 0.0
        for place in itertools.product(range(depth + 1), range(width)):
            own = (forest.depths == place[0]) & (ranks == place[1]) & is_verified
            tokens += min(float(forest.path_probs[own].sum()) / 2 * (1.0 + error) ** place[0], 1.0)
            nodes += np.count_nonzero(own) / 2
        return tokens / float(seconds(np.array(depth), width, np.array(tokens), np.array(nodes)))

    def loss(shape, error):
        return 1.0 - rate(*shape, error) / max(rate(*other, error) for other in [(0, 1), *shapes])

    shapes = list(itertools.product(range(1, max_depth + 1), range(1, max_width + 1)))
    depth, width, best, plain = control.best_shape(max_depth, max_width, seconds)
    doubt = DepthControl.DOUBT / num_trees**0.5
    errors = (-doubt, doubt) if doubt > DepthControl.NO_DOUBT else (0.0,)
    losses = {shape: max(loss(shape, error) for error in errors) for shape in shapes}
    assert losses[depth, width] == pytest.approx(min(losses.values()), abs=1e-12)
    assert plain == pytest.approx(rate(0, 1))
    assert best == pytest.approx(rate(depth, width))


def test_first_steps_look_at_everything_and_good_drafts_stay_deep():
    picks = chains(DepthControl(6, 1), [1.0] * 80)
    assert picks.index(0) == FIRST  # nothing is known of plain steps until then
    assert {pick for pick in picks if pick} == {6} and picks.count(0) == 2


@pytest.mark.parametrize("num_trees", [1, 8, 12, 64])
def test_a_first_step_for_many_requests_is_look_enough(num_trees):
    control = DepthControl(6, 1)
    picks = list[int]()
    for _ in range(FIRST + 1):
        depth, width = control.best(6, 1, num_trees, cheap_levels, probe)
        picks.append(depth)
        own = beam(depth, width, 0.3, 0.0).trees[0]
        forest = Forest.of([own] * num_trees)
        learn(control, forest, depth, width)
    num_looks = min(-(-DepthControl.WARMUP_TREES // num_trees), FIRST)
    assert picks[:num_looks] == [6] * num_looks and max(picks[num_looks:]) < 6


def test_steps_go_a_little_deeper_than_the_best_depth_and_looks_take_their_share_of_the_time():
    control = DepthControl(8, 1)
    picks = chains(control, [0.6] * 1000, max_depth=8)
    depth, _, best, plain = control.best_shape(8, 1, cheap_levels)
    tokens = [sum(0.6**d for d in range(n + 1)) for n in range(9)]
    step_s = [
        float(cheap_levels(np.array(n), 1, np.array(tokens[n]), np.array(n + 1.0)))
        for n in range(9)
    ]
    rates = [tokens[n] / step_s[n] for n in range(9)]
    assert 0 < depth == int(np.argmax(rates)) < 8 - BEYOND
    assert picks[:FIRST] == [8] * FIRST
    assert set(picks[-500:]) == {0, 8, depth + BEYOND}  # few trees had been seen before
    look_s = step_s[8] - tokens[8] / rates[depth]
    plain_look_s = step_s[0] - tokens[0] / rates[depth]
    for shape, cost_s, share in (
        (8, look_s, SHARE),
        (0, plain_look_s, DepthControl.PLAIN_SHARE),
    ):
        gaps = np.diff([step for step in range(500, 1000) if picks[step] == shape])
        usual = max(int(np.ceil(cost_s / (share * step_s[depth]))), GAP)
        assert set(gaps.tolist()) <= {usual, usual + 1} and len(gaps) > 1
    assert control.goodput == best > plain


def test_width_is_taken_only_where_it_pays():
    wide = DepthControl(4, 3)
    narrow = DepthControl(4, 3)
    assert run(wide, [(0.35, 0.3)] * 40, lambda _: (4, 3))[-2][1] == 3
    assert run(narrow, [(0.9, 0.001)] * 40, lambda _: (4, 3))[-2][1] == 1
    assert run(wide, [(0.35, 0.3)] * 3, lambda _: (4, 2))[-1][1] == 2  # never wider than it may be


def test_useless_drafts_switch_speculation_off_and_looks_take_their_share_of_the_time():
    control = DepthControl(6, 1)
    picks = chains(control, [0.0] * 1000)
    assert not control.is_on
    assert set(picks[FIRST:]) == {0, LOOK}
    at = looks(picks)
    assert at[:FIRST] == list(range(FIRST))
    usual, gaps = (
        int(np.ceil(probe(LOOK, 1) / SHARE)),
        np.diff([FIRST - 1, *at[FIRST:]]).tolist(),
    )  # a plain step takes 1 s
    early = [gap for gap in (GAP, 2 * GAP, 4 * GAP, 8 * GAP) if gap < usual]
    assert len(early) > 2 and gaps[: len(early)] == early
    assert set(gaps[len(early) :]) <= {usual, usual + 1} and len(gaps) > len(early) + 10


def test_speculation_comes_back_when_it_pays_again():
    useless = 300
    gap = int(np.ceil(probe(LOOK, 1) / SHARE))
    control = DepthControl(6, 1)
    picks = chains(control, [0.0] * useless + [1.0] * (4 * gap))
    assert set(picks[useless - gap : useless]) <= {0, LOOK}
    assert set(picks[-gap:]) <= {0, 6}
    assert picks[-gap:].count(0) < 0.05 * gap
    assert control.is_on


def test_a_draft_at_the_break_even_point_does_not_flicker():
    rng = np.random.default_rng(0)
    control = DepthControl(1, 1)
    even = 0.26 + 0.01 * rng.standard_normal(600)  # one level costs 0.26 of a step
    states = []
    for conditional in even:
        chains(control, [float(conditional)], max_depth=1)
        states.append(control.is_on)
    assert np.count_nonzero(np.diff(states)) <= 4


def test_levels_and_places_never_drafted_before_are_looked_at_at_once():
    picks = run(DepthControl(6, 2), [(1.0, 0.0)] * 30, lambda step: (2, 1) if step < 10 else (6, 2))
    assert picks[:10] == [*[(2, 1)] * FIRST, (0, 1), *[(2, 1)] * (9 - FIRST)]
    assert picks[10] == (6, 2)
    assert {depth for depth, _ in picks[11:]} == {6}


def test_levels_that_were_not_worth_drafting_are_not_tried_again_at_once():
    """A drafter stops where a level is not worth its time; the levels below it count as drafted
    without nodes.
    """
    control = DepthControl(6, 1)
    worth = 2
    picks = []
    for _ in range(FIRST + GAP - 1):
        depth, width = control.best(6, 1, 1, cheap_levels, probe)
        forest = beam(min(depth, worth), width, 0.6, 0.0)
        learn(control, forest, depth, width)
        picks.append(depth)
    assert picks == [6] * FIRST + [0] + [worth + BEYOND] * (GAP - 2)


def test_speculation_is_switched_off_although_drafters_stopped_after_a_level():
    control = DepthControl(6, 1)
    for _ in range(FIRST):
        depth, width = control.best(6, 1, 1, cheap_levels, probe)
        forest = beam(1, width, 0.01, 0.0)
        learn(control, forest, depth, width)
    assert control.best(6, 1, 1, cheap_levels, probe) == (0, 1)
    assert not control.is_on


def test_no_levels_to_draft_is_no_reason_to_stay_off():
    """The last token of a run leaves nothing to draft; the next run goes on as before."""
    control = DepthControl(6, 1)
    chains(control, [1.0] * 10)
    assert chains(control, [1.0], max_depth=0) == [0]
    assert chains(control, [1.0]) == [6]


def test_a_choice_stands_while_nothing_is_learned_and_about_as_many_requests_decode():
    chosen_for = list[int]()
    control = DepthControl(4, 1)
    run(control, [(0.7, 0.0)] * 20, lambda _: (4, 1))

    def decode(num_requests, times):
        """Times that a shape is chosen."""

        def seconds(depths, width, tokens, nodes):
            chosen_for.append(num_requests)
            return cheap_levels(depths, 1, tokens, nodes)

        chosen_for.clear()
        for _ in range(times):
            control.best(4, 1, num_requests, seconds, probe)
        return len(chosen_for)

    stands = DepthControl.STANDS
    control.plain_looks = Looks(0.0)  # after which a choice is renewed
    decode(8, stands)
    assert decode(8, 3 * stands) == 3
    assert decode(9, stands) == 1  # one more request is no other occasion
    decode(9, 1)
    assert decode(16, 1) == decode(8, 1) == 1
    learn(control, beam(4, 1, 0.7, 0.0), 4, 1)
    assert decode(8, 1) == 0  # one more tree teaches little
    while control.num_trees < DepthControl.GROWTH * 20:
        learn(control, beam(4, 1, 0.7, 0.0), 4, 1)
    assert decode(8, 1) == 1  # a quarter more does not
    control.num_trees = DepthControl.FEW_TREES
    decode(8, stands)
    for _ in range(stands):
        learn(control, beam(4, 1, 0.7, 0.0), 4, 1)
        decode(8, 1)
    assert sum(chosen_for) <= 8  # all averages count as exact then


def test_a_choice_stands_where_fewer_levels_are_possible():
    """The last tokens of a request leave fewer and fewer levels, which is no reason to choose."""
    chosen_for = list[int]()
    control = DepthControl(6, 1)
    chains(control, [1.0] * 20)
    control.plain_looks = Looks(0.0)

    def seconds(depths, width, tokens, nodes):
        chosen_for.append(len(depths) - 1)
        return cheap_levels(depths, 1, tokens, nodes)

    control.num_trees = DepthControl.FEW_TREES
    picks = [control.best(depth, 1, 1, seconds, probe)[0] for depth in (6, 5, 4, 3, 2, 1)]
    assert picks == [6, 5, 4, 3, 2, 1] and len(chosen_for) == 1
    assert control.best(6, 1, 1, seconds, probe) == (6, 1) and len(chosen_for) == 1


def test_a_shape_is_given_up_only_for_one_that_is_clearly_better():
    kept = DepthControl.KEPT
    control = DepthControl(2, 1)
    rates = np.array([[1.0], [2.0], [2.0 * (1.0 + 0.5 * kept)]])[None]
    assert control._best_of(rates)[0] == 2
    assert control._best_of(rates, kept=(1, 1))[0] == 1
    rates[0, 2, 0] = 2.0 * (1.0 + 2.0 * kept)
    assert control._best_of(rates, kept=(1, 1))[0] == 2


def test_steps_that_were_plain_anyway_replace_plain_looks():
    control = DepthControl(6, 1)
    picks = []
    for step in range(400):
        depth, width = control.best(6, 1, 1, cheap_levels, probe)
        picks.append(depth)
        if depth:
            learn(control, beam(depth, width, 1.0, 0.0), depth, width)
        if step >= FIRST - 1 and step % 4 == 0:
            control.plain_looks.taken()
    assert picks.count(0) <= 1


def test_steps_learned_together_teach_the_places_that_some_of_them_drafted():
    deep = beam(3, 1, 0.5, 0.0)
    flat = beam(1, 2, 0.6, 0.2)
    both = Forest.of([*deep.trees, *flat.trees])
    control = DepthControl(4, 2)
    is_verified = np.ones(len(both.depths), dtype=np.bool_)
    control.observe(both, both.path_probs, is_verified, [Drafted(3, 1, 1), Drafted(1, 2, 1)])
    assert control.mass[:, 0].tolist() == pytest.approx([1.0, (0.5 + 0.6) / 2, 0.25, 0.125, 0.0])
    assert control.mass[:, 1].tolist() == pytest.approx([0.0, 0.2, 0.0, 0.0, 0.0])
    assert control.nodes[1].tolist() == [1.0, 1.0]
    assert control.num_observed == control.num_trees == 2
    assert np.isinf(control.steps_since[2:, 1]).all() and not control.steps_since[1].any()


def test_paths_go_on_by_the_average_of_the_first_level_and_without_levels_too():
    control = DepthControl(0, 2)
    assert control.continuation(1) == control.MIN_CONTINUATION
    control = DepthControl(2, 2)
    learn(control, beam(2, 2, 0.6, 0.1), 2, 2)
    assert control.continuation(1) == pytest.approx(0.6)
    assert control.continuation(2) == pytest.approx(0.7)
