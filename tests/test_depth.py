"""The depth that pays, from running averages."""

from __future__ import annotations

import numpy as np

from hf_slospec.algo.depth import DepthControl
from hf_slospec.algo.latency import LatencyCurve, StepCosts
from hf_slospec.algo.tree import TokenTree

COSTS = StepCosts(LatencyCurve((1, 64), (1.0, 1.2)), LatencyCurve((1,), (0.4,)))


def chain(depth: int, conditional: float) -> TokenTree:
    depths = np.arange(depth + 1)
    return TokenTree(depths, depths - 1, depths, conditional**depths)


def run(control: DepthControl, conditionals: list[float], bounds: list[int]) -> list[int]:
    """The depths picked when every step's draft is a chain with that step's conditional probability."""
    picks = []
    for conditional, bound in zip(conditionals, bounds, strict=True):
        picks.append(control.best(1, bound, 1, COSTS))
        if picks[-1]:
            control.observe([chain(picks[-1], conditional)], picks[-1])
    return picks


def test_first_step_looks_at_every_depth_and_good_drafts_stay_deep() -> None:
    assert run(DepthControl(6), [1.0] * 80, [6] * 80) == [6] * 80


def test_useless_drafts_switch_speculation_off_but_for_a_look_now_and_then() -> None:
    picks = run(DepthControl(6), [0.0] * 320, [6] * 320)
    assert picks.count(6) == DepthControl.MIN_OBSERVED + 320 // DepthControl.EXPLORE_EVERY
    assert picks.count(0) == len(picks) - picks.count(6)


def test_depth_is_the_brute_force_best() -> None:
    control = DepthControl(6)
    run(control, [0.6] * DepthControl.MIN_OBSERVED, [6] * DepthControl.MIN_OBSERVED)
    goodput = [
        sum(0.6**level for level in range(depth + 1)) / float(COSTS.draft_s(1, depth, 1) + COSTS.verify(1 + depth))
        for depth in range(7)
    ]
    assert control.best(1, 6, 1, COSTS) == int(np.argmax(goodput))


def test_speculation_comes_back_within_two_looks() -> None:
    picks = run(DepthControl(6), [0.0] * 40 + [1.0] * 80, [6] * 120)
    assert set(picks[97:]) == {6}


def test_levels_never_drafted_before_are_learnt_at_once() -> None:
    picks = run(DepthControl(6), [1.0] * 60, [2] * 10 + [6] * 50)  # the bound rises when other requests finish
    assert set(picks[10:]) == {6}
