"""TurboSpec's policy, in one scenario or two."""

from __future__ import annotations

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.policies.smartspec_variants import (
    PAUSE,
    PROPOSED,
    RESET,
    TRIES,
    TurboSpecPolicy,
)
from hf_slospec.tree.tree import TokenTree
from tests.support.policy_costs import EIGHT, NO_TIME, begun, costs, plan_of, requests_of, selected
from tests.support.toys.trees import chain


def test_requests_that_arrive_in_too_large_a_batch_are_not_drafted_for():
    """With a draft model: only those that come, only to larger batches, and not for ever."""
    policy = TurboSpecPolicy(EIGHT, costs(0.02))
    first = requests_of(256)
    assert plan_of(policy, first).depth == 0
    assert policy.off_size == 256
    assert plan_of(policy, first[:1]).depth > 0  # running requests go on as goodput says
    new = [requests_of(257) for _ in range(RESET)]
    assert plan_of(policy, requests_of(256)).depth == 0  # not larger
    assert not policy.undrafted
    policy.costs = costs(0.0)  # now it would pay
    for batch in new:
        assert plan_of(policy, batch).depth == 0
        assert policy.undrafted >= {*batch}
    later = requests_of(257)
    assert plan_of(policy, later).depth > 0


def test_a_step_that_drafts_lifts_the_limit_of_smaller_batches():
    policy = TurboSpecPolicy(EIGHT, costs(0.02))
    [request] = requests_of(1)
    rate = policy.acceptance
    for _ in range(100):
        rate.observe(4, 0)
    assert plan_of(policy, [request]).depth == 0
    assert policy.off_size == 1
    for _ in range(100):
        rate.observe(4, 4)
    assert plan_of(policy, [request]).depth > 0
    second, third = requests_of(2)
    assert plan_of(policy, [request, second]).drafting == [request, second]
    assert not policy.undrafted and third not in policy.undrafted


def test_free_proposals_are_verified_as_far_as_goodput_says():
    policy = TurboSpecPolicy(SLOSpecConfig(max_depth=12), costs(0.05, level_s=0.0))
    requests = requests_of(4)
    step, plan = begun(policy, requests)
    assert (plan.depth, plan.width) == (PROPOSED, 1)
    matched = [chain(*[0.7] * PROPOSED), chain(0.7), TokenTree.root_only(3), TokenTree.root_only(3)]
    selection = step.select(matched, plan)
    assert [tree.num_nodes for tree in selection.trees][1:] == [2, 1, 1]
    # m of n matched: E = m l(a, v) + (n - m), here for one match and by brute force
    alone = selected(policy, requests, [matched[0], *matched[2:], matched[2]])
    rate = policy.acceptance.rate

    def goodput(v):
        tokens = sum(rate**j for j in range(v + 1)) + 3
        return tokens / (1.0 + 0.05 * (v + 4 - 1)) * (1.1 if v == 0 else 1.0)

    assert alone.trees[0].max_depth == max(range(PROPOSED + 1), key=goodput) > 0


def test_free_proposals_pause_when_nothing_of_them_is_worth_verifying():
    policy = TurboSpecPolicy(EIGHT, costs(9.0, level_s=0.0))
    requests = requests_of(2)
    depths = []
    for _ in range(2 * (TRIES + PAUSE)):
        step, plan = begun(policy, requests)
        depths.append(plan.depth)
        trees = [chain(*[0.5] * plan.depth)] * 2
        step.select(trees, plan)
        step.observe([[]] * 2, NO_TIME)
    assert depths == [*[8] * TRIES, *[0] * PAUSE] * 2
