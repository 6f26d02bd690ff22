"""AdaSpec's policy against its algorithm, written out level by level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.lab.policies.adaspec import GRAPH_STEP, START, AdaSpecPolicy, smaller_size
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.policy_costs import EIGHT, costs, plan_of, requests_of, selected
from tests.support.toys.trees import SEEDS, chain


def drafted(plan, levels):
    """Draft as drafters do, one conditional per request and level; return the number of levels."""
    if not plan.depth:
        return 0
    path_probs = np.array(levels[0], np.float64)[:, None]
    length = 1
    while length < plan.depth and (
        plan.goes_on is None or plan.goes_on(path_probs, np.arange(len(path_probs))).all()
    ):
        path_probs = path_probs * np.array(levels[length])[:, None]
        length = length + 1
    return length


def step_s(policy, num_requests, length, num_keys):
    draft_s = policy.costs.draft_s(num_requests, length, 1, num_keys)
    return float(
        draft_s + policy.costs.verify_s(num_requests * (length + 1), num_requests, num_keys)
    )


def as_printed(policy, levels, num_keys):
    """Return the drafted length, and the confidences that enter the running mean, by the paper's
    loop.
    """
    number = len(levels[0])
    mean = policy.confidence
    seen = list[float]()
    goodput = number / step_s(policy, number, 0, num_keys)
    if (number + number * mean) / step_s(policy, number, 1, num_keys) <= goodput:
        return 0, seen
    tokens = float(number)
    paths = [1.0] * number
    for length in range(1, len(levels)):
        paths = [path * own for path, own in zip(paths, levels[length - 1], strict=True)]
        tokens += sum(paths)
        reached = tokens / step_s(policy, number, length, num_keys)
        if reached < goodput:
            return length, seen
        goodput = reached
        seen += levels[length - 1]
        mean = (START + sum(seen)) / (1 + len(seen))
        if (tokens + mean * sum(paths)) / step_s(policy, number, length + 1, num_keys) < goodput:
            return length, seen
    return len(levels), seen


@given(seed=SEEDS, num_requests=st.integers(1, 12), token_s=st.floats(0.001, 0.5))
@settings(deadline=None)
def test_drafting_ends_where_the_printed_loop_does(seed, num_requests, token_s):
    rng = np.random.default_rng(seed)
    levels = rng.uniform(0.05, 1.0, (EIGHT.max_depth, num_requests)).tolist()
    policy = AdaSpecPolicy(EIGHT, costs(token_s))
    requests = requests_of(num_requests)
    length, seen = as_printed(policy, levels, sum(len(request.tokens) for request in requests))
    assert drafted(plan_of(policy, requests), levels) == length
    assert policy.confidence == pytest.approx((START + sum(seen)) / (1 + len(seen)))


def test_no_step_is_planned_to_take_longer_than_the_tightest_slo():
    policy = AdaSpecPolicy(EIGHT, costs(0.02))
    [free] = requests_of(1)
    for length in range(5):
        bound = step_s(policy, 2, length, 2 * len(free.tokens)) * (1 + 1e-9)
        limited = Request(1, RequestParams(list(free.tokens), 50, (Stage(bound),)))
        policy = AdaSpecPolicy(EIGHT, costs(0.02))
        assert drafted(plan_of(policy, [free, limited]), [[0.99, 0.99]] * 8) == length


def test_the_least_probable_tokens_go_where_a_captured_size_is_exceeded():
    assert [smaller_size(number) for number in (1, 2, 3, 4, 5, 32, 33, 64, 65)] == [
        0,
        1,
        2,
        2,
        4,
        16,
        32,
        32,
        64,
    ]
    policy = AdaSpecPolicy(EIGHT, costs(0.02))
    requests = requests_of(3)
    sure = chain(0.9, 0.9)
    unsure = chain(0.9, 0.5)
    hopeless = chain(0.9, 0.001)
    trees = selected(
        policy, requests, [sure, unsure, hopeless]
    ).trees  # 9 tokens, the next size is 8
    assert [tree.num_nodes for tree in trees] == [3, 3, 2]
    trees = selected(policy, requests, [chain(0.9, 0.9)] * 3).trees  # the token is worth its time
    assert sum(tree.num_nodes for tree in trees) == 9
    assert smaller_size(GRAPH_STEP + 1) == GRAPH_STEP
