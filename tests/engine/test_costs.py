"""The calibrated cost model: corrections, averages over recent steps, and profiles that heal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.costs import (
    PATIENCE,
    DraftCorrection,
    SizeCorrection,
    StepCosts,
    level_share,
)
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.generate.speculator import HOST_LEVEL

POINTS = st.dictionaries(st.integers(1, 600), st.floats(0.001, 10.0), min_size=1, max_size=8)
SIZES = dict(num_requests=st.integers(1, 64), depth=st.integers(0, 8), width=st.integers(1, 8))


def of_tokens(num_tokens, seconds):
    return ForwardCost(LatencyCurve(num_tokens, seconds))


def step(
    phases,
    nodes=(4, 4),
    committed=2,
    prefill=0,
    catch_up=4,
    levels=3,
    width=2,
    keys=20,
):
    """A step that decoded one request per entry of ``nodes`` and drafted for all of them."""
    requests = tuple(RequestStep(i, n, committed, 1.0, None, 0.0, 0) for i, n in enumerate(nodes))
    return StepEvent(
        begun_s=0.0, num_decoding=len(nodes), depth=levels, width=width, phases=phases, predicted_s=0.0,
        requests=requests, prefill_tokens=prefill, num_keys=keys,
        num_drafted_for=len(nodes) if levels else 0, num_catch_up=catch_up, draft_levels=levels,
    )  # fmt: skip


def observed(*parts, keeps_sizes=False):
    """A correction after forwards of this many tokens that took this much longer than profiled, so
    many times.
    """
    correction = SizeCorrection(keeps_sizes)
    for num_tokens, factor, count in parts:
        for _ in range(count):
            correction.observe(num_tokens, 2.0, 2.0 * factor)
    return correction


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_a_constant_factor_is_learned_at_all_sizes(factor):
    correction = observed((6, factor, 24))
    assert correction(np.array([1, 6, 7, 500, 10**6])) == pytest.approx([factor] * 5, rel=0.02)


def test_a_correction_follows_a_change():
    factors = [observed((8, 1.0, 200), (8, 2.0, count))(8) for count in (0, 12, 60, 120)]
    assert factors == sorted(factors)
    assert factors[0] == 1.0
    assert factors[1] > 1.15
    assert factors[-1] == pytest.approx(2.0, rel=0.05)


def test_one_pause_moves_the_correction_little():
    assert observed((8, 1.0, 100), (8, 1000.0, 1))(8) < 1.05
    drafts = DraftCorrection()
    for measured_s in [1.0] * 100 + [1000.0]:
        drafts.observe(1.0, measured_s)
    assert drafts(np.array(1.0)) < 1.15


def test_sizes_keep_factors_of_their_own():
    correction = observed(*[(1, 1.0, 1), (100, 2.0, 1)] * 60)
    assert correction(1) == pytest.approx(1.0, abs=0.15)
    assert correction(127) == pytest.approx(2.0, abs=0.25)
    assert 1.2 < correction(2000) < 1.7  # never observed: between them


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_a_constant_factor_is_learned_at_all_sizes_where_sizes_are_kept(factor):
    correction = observed((6, factor, 24), keeps_sizes=True)
    assert correction(np.array([1, 6, 7, 500, 10**6])) == pytest.approx([factor] * 5, rel=0.1)


def test_a_size_measured_once_differs_from_the_others_for_long():
    """The correction without kept sizes has forgotten it by then."""
    parts = (4, 3.0, 40), (1, 1.0, 2), (4, 3.0, 400)
    assert observed(*parts)(1) == pytest.approx(3.0, rel=0.01)
    correction = observed(*parts, keeps_sizes=True)
    assert correction(1) < 1.5
    assert correction(4) == pytest.approx(3.0, rel=0.05)


def test_what_is_known_of_sizes_is_kept_while_another_is_the_usual_one():
    correction = observed((4, 3.0, 40), (1, 1.0, 400), keeps_sizes=True)
    assert correction(1) == pytest.approx(1.0, rel=0.05)
    assert correction(4) > 2.0


def test_all_sizes_follow_the_machines_speed():
    before = observed((1, 1.0, 40), (16, 2.0, 40), keeps_sizes=True)
    after = observed((1, 1.0, 40), (16, 2.0, 40), (16, 4.0, 120), keeps_sizes=True)
    assert after(16) == pytest.approx(4.0, rel=0.05)
    assert after(1) > 1.5 * before(1)


def test_one_pause_moves_kept_sizes_little():
    assert observed((8, 1.0, 100), (8, 1000.0, 1), keeps_sizes=True)(8) < 1.15


def test_a_correction_remembers_a_bounded_number_of_observations():
    correction = observed(*[(2**power, 1.5, 100) for power in range(20)])
    assert correction._counts.shape == correction._logs.shape == (16,)
    assert correction._counts.sum() <= SizeCorrection.MEMORY


@given(constant_s=st.floats(0.0, 2.0), factor=st.floats(0.3, 3.0))
@settings(deadline=None)
def test_drafting_is_a_constant_and_a_factor(constant_s, factor):
    drafts = DraftCorrection()
    for _ in range(60):
        for profiled_s in (0.5, 1.0, 2.0, 5.0):
            drafts.observe(profiled_s, constant_s + factor * profiled_s)
    expected = [constant_s + factor * profiled_s for profiled_s in (0.5, 5.0, 8.0)]
    assert drafts(np.array([0.5, 5.0, 8.0])) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("draft_s", [1e-4, 0.02])
def test_the_time_of_drafting_without_a_model_is_learned(draft_s):
    costs = StepCosts(of_tokens((1,), (0.02,)), HOST_LEVEL)
    for _ in range(30):
        for levels in (2, 5):
            costs.observe(step(PhaseTimes(draft_s, 0.0, 0.02, 0.0), levels=levels))
    assert costs.draft_s(2, np.array([0, 2, 5]), 2) == pytest.approx(
        [0.0, draft_s, draft_s], rel=0.3
    )


def test_the_first_level_catches_up_and_each_further_one_forwards_a_beam():
    costs = StepCosts(verify=of_tokens((1,), (9.0,)), draft_level=of_tokens((1, 101), (1.0, 2.0)))
    assert costs.draft_s(1, 0, 4) == 0.0
    assert costs.draft_s(1, 1, 4) == pytest.approx(1.0)
    assert costs.draft_s(1, 3, 1) == pytest.approx(3.0)
    assert costs.draft_s(11, 1, 4) == pytest.approx(1.1)
    assert costs.draft_s(11, 3, 4) == pytest.approx(1.1 + 2 * 1.43)
    assert costs.draft_s(11, np.array([0, 1, 3]), 4) == pytest.approx([0.0, 1.1, 1.1 + 2 * 1.43])
    assert costs.draft_s(11, 3, 4, num_catch_up=51) == pytest.approx(1.5 + 2 * 1.43)
    costs.recent.tokens = 3.0  # steady drafting catches up on what the last step committed
    assert costs.draft_s(11, 1, 4) == pytest.approx(1.32)


def test_the_first_level_processes_the_prompts_that_keep_arriving():
    draft = of_tokens((1, 101), (1.0, 2.0))
    costs, together = (
        StepCosts(verify=of_tokens((1,), (9.0,)), draft_level=draft) for _ in range(2)
    )
    phases = PhaseTimes(draft_s=1.04, verify_s=9.0)
    for _ in range(1000):
        costs.observe(step(phases, nodes=(4, 4), committed=2, prefill=12, levels=1))
    rate = costs.recent.prefill_rate
    # 12 tokens of prompts in every step.
    assert rate == pytest.approx(12.0 / phases.total_s, rel=0.05)
    one = np.array([1])
    verify_s = np.array([9.0])
    for prompt_len in (5.0, 24.0):  # more and fewer than a prompt per step
        without_s = costs.draft_s(2, 1, 1, 20, 4.0)
        arriving = rate * (without_s + 9.0) / prompt_len  # prompts
        with_s = costs.draft_s(2, 1, 1, 20, 4.0 + max(arriving, 1.0) * prompt_len)
        seconds = costs.steady_draft_s(2, one, one, 20, np.array([4.0]), verify_s, prompt_len)
        assert seconds == pytest.approx(without_s + min(arriving, 1.0) * (with_s - without_s))
        assert without_s < seconds <= with_s
    for _ in range(50):  # prompts of requests that begin together
        together.observe(step(PhaseTimes(verify_s=9.0), nodes=(), prefill=512, levels=0))
    together.observe(step(phases))
    assert together.recent.prefill_rate == 0.0
    alone = together.steady_draft_s(2, one, one, 20, np.array([4.0]), verify_s, 256.0)
    assert float(alone[0]) == pytest.approx(together.draft_s(2, 1, 1, 20, 4.0))


def test_prompts_count_by_the_time_in_which_they_arrive_not_by_the_tokens_that_others_write_meanwhile():
    slow, fast = (
        StepCosts(verify=of_tokens((1,), (9.0,)), draft_level=of_tokens((1,), (1.0,)))
        for _ in range(2)
    )
    for _ in range(500):
        slow.observe(step(PhaseTimes(verify_s=2.0), nodes=(1,), committed=1, prefill=20, levels=0))
        fast.observe(step(PhaseTimes(verify_s=1.0), nodes=(1,), committed=1, prefill=10, levels=0))
    assert slow.recent.prefill_rate == pytest.approx(fast.recent.prefill_rate)


@given(points=POINTS, factor=st.floats(0.5, 2.0), **SIZES)
@settings(deadline=None)
def test_draft_costs_add_up_level_by_level(points, factor, num_requests, depth, width):
    cost = ForwardCost(LatencyCurve.fit(list(points), list(points.values())), 0.01, 0.001)
    costs = StepCosts(verify=cost, draft_level=cost)
    costs._draft_correction.factor = factor
    levels = [
        cost(num_requests, num_requests, 50),
        *[cost(num_requests * width, num_requests, 50)] * (depth - 1),
    ]
    expected = factor * sum(levels[:depth])
    assert costs.draft_s(num_requests, depth, width, 50) == pytest.approx(expected)
    assert costs.draft_s(num_requests, np.array([depth, 0]), width, 50) == pytest.approx(
        [expected, 0.0]
    )
    deeper = costs.draft_s(num_requests, depth + 1, width, 50)
    if depth:
        assert costs.level_s(num_requests, width, 50) == pytest.approx(deeper - expected)


@given(
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    width=st.integers(1, 8),
    catch_up=st.integers(1, 99),
)
def test_levels_draft_for_fewer_and_fewer_requests(depths, width, catch_up):
    cost = ForwardCost(LatencyCurve((1, 1001), (0.5, 1.5)), 0.01, 0.001)
    number = len(depths)  # 0.001 s per token
    costs = StepCosts(verify=cost, draft_level=cost)
    in_level = [sum(depth > level for depth in depths) for level in range(1, max(depths))]
    expected = cost(catch_up, number, 20 * number) + sum(
        cost(n * width, n, 20 * n) for n in in_level
    )
    share = level_share(depths, number)
    levels = max(depths), width, 20 * number, catch_up, share
    assert costs.draft_s(number, *levels) == pytest.approx(expected if max(depths) else 0.0)
    level_s, request_s = costs.level_parts_s(number, width, 20 * number)
    assert level_s + number * request_s == pytest.approx(costs.level_s(number, width, 20 * number))
    assert request_s == pytest.approx(0.001 * width + 0.01 + 0.001 * 20, rel=0.05)


@given(points=POINTS, **SIZES)
@settings(deadline=None)
def test_no_part_of_a_level_takes_less_than_no_time(points, num_requests, depth, width):
    cost = ForwardCost(LatencyCurve.fit(list(points), list(points.values())), 0.01, 0.001)
    parts = StepCosts(verify=cost, draft_level=cost).level_parts_s(
        num_requests, width, 20 * num_requests
    )
    assert min(parts) >= -1e-12


@given(points=POINTS, **SIZES)
@settings(deadline=None)
def test_larger_plans_never_draft_faster(points, num_requests, depth, width):
    cost = ForwardCost(LatencyCurve.fit(list(points), list(points.values())), 0.01, 0.001)
    costs = StepCosts(verify=cost, draft_level=cost)
    seconds = costs.draft_s(num_requests, depth, width)
    assert costs.draft_s(num_requests + 1, depth, width) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth + 1, width) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth, width + 1) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth, width, 10) >= seconds - 1e-9


def test_verifying_and_drafting_are_corrected_apart():
    costs = StepCosts(verify=of_tokens((1, 2), (1.0, 2.0)), draft_level=of_tokens((1,), (0.5,)))
    for _ in range(60):
        costs.observe(step(PhaseTimes(draft_s=0.6, verify_s=20.0, host_s=4.0), committed=1))
    # Profiled: 8; select and host time count.
    assert costs.verify_s(8, 2, 20) == pytest.approx(24.0)
    assert costs.draft_s(2, 3, 2, 20) == pytest.approx(0.6, rel=0.1)  # profiled: 1.5


def test_steps_without_drafting_or_time_teach_nothing_about_it():
    costs = StepCosts(verify=of_tokens((1, 2), (1.0, 2.0)), draft_level=of_tokens((1,), (0.0,)))
    for phases in (PhaseTimes(), PhaseTimes(draft_s=1.0)):
        costs.observe(step(phases))
    assert costs.verify_s(8) == 8.0
    assert costs.draft_s(2, 3, 2) == 0.0  # drafting without a model is profiled as free


def test_admission_is_no_part_of_a_forwards_time():
    """A step with prompts copies the K/V of those that are known."""
    costs = StepCosts(of_tokens((1, 100), (1.0, 1.0)), of_tokens((1, 100), (1.0, 1.0)))
    for prefill in (0, 8):
        copying = PhaseTimes(draft_s=0.0, select_s=3.0, verify_s=1.0)
        for _ in range(20):
            costs.observe(step(copying, prefill=prefill, levels=0, nodes=(1,) * (8 - prefill)))
        expected = 1.0 if prefill else 4.0
        assert costs.verify_s(8) == pytest.approx(expected, rel=0.1)
        costs = StepCosts(costs.verify, costs.draft_level)


def test_long_stretches_to_catch_up_with_teach_nothing():
    costs = StepCosts(
        verify=of_tokens((1, 2), (1.0, 2.0)), draft_level=of_tokens((1, 2), (1.0, 2.0))
    )
    costs.observe(step(PhaseTimes(draft_s=1.0, verify_s=8.0), catch_up=5000))
    assert costs._draft_correction.factor == 1.0


def test_recent_steps_are_averages_over_decoding_requests():
    costs = StepCosts(verify=of_tokens((1, 2), (1.0, 2.0)), draft_level=of_tokens((1,), (0.5,)))
    assert (costs.recent.tokens, costs.recent.nodes, costs.recent.acceptance) == (1.0, 1.0, 0.0)
    for _ in range(200):
        costs.observe(step(PhaseTimes(1.0, 0.0, 7.0, 0.0), nodes=(2, 6), committed=3))
        costs.observe(step(PhaseTimes(0.0, 0.0, 99.0, 0.0), nodes=(), prefill=64, levels=0, keys=0))
    recent = costs.recent
    figures = recent.tokens, recent.nodes, recent.keys, recent.draft_s, recent.step_s
    assert figures == pytest.approx((3.0, 4.0, 10.0, 1.0, 8.0))
    assert recent.acceptance == pytest.approx(2 / 3)


def test_typical_steps_and_their_curve():
    verify = ForwardCost(LatencyCurve((1, 101), (1.0, 11.0)), per_request_s=0.5, per_key_s=0.01)
    costs = StepCosts(verify, of_tokens((1,), (0.5,)))
    costs.recent.nodes = 4.0
    costs.recent.keys = 10.0
    costs.recent.draft_s = 2.0
    assert costs.step_s(0, 11) == pytest.approx(2.0)  # prefill alone: no drafting, no keys
    assert costs.step_s(np.array([1, 3])) == pytest.approx([1.3 + 0.1 + 2.0, 2.1 + 1.0 + 0.3 + 2.0])
    curve = costs.step_curve(64)
    assert curve.num_tokens[0] == 1 and curve.num_tokens[-1] == 64
    assert curve(64) == pytest.approx(7.3 - 0.5, rel=0.05)  # of tokens alone
    assert costs.request_s == pytest.approx(0.5 + 0.1, rel=0.05)
    assert curve == costs.step_curve(64)  # rounded, so that results for it can be cached


@pytest.mark.parametrize("wrong", [0.2, 5.0])
def test_a_wrong_profile_is_replaced_by_what_was_seen(wrong):
    right = ForwardCost(LatencyCurve((1, 64), (1.0, 4.0)), 0.1, 0.001)
    draft = of_tokens((1, 64), (0.1, 0.2))
    replaced = {}
    costs = StepCosts(
        right.scaled([wrong] * 2, wrong), draft.scaled([wrong] * 2, wrong), replaced.__setitem__
    )
    for _ in range(2 * PATIENCE):
        seconds = right(8, 2, 20)
        draft_s = float(draft(4, 2, 20) + 2 * draft(4, 2, 20))
        costs.observe(step(PhaseTimes(draft_s=draft_s, verify_s=seconds)))
    assert costs.verify_s(8, 2, 20) == pytest.approx(right(8, 2, 20), rel=0.05)
    assert costs.verify(8, 2, 20) == pytest.approx(right(8, 2, 20), rel=0.1)
    assert costs.draft_s(2, 3, 2, 20, 4) == pytest.approx(draft_s, rel=0.1)
    assert set(replaced.values()) == {costs.verify, costs.draft_level}


def test_a_profile_that_is_right_within_half_is_kept():
    verify = of_tokens((1, 64), (1.0, 4.0))
    replaced = []
    costs = StepCosts(verify, of_tokens((1,), (0.1,)), lambda old, new: replaced.append(new))
    for index in range(4 * PATIENCE):
        factor = 1.3 if index % 2 else 0.8
        costs.observe(step(PhaseTimes(0.4, 0.0, factor * verify(8), 0.0)))
    assert not replaced and costs.verify is verify


def test_a_constant_cost_of_drafting_does_not_replace_the_profile():
    draft = of_tokens((1, 64), (0.001, 0.002))
    replaced = []
    costs = StepCosts(of_tokens((1, 64), (1.0, 4.0)), draft, lambda old, new: replaced.append(new))
    for index in range(3 * PATIENCE):
        levels = 1 + index % 4
        profiled_s = levels * draft(4, 2, 20)
        costs.observe(
            step(
                PhaseTimes(draft_s=0.005 + profiled_s, verify_s=costs.verify(8)),
                levels=levels,
            )
        )
    assert not replaced and costs.draft_level is draft
    assert costs.draft_s(2, 1, 2, 20, 4) == pytest.approx(0.005 + draft(4, 2, 20), rel=0.1)


def test_engines_beside_each_other_share_corrections_and_not_their_recent_steps():
    costs = StepCosts(of_tokens((1, 64), (1.0, 4.0)), of_tokens((1,), (0.0,)))
    own = costs.for_own_engine()
    own.observe(step(PhaseTimes(verify_s=2.0 * costs.verify(8)), committed=5))
    assert own.recent.tokens > costs.recent.tokens == 1.0
    assert own.verify_s(8) == costs.verify_s(8) > costs.verify(8)
