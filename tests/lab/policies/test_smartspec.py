"""SmartSpec's policies, in one scenario or two."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.lab.policies.goodput import MovingAcceptance, heads_nodes
from hf_slospec.lab.policies.smartspec import (
    BIAS,
    RECENT,
    RETRY,
    SmartSpecPolicy,
    SmartSpecRequestsPolicy,
)
from hf_slospec.lab.policies.smartspec_variants import (
    ConfidencePolicy,
    HeadsPolicy,
    TurboSpecPolicy,
)
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import quick_or
from tests.support.policy_costs import (
    EIGHT,
    NO_TIME,
    begun,
    costs,
    plan_of,
    requests_of,
    selected,
)
from tests.support.toys.trees import chain, grow


def test_speculation_shortens_with_the_batch_and_ends():
    policy = SmartSpecPolicy(EIGHT, costs(0.02))
    depths = [plan_of(policy, requests_of(number)).depth for number in (1, 4, 16, 64, 256)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 4
    assert depths[-1] == 0


def stairs(edge, jump_s):
    """A forward of more tokens than ``edge`` takes that much longer."""
    target = LatencyCurve(
        (1, edge, edge + 1, 1000),
        (1.0, 1.0 + 0.01 * edge, 1.01 + 0.01 * edge + jump_s, 40.0 + jump_s),
    )
    return StepCosts(
        ForwardCost(target, per_key_s=1e-3),
        ForwardCost(LatencyCurve((1, 64), (0.02, 0.4)), 0.01, 1e-4),
    )


@given(
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    new_tokens=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    edge=st.integers(2, 30),
    jump_s=st.sampled_from([0.0, 0.5, 5.0]),
    rate=st.sampled_from([0.0, 0.5, 0.9]),
    kv_tokens=st.sampled_from([None, 1, 40, 60]),
)
@settings(deadline=None, max_examples=quick_or(26, 80))
def test_batch_and_length_are_the_best_of_all(arrivals, new_tokens, edge, jump_s, rate, kv_tokens):
    """Algorithm 2 with equation 5, over all first requests to come and all lengths."""
    step_costs = stairs(edge, jump_s)
    config = SLOSpecConfig(max_depth=4, kv_tokens=kv_tokens)
    requests = [
        Request(index, RequestParams([1] * (5 + index), new), float(arrived))
        for index, (arrived, new) in enumerate(zip(arrivals, new_tokens, strict=False))
    ]
    policy = SmartSpecPolicy(config, step_costs)
    for _ in range(300):
        policy.acceptance.observe(100, round(100 * rate))
    rate = policy.acceptance.rate
    queue = sorted(requests, key=lambda request: (request.stats.arrived_s, request.index))
    held = sum(len(request.tokens) for request in requests)

    def goodput(number, limit):
        batch = [(request, min(limit, request.num_left - 1)) for request in queue[:number]]
        if limit and kv_tokens is not None and held + sum(k + 1 for _, k in batch) > kv_tokens:
            return -1.0
        draft_s = 0.0
        for level in range(1, max(k for _, k in batch) + 1):
            drafted = [len(request.tokens) for request, k in batch if k >= level]
            draft_s += float(step_costs.draft_level(len(drafted), len(drafted), sum(drafted)))
        num_nodes, num_keys = (
            sum(k + 1 for _, k in batch),
            sum(len(request.tokens) for request, _ in batch),
        )
        tokens = sum(sum(rate**i for i in range(k + 1)) for _, k in batch)
        return (
            tokens
            / (draft_s + float(step_costs.verify_s(num_nodes, number, num_keys)))
            * (1.0 if limit else BIAS)
        )

    plan = plan_of(policy, requests)
    assert plan.decoding is not None and plan.depths is not None
    assert set(plan.decoding) == set(queue[: len(plan.decoding)])
    assert plan.decoding == [request for request in requests if request in plan.decoding]
    best = max(goodput(number, limit) for number in range(1, len(queue) + 1) for limit in range(5))
    assert goodput(len(plan.decoding), plan.depth) == pytest.approx(best)
    useful = {request: min(plan.depth, request.num_left - 1) for request in plan.decoding}
    assert plan.depths == {request: length for request, length in useful.items() if length}


def test_turbospec_runs_requests_that_smartspec_leaves_out_of_a_step():
    requests = requests_of(10)
    smart, turbo = (
        plan_of(kind(SLOSpecConfig(max_depth=4), stairs(8, 5.0)), requests).decoding
        for kind in (SmartSpecPolicy, TurboSpecPolicy)
    )
    assert smart is not None and len(smart) < 10 and turbo == requests


def test_requests_that_accept_more_draft_more():
    policy = SmartSpecRequestsPolicy(EIGHT, costs(0.02))
    hot, cold = requests_of(2)
    for _ in range(60):
        policy.acceptances.setdefault(hot, MovingAcceptance()).observe(4, 4)
        policy.acceptances.setdefault(cold, MovingAcceptance()).observe(4, 1)
    step, plan = begun(policy, [hot, cold])
    selection = step.select([chain(*[0.9] * plan.depth)] * 2, plan)
    assert selection.trees[0].num_nodes > selection.trees[1].num_nodes
    assert plan.depths == {hot: selection.trees[0].max_depth, cold: selection.trees[1].max_depth}
    levels = (plan.depth, selection.trees[1].max_depth)  # the cold one leaves the draft's batch
    level_s, verify_s = (
        policy.costs.level_s(1, 1),
        float(policy.costs.verify_s(sum(levels) + 2, 2, 6)),
    )
    assert selection.step_s == pytest.approx(plan.depth * level_s + verify_s)


def test_requests_that_arrive_while_nothing_is_drafted_are_never_drafted_for():
    policy = SmartSpecPolicy(EIGHT, costs(0.02))
    first, second, third = (requests_of(256) for _ in range(3))
    assert plan_of(policy, first).depth == 0
    plan_of(policy, [*first, *second])
    assert not policy.undrafted & {*first} and policy.undrafted >= {*second}
    few = [first[0], second[0]]
    assert plan_of(policy, few).drafting == [first[0]]
    alone = [second[0]]  # nobody left who is drafted for: what would be best still counts
    for _ in range(RECENT):
        assert plan_of(policy, alone).depth == 0
    plan_of(policy, [*alone, third[0]])
    assert third[0] not in policy.undrafted

    kept = SmartSpecPolicy(
        SLOSpecConfig(policy="smartspec", max_depth=8, prefill_disabling=1.0), costs(0.02)
    )
    plan_of(kept, first)
    plan_of(kept, second)
    assert not kept.undrafted


def test_drafting_that_low_acceptance_has_stopped_is_tried_again():
    policy = SmartSpecPolicy(EIGHT, costs(0.02))
    requests = requests_of(1)
    for _ in range(100):
        policy.acceptance.observe(4, 0)
    depths = [plan_of(policy, requests).depth for _ in range(2 * RETRY)]
    assert [step for step, depth in enumerate(depths, start=1) if depth] == [RETRY, 2 * RETRY]
    for _ in range(6 * RETRY):  # the draft is good again
        step, plan = begun(policy, requests)
        step.select([chain(*[0.9] * plan.depth)], plan)
        step.observe([list(range(1, plan.depth + 1))], NO_TIME)
    assert plan_of(policy, requests).depth > 0

    crowd = requests_of(256)  # too many even at the initial acceptance
    assert not any(plan_of(policy, crowd).depth for _ in range(3 * RETRY))


def test_acceptance_is_that_of_about_twenty_steps():
    acceptance = MovingAcceptance()
    for _ in range(200):
        acceptance.observe(4, 4)
    for _ in range(20):
        acceptance.observe(4, 0)
    assert 0.3 < acceptance.rate < 0.4


def test_the_last_token_of_a_request_is_not_drafted_for():
    first = Request(0, RequestParams([1], 50))
    last = Request(1, RequestParams([1], 1))
    plan = plan_of(SmartSpecPolicy(EIGHT, costs(0.02)), [first, last])
    assert plan.drafting == [first]


def test_confidence_cuts_each_chain_where_it_is_unsure_and_goodput_all_of_them():
    requests = requests_of(3)
    trees = [chain(0.9, 0.9, 0.9, 0.9), chain(0.9, 0.4, 0.9, 0.9), chain(0.2, 0.9, 0.9, 0.9)]
    policy = ConfidencePolicy(
        SLOSpecConfig(policy="smartspec-confidence", max_depth=4, min_confidence=0.5), costs(0.001)
    )
    step, plan = begun(policy, requests)
    assert (plan.depth, plan.width, plan.min_confidence) == (4, 1, 0.5)
    assert [tree.num_nodes for tree in step.select(trees, plan).trees] == [5, 3, 2]
    dear = ConfidencePolicy(
        SLOSpecConfig(policy="smartspec-confidence", max_depth=4, min_confidence=0.5), costs(9.0)
    )
    assert [tree.num_nodes for tree in selected(dear, requests, trees).trees] == [1, 1, 1]


def test_heads_widen_where_single_guesses_fail_and_end_where_nodes_cost():
    def begun_at(rate, number, token_s=0.01):
        policy = HeadsPolicy(SLOSpecConfig(max_depth=4, max_width=4), costs(token_s))
        for acceptance in policy.acceptances:
            for _ in range(99):
                acceptance.observe(100, round(100 * rate))
        return begun(policy, requests_of(number))

    step, unsure = begun_at(0.3, 2, token_s=0.001)
    _, sure = begun_at(0.95, 2)
    assert unsure.width == 4 and sure.width == 1
    assert sure.depth == 4
    assert begun_at(0.3, 500)[1].depth == 0
    # The whole tree of heads is verified, N_bat nodes: four children of the root, one of each node
    # below.
    wide = grow(
        [0] * 4 + [1, 1, 2, 2, 3, 3, 4, 4], [0.2] * 4 + [0.9, 0.8] * 4, [*range(4), *[0, 1] * 4]
    )
    [tree, _] = step.select([wide] * 2, unsure).trees
    assert tree.num_nodes == heads_nodes([4, 1])


def test_heads_learn_what_is_accepted_at_each_depth():
    policy, requests = (
        HeadsPolicy(SLOSpecConfig(max_depth=2, max_width=1), costs(0.001, 0.0)),
        requests_of(1),
    )
    for _ in range(120):
        step, plan = begun(policy, requests)
        step.select([chain(0.9, 0.9).up_to(plan.depth)], plan)
        step.observe([[1][: plan.depth]], NO_TIME)  # the first is always right, the second never
    assert policy.acceptances[0].rate > 0.99 > 0.1 > policy.acceptances[1].rate
    assert plan_of(policy, requests).depth == 1
