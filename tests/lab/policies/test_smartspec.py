"""SmartSpec's policies, in one scenario or two."""

from __future__ import annotations

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.goodput import MovingAcceptance, heads_nodes
from hf_slospec.lab.policies.smartspec import RECENT, SmartSpecPolicy
from hf_slospec.lab.policies.smartspec_confidence import ConfidencePolicy
from hf_slospec.lab.policies.smartspec_tree import HeadsPolicy
from tests.support.policy_costs import EIGHT, NO_TIME, costs, requests_of
from tests.support.toys import chain, grow


def test_speculation_shortens_with_the_batch_and_ends() -> None:
    policy = SmartSpecPolicy(EIGHT, costs(0.02))
    depths = [policy.plan(requests_of(number), 0.0).depth for number in (1, 4, 16, 64, 256)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 4
    assert depths[-1] == 0


def test_requests_that_accept_more_draft_more() -> None:
    policy = SmartSpecPolicy(EIGHT, costs(0.02), by_request=True)
    hot, cold = requests_of(2)
    for _ in range(60):
        policy.own.setdefault(hot, MovingAcceptance()).observe(4, 4)
        policy.own.setdefault(cold, MovingAcceptance()).observe(4, 1)
    plan = policy.plan([hot, cold], 0.0)
    trees = policy.select([hot, cold], [chain(*[0.9] * plan.depth)] * 2, plan).trees
    assert trees[0].num_nodes > trees[1].num_nodes


def test_requests_that_come_while_nothing_is_drafted_are_never_drafted_for() -> None:
    policy = SmartSpecPolicy(EIGHT, costs(0.02))
    first, second, third = (requests_of(256) for _ in range(3))
    assert policy.plan(first, 0.0).depth == 0
    policy.plan([*first, *second], 0.0)
    assert not policy.undrafted & {*first} and policy.undrafted >= {*second}
    few = [first[0], second[0]]
    assert policy.plan(few, 0.0).drafting == [first[0]]
    alone = [second[0]]  # nobody left who is drafted for: what would be best still counts
    for _ in range(RECENT):
        assert policy.plan(alone, 0.0).depth == 0
    policy.plan([*alone, third[0]], 0.0)
    assert third[0] not in policy.undrafted

    kept = SmartSpecPolicy(SLOSpecConfig(policy="smartspec", max_depth=8, prefill_disabling=1.0), costs(0.02))
    kept.plan(first, 0.0)
    kept.plan(second, 0.0)
    assert not kept.undrafted


def test_the_last_token_of_a_request_is_not_drafted_for() -> None:
    first, last = Request(0, [1], 50), Request(1, [1], 1)
    plan = SmartSpecPolicy(EIGHT, costs(0.02)).plan([first, last], 0.0)
    assert plan.drafting == [first]


def test_confidence_cuts_each_chain_where_it_is_unsure_and_goodput_all_of_them() -> None:
    requests = requests_of(3)
    trees = [chain(0.9, 0.9, 0.9, 0.9), chain(0.9, 0.4, 0.9, 0.9), chain(0.2, 0.9, 0.9, 0.9)]
    policy = ConfidencePolicy(
        SLOSpecConfig(policy="smartspec-confidence", max_depth=4, min_confidence=0.5), costs(0.001)
    )
    plan = policy.plan(requests, 0.0)
    assert (plan.depth, plan.width, plan.min_confidence) == (4, 1, 0.5)
    assert [tree.num_nodes for tree in policy.select(requests, trees, plan).trees] == [5, 3, 2]
    dear = ConfidencePolicy(SLOSpecConfig(policy="smartspec-confidence", max_depth=4, min_confidence=0.5), costs(9.0))
    assert [tree.num_nodes for tree in dear.select(requests, trees, dear.plan(requests, 0.0)).trees] == [1, 1, 1]


def test_heads_widen_where_single_guesses_fail_and_end_where_nodes_cost() -> None:
    def plan_at(rate: float, number: int, token_s: float = 0.01) -> tuple[Plan, HeadsPolicy, list[Request]]:
        policy = HeadsPolicy(SLOSpecConfig(max_depth=4, max_width=4), costs(token_s))
        for acceptance in policy.acceptances:
            for _ in range(99):
                acceptance.observe(100, round(100 * rate))
        requests = requests_of(number)
        return policy.plan(requests, 0.0), policy, requests

    unsure, policy, requests = plan_at(0.3, 2, token_s=0.001)
    sure, _, _ = plan_at(0.95, 2)
    assert unsure.width == 4 and sure.width == 1
    assert sure.depth == 4
    assert plan_at(0.3, 500)[0].depth == 0
    # The whole tree of heads is verified, N_bat nodes: four children of the root, one of each node below.
    wide = grow([0] * 4 + [1, 1, 2, 2, 3, 3, 4, 4], [0.2] * 4 + [0.9, 0.8] * 4, [*range(4), *[0, 1] * 4])
    [tree, _] = policy.select(requests, [wide] * 2, unsure).trees
    assert tree.num_nodes == heads_nodes([4, 1])


def test_heads_learn_what_is_accepted_at_each_depth() -> None:
    policy, requests = HeadsPolicy(SLOSpecConfig(max_depth=2, max_width=1), costs(0.001, 0.0)), requests_of(1)
    for _ in range(60):
        plan = policy.plan(requests, 0.0)
        policy.select(requests, [chain(0.9, 0.9).up_to(plan.depth)], plan)
        policy.observe(requests, [[1][: plan.depth]], NO_TIME, plan)  # the first is always right, the second never
    assert policy.acceptances[0].rate > 0.99 > 0.1 > policy.acceptances[1].rate
    assert policy.plan(requests, 0.0).depth == 1
