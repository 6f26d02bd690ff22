"""Prefill tokens per step: hand-computed cases, and against the prefill rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.prefill import IN_TIME, SLOWDOWN, STALL, prefill_budget, required_rate
from tests.support.toys.engine import commit


def new_costs():
    """A step takes 1 s, and 0.1 s per token."""
    cost = ForwardCost(LatencyCurve((1, 101), (1.1, 11.1)))
    return StepCosts(cost, cost)


def prompt(num_tokens, ttft_s=None, arrived_s=0.0):
    return Request(
        0, RequestParams([1] * num_tokens, 9, (Stage(1.0),), ttft_slo_s=ttft_s), arrived_s
    )


@pytest.mark.parametrize(
    ("allowed_s", "expected"),
    [
        (0.0, 0),  # somebody is late: nothing
        (1.5, 4),  # 1.1 s for the one that decodes and 0.1 s for each of 4
        (math.inf, 22),  # up to a stall of 3 x 1.1 s
    ],
)
def test_without_a_deadline_prefill_makes_no_request_late(allowed_s, expected):
    assert STALL == 3.0
    assert prefill_budget("beside", new_costs(), 1, [], 64, allowed_s, 0.0) == expected


def test_due_prompts_are_prefilled_even_if_others_become_late():
    costs = new_costs()
    # 30 tokens within 0.95 x 10 s: 3.16 tokens/s; c tokens beside one that decodes take 1.1 + 0.1
    # c: 6 / 1.7 = 3.5.
    assert required_rate([prompt(30, ttft_s=10.0)], costs, 0.0) == pytest.approx(
        30 / (IN_TIME * 10.0)
    )
    assert prefill_budget("beside", costs, 1, [prompt(30, ttft_s=10.0)], 64, 0.0, 0.0) == 6
    assert (
        prefill_budget("beside", costs, 1, [prompt(30, ttft_s=10.0)], 64, 0.0, 10.0) == 64
    )  # too late: all that may be
    assert prefill_budget("beside", costs, 1, [prompt(30, ttft_s=1e9)], 64, 0.0, 0.0) == 1


def test_prompts_without_a_ttft_slo_are_due_after_a_multiple_of_their_time_alone():
    alone_s = 0.1 * 20 + 1.0
    assert required_rate([prompt(20, arrived_s=7.0)], new_costs(), 7.0) == pytest.approx(
        20 / (IN_TIME * SLOWDOWN * alone_s)
    )


def test_a_partly_prefilled_prompt_keeps_its_deadline():
    half_done = prompt(20)
    resumed = prompt(20)
    half_done.kv.num_cached = 10
    assert required_rate([half_done], new_costs(), 5.0) == pytest.approx(
        10 / (IN_TIME * (SLOWDOWN * 3.0 - 5.0))
    )
    resumed.emit(1)  # its first token is out; 21 tokens take 3.1 s
    assert required_rate([resumed], new_costs(), 99.0) == pytest.approx(
        21 / (IN_TIME * SLOWDOWN * 3.1)
    )


def test_a_preempted_request_is_prefilled_again_by_the_first_token_of_its_stage():
    request = Request(0, RequestParams([1] * 20, 9, (Stage(1.0, 1), Stage(1.0, ttft_slo_s=4.0))))
    commit(request, [1], 10.0)
    assert required_rate([request], new_costs(), 11.0) == pytest.approx(21 / (IN_TIME * 3.0))
    commit(request, [1], 12.0)
    assert required_rate([request], new_costs(), 13.0) == pytest.approx(
        22 / (IN_TIME * SLOWDOWN * 3.2)
    )


def test_a_prompt_waits_for_those_before_it():
    both = required_rate([prompt(10, ttft_s=100.0), prompt(40, ttft_s=20.0)], new_costs(), 0.0)
    assert both == pytest.approx(50 / (IN_TIME * 20.0))


def test_rules_of_other_systems():
    costs = new_costs()
    assert prefill_budget("first", costs, 8, [prompt(5)], 64, 0.0, 0.0) == 64
    assert (
        prefill_budget("chunked", costs, 8, [prompt(5)], 64, 0.0, 0.0) == 56
    )  # those that decode count
    assert prefill_budget("chunked", costs, 99, [prompt(5)], 64, 0.0, 0.0) == 0
    assert (
        prefill_budget("beside", costs, 0, [prompt(5)], 64, 0.0, 0.0) == 64
    )  # nobody to make late


@given(
    lengths=st.lists(st.tuples(st.integers(1, 80), st.floats(0.5, 60.0)), max_size=4),
    num_decoding=st.integers(1, 20),
    allowed_s=st.floats(0.0, 20.0),
)
def test_prefill_is_the_larger_of_what_is_due_and_what_is_spare(lengths, num_decoding, allowed_s):
    costs = new_costs()
    guaranteed = [prompt(tokens, ttft_s) for tokens, ttft_s in lengths]
    spare = prefill_budget("beside", costs, num_decoding, [], 64, allowed_s, 0.0)
    budget = prefill_budget("beside", costs, num_decoding, guaranteed, 64, allowed_s, 0.0)
    rate = required_rate(guaranteed, costs, 0.0)
    assert spare <= budget <= 64
    if budget < 64:
        assert budget / float(costs.step_s(num_decoding, budget)) >= rate * (1.0 - 1e-9)
    if budget > max(spare, 1):
        assert (budget - 1) / float(costs.step_s(num_decoding, budget - 1)) < rate
