"""SLOs-Serve's policy, in one scenario or two."""

from __future__ import annotations

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.policies.slos_serve import SLOsServePolicy
from hf_slospec.lab.policies.smartspec import SmartSpecPolicy
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.policy_costs import EIGHT, begun, costs, late, plan_of, requests_of
from tests.support.toys.trees import chain


def lengths(policy, requests, now_s=0.0):
    step, plan = begun(policy, requests, now_s)
    trees = step.select([chain(*[0.9] * plan.depth)] * len(requests), plan).trees
    assert [
        request for request, tree in zip(requests, trees, strict=True) if tree.num_nodes > 1
    ] == plan.drafting
    return [tree.max_depth for tree in trees]


def length_by_goodput(policy, requests):
    """Of SmartSpec, as long as neither has seen any outcome."""
    return plan_of(SmartSpecPolicy(EIGHT, policy.costs), requests).depth


def test_slos_serve_speculates_as_long_as_each_tier_needs():
    step = costs(0.02, 0.02)  # a little more than a second
    tight, relaxed, easy = (
        Request(i, RequestParams([1, 2], 50, (Stage(tpot_slo_s),)))
        for i, tpot_slo_s in enumerate((0.7, 1.0, 9.0))
    )
    longest, shorter, none = lengths(SLOsServePolicy(EIGHT, step), [tight, relaxed, easy])
    assert longest > shorter > none == 0
    assert lengths(SLOsServePolicy(EIGHT, step), [easy, easy]) == [0, 0]


def test_slos_serve_speculates_longer_for_late_requests():
    config = SLOSpecConfig(
        max_depth=8, token_budget=8
    )  # with room for more prompt, chains could pay for that alone
    policy = SLOsServePolicy(config, costs(0.02, 0.02))
    [ahead] = lengths(policy, [late(0, 1.5, emitted=9)], 2.0)
    [behind] = lengths(policy, [late(0, 1.5, emitted=1)], 3.0)
    [far_behind] = lengths(policy, [late(0, 1.5, emitted=1)], 1e4)
    assert ahead == 0 < behind <= far_behind


def test_slos_serve_gives_the_rest_of_a_step_to_requests_without_slo():
    policy = SLOsServePolicy(EIGHT, costs(0.001, 0.02))
    tight, free = (
        Request(0, RequestParams([1, 2], 50, (Stage(0.6),))),
        Request(1, RequestParams([1, 2], 50)),
    )
    own, others = lengths(policy, [tight, free])
    assert own >= others > 0
    dear = SLOsServePolicy(EIGHT, costs(0.12, 0.02))
    own, others = lengths(
        dear, [Request(0, RequestParams([1, 2], 50, (Stage(0.75),))), *requests_of(3)]
    )[:2]
    assert own > others
    nobody = requests_of(2)
    assert lengths(policy, nobody) == [length_by_goodput(policy, nobody)] * 2


def test_slos_serve_decodes_by_goodput_where_no_slo_can_be_met():
    policy = SLOsServePolicy(EIGHT, costs(0.02))
    hopeless = Request(0, RequestParams([1, 2], 50, (Stage(1e-6),)))
    assert lengths(policy, [hopeless]) == [length_by_goodput(policy, [hopeless])]
    both = [hopeless, *requests_of(1)]
    assert lengths(policy, both) == [length_by_goodput(policy, both)] * 2
    # Beside one that can be kept, it is served as that one is.
    assert (
        len({*lengths(policy, [hopeless, Request(1, RequestParams([1, 2], 50, (Stage(0.8),)))])})
        == 1
    )
