"""What each policy is for, in one scenario or two; that all of them decode exactly is in test_engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hf_slospec.algo.latency import ForwardCost, LatencyCurve, StepCosts
from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Policy
from hf_slospec.engine.request import Request, Stage
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.auto import PROBED_REQUESTS, SpeculationHistory
from hf_slospec.policies.papers.goodput import MovingAcceptance, heads_nodes
from hf_slospec.policies.papers.options import AdaServeOptions, ThesisOptions
from hf_slospec.policies.papers.sequoia import RESOLVE, AcceptanceByRank, SequoiaPolicy
from hf_slospec.policies.papers.slos_serve import SLOsServePolicy
from hf_slospec.policies.papers.smartspec import RECENT, SmartSpecPolicy
from hf_slospec.policies.papers.smartspec_confidence import ConfidencePolicy
from hf_slospec.policies.papers.smartspec_tree import HeadsPolicy
from hf_slospec.policies.papers.thesis import ThesisPolicy, ThesisSLOPolicy
from hf_slospec.policies.papers.turbospec import PAUSE, PROPOSED, RESET, TRIES, TurboSpecPolicy
from hf_slospec.policies.settings import PolicyName
from tests.test_select import chain, fan
from tests.toys import SEEDS, UNEVEN, grow, path_to, random_tree

NO_TIME = PhaseTimes()
EIGHT = SLOSpecConfig(max_depth=8)


def costs(token_s: float, level_s: float = 0.05) -> StepCosts:
    return StepCosts(
        ForwardCost(LatencyCurve((1, 1000), (1.0, 1.0 + 999.0 * token_s))),
        ForwardCost(LatencyCurve((1,), (level_s,))),
    )


def requests_of(number: int) -> list[Request]:
    return [Request(index, [1, 2, 3], 100) for index in range(number)]


def late(index: int, tpot_slo_s: float | None, elapsed_s: float = 1.0, emitted: int = 1) -> Request:
    """One that has emitted so many tokens since the first at 0 s."""
    request = Request(index, [1, 2, 3], 100, (Stage(tpot_slo_s),))
    for now_s, number in ((0.0, 1), (elapsed_s, emitted)):
        for _ in range(number):
            request.emit(5)
        request.account(0, 0, 1.0, NO_TIME, now_s)
    return request


def test_every_name_is_a_policy_and_no_other() -> None:
    for name in get_args(PolicyName):
        config = SLOSpecConfig(policy=name)
        assert new_policy(config, costs(0.02), SpeculationHistory(config)) is not None
        assert (max_nodes_per_request(config) == 0) == (name == "none")
    with pytest.raises(ValidationError) as error:
        SLOSpecConfig(policy="adaserv")  # type: ignore[arg-type]
    assert all(f"'{name}'" in str(error.value) for name in get_args(PolicyName))


@pytest.mark.parametrize("policy_name", get_args(PolicyName))
def test_plans_stay_within_what_storage_was_made_for(policy_name: PolicyName) -> None:
    config = SLOSpecConfig(policy=policy_name, max_depth=9, max_width=2)
    policy = new_policy(config, costs(1e-4, 0.0), SpeculationHistory(config))
    for number in (1, 20):
        plan = policy.plan(requests_of(number), 0.0)
        assert plan.depth * plan.width <= max_nodes_per_request(config)
        assert plan.depth <= 9


@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    budget=st.integers(1, 30),
    policy_name=st.sampled_from(["adaserve", "thesis", "thesis-slo", "thesis-slo-capped"]),
)
@settings(deadline=None)
def test_budgets_are_kept_and_expected_tokens_are_sums_of_path_probabilities(
    seed: int, sizes: list[int], budget: int, policy_name: PolicyName
) -> None:
    """Property 4."""
    rng = np.random.default_rng(seed)
    config = SLOSpecConfig(policy=policy_name, token_budget=budget)
    policy = new_policy(config, costs(0.02), SpeculationHistory(config))
    requests = [late(index, rng.choice([None, 0.1, 5.0])) for index in range(len(sizes))]
    candidates = [random_tree(rng, size, UNEVEN) for size in sizes]
    selection = policy.select(requests, candidates, policy.plan(requests, 1.0))
    assert sum(tree.num_nodes for tree in selection.trees) <= max(budget, len(requests))
    for tree, candidate, expected in zip(selection.trees, candidates, selection.expected, strict=True):
        tree.check()
        paths = {tuple(path_to(candidate, v)): candidate.path_probs[v] for v in range(candidate.num_nodes)}
        assert {tuple(path_to(tree, v)) for v in range(tree.num_nodes)} <= paths.keys()
        assert expected == pytest.approx(tree.path_probs.sum())


def test_settings_of_single_policies_are_given_as_fields_or_as_options() -> None:
    config = SLOSpecConfig(policy="thesis", **{"max_tree_nodes": 32})
    assert config == SLOSpecConfig(policy="thesis", policy_options=ThesisOptions(max_tree_nodes=32))
    assert config == SLOSpecConfig(policy="thesis", policy_options={"max_tree_nodes": 32})  # type: ignore[arg-type]
    assert config == SLOSpecConfig(**config.model_dump()) == SLOSpecConfig.model_validate_json(config.model_dump_json())
    assert config.options_of(ThesisOptions).max_tree_nodes == 32
    assert config.options_of(AdaServeOptions) == AdaServeOptions()  # a policy whose name the config does not hold
    other = config.model_copy(update={"policy": "adaserve", "max_slo_share": 2.0})
    assert other == SLOSpecConfig(policy="adaserve", **{"max_slo_share": 2.0})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_tree_nodes": 32}, "max_tree_nodes is a setting of policy 'thesis', not of 'auto'"),
        ({"policy": "none", "max_slo_share": 1.0}, "of policy 'adaserve' or 'thesis-slo-capped', not of 'none'"),
        ({"policy": "thesis", "policy_options": {"slack": 0.1}}, "slack is a setting of policy 'thesis-slo' or"),
        ({"policy": "thesis", "max_tree_nodes": 0}, "policy_options.max_tree_nodes\n  Input should be greater"),
        ({"policy": "thesis", "max_tree_node": 1}, "max_tree_node\n  Extra inputs are not permitted"),
        ({"policy": "thesis", "policy_options": {"max_depth": 1}}, "max_depth\n  Extra inputs are not permitted"),
        ({"policy": "thesis", "policy_options": 1, "max_tree_nodes": 1}, "should be a valid dictionary"),
    ],
)
def test_settings_of_other_policies_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SLOSpecConfig(**given)


def test_properties_in_the_documentation_are_tested() -> None:
    tests = Path(__file__).parent
    named = re.findall(r"`(test_\w+)\.py`|`(test_\w+)`", (tests.parent / "docs" / "policies.md").read_text())
    sources = "".join(path.read_text() for path in tests.glob("test_*.py"))
    assert len(named) > 12
    for file, test in named:
        assert (tests / f"{file}.py").exists() if file else f"def {test}(" in sources, file or test


# ---------------------------------------------------------------- the thesis


def sizes(policy: Policy, requests: Sequence[Request], trees: Sequence[TokenTree], now_s: float = 1.0) -> list[int]:
    return [tree.num_nodes for tree in policy.select(requests, trees, policy.plan(requests, now_s)).trees]


def test_thesis_gives_the_budget_to_the_better_drafts() -> None:
    trees = [chain(0.3, 0.3, 0.3), chain(0.9, 0.9, 0.9)]
    policy = ThesisPolicy(SLOSpecConfig(token_budget=5), costs(0.02))
    assert sizes(policy, requests_of(2), trees) == [1, 4]
    bounded = ThesisPolicy(SLOSpecConfig(policy="thesis", token_budget=5, max_tree_nodes=3), costs(0.02))
    assert sizes(bounded, requests_of(2), trees) == [2, 3]
    assert policy.plan(requests_of(5), 0.0).depth == 0  # the roots are the budget


@pytest.mark.parametrize("capped", [False, True])
def test_thesis_slo_serves_the_late_and_capped_leaves_something_for_others(capped: bool) -> None:
    trees = [fan(0.2, 0.2, 0.2, 0.2, 0.2, 0.2), chain(0.9, 0.9, 0.9)]
    config = SLOSpecConfig(policy="thesis-slo-capped", token_budget=8, max_slo_share=0.5)
    policy = ThesisSLOPolicy(config, costs(0.02), capped)
    relaxed, hopeless = [late(i, 9.0) for i in range(2)], [late(0, 1e-3), late(1, 9.0)]
    assert sizes(policy, relaxed, trees) == [4, 4]
    assert sizes(policy, hopeless, trees) == ([4, 4] if capped else [7, 1])


def test_thesis_slo_predicts_a_step_by_the_last_twenty() -> None:
    policy = ThesisSLOPolicy(SLOSpecConfig(token_budget=8), costs(0.02))
    for seconds in (9.0, *[2.0] * 20):
        policy.observe([], [], PhaseTimes(verify_s=seconds), Plan(0, 1))
    [request] = requests_of(1)
    assert policy.select([request], [chain(0.5)], policy.plan([request], 0.0)).step_s == pytest.approx(2.0)


# ---------------------------------------------------------------- sequoia


def test_acceptance_by_rank_is_measured_from_a_prior_on() -> None:
    acceptance = AcceptanceByRank(3)
    assert acceptance.rates.tolist() == pytest.approx([0.6, 0.18, 0.099])
    rng, actual = np.random.default_rng(0), np.array([0.5, 0.3, 0.1])
    policy = SequoiaPolicy(SLOSpecConfig(max_depth=1, max_width=3), costs(0.0, 0.0))
    [request] = requests_of(1)
    measured = []
    for _ in range(2000):
        plan = policy.plan([request], 0.0)
        policy.select([request], [fan(0.6, 0.3, 0.1)], plan)
        node = 1 + int(np.searchsorted(np.cumsum(actual), rng.random()))
        policy.observe([request], [[node] if node <= 3 else []], NO_TIME, plan)
        measured.append(policy.acceptance.rates)
    assert np.mean(measured[500:], axis=0) == pytest.approx(actual, abs=0.03)


def test_sequoia_makes_trees_that_suit_draft_and_batch() -> None:
    """Candidates of three children per node, of which the target always takes the one of this rank."""
    parents = [0, 0, 0, *np.repeat(np.arange(1, 22, 3), 3).tolist()]
    beam = grow(parents, [0.5, 0.3, 0.2] * 8, [5, 6, 7] * 8)

    def plan_after(rank: int | None, token_s: float = 0.02) -> Plan:
        policy, requests = SequoiaPolicy(EIGHT, costs(token_s)), requests_of(1)
        for _ in range(20 * RESOLVE):
            plan = policy.plan(requests, 0.0)
            [tree] = policy.select(requests, [beam], plan).trees
            path, node = list[int](), None if rank is None else tree.child(0, 5 + rank)
            while node is not None and rank is not None:
                path.append(node)
                node = tree.child(node, 5 + rank)
            policy.observe(requests, [path], NO_TIME, plan)
        return policy.plan(requests, 0.0)

    longest = plan_after(0)
    assert (longest.depth, longest.width) == (8, 1)
    assert plan_after(None).depth == 0
    assert plan_after(2, token_s=0.001).width == 3  # only wide trees hold it
    new = [SequoiaPolicy(EIGHT, costs(0.02)).plan(requests_of(number), 0.0) for number in (1, 8, 64, 500)]
    nodes = [plan.depth * plan.width for plan in new]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > 3 and nodes[-1] == 0


# ---------------------------------------------------------------- smartspec


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


# ---------------------------------------------------------------- turbospec


def test_requests_that_come_to_too_large_a_batch_are_not_drafted_for() -> None:
    """With a draft model: only those that come, only to larger batches, and not for ever."""
    policy = TurboSpecPolicy(EIGHT, costs(0.02))
    first = requests_of(256)
    assert policy.plan(first, 0.0).depth == 0
    assert policy.off_size == 256
    assert policy.plan(first[:1], 0.0).depth > 0  # running requests go on as goodput says
    new = [requests_of(257) for _ in range(RESET)]
    assert policy.plan(requests_of(256), 0.0).depth == 0  # not larger
    assert not policy.undrafted
    policy.costs = costs(0.0)  # now it would pay
    for batch in new:
        assert policy.plan(batch, 0.0).depth == 0
        assert policy.undrafted >= {*batch}
    later = requests_of(257)
    assert policy.plan(later, 0.0).depth > 0


def test_free_proposals_are_verified_as_far_as_goodput_says_for_those_who_have_one() -> None:
    policy = TurboSpecPolicy(SLOSpecConfig(max_depth=12), costs(0.05, level_s=0.0))
    requests = requests_of(4)
    plan = policy.plan(requests, 0.0)
    assert (plan.depth, plan.width) == (PROPOSED, 1)
    matched = [chain(*[0.7] * PROPOSED), chain(0.7), TokenTree.root_only(3), TokenTree.root_only(3)]
    selection = policy.select(requests, matched, plan)
    assert [tree.num_nodes for tree in selection.trees][1:] == [2, 1, 1]
    # m of n matched: E = m l(a, v) + (n - m), here for one match and by brute force
    alone = policy.select(requests, [matched[0], *matched[2:], matched[2]], plan)
    rate = policy.acceptance.rate

    def goodput(v: int) -> float:
        tokens = sum(rate**j for j in range(v + 1)) + 3
        return tokens / (1.0 + 0.05 * (v + 4 - 1)) * (1.1 if v == 0 else 1.0)

    assert alone.trees[0].max_depth == max(range(PROPOSED + 1), key=goodput) > 0


def test_free_proposals_pause_when_nothing_of_them_is_worth_verifying() -> None:
    policy = TurboSpecPolicy(EIGHT, costs(9.0, level_s=0.0))
    requests, depths = requests_of(2), []
    for _ in range(2 * (TRIES + PAUSE)):
        plan = policy.plan(requests, 0.0)
        depths.append(plan.depth)
        trees = [chain(*[0.5] * plan.depth)] * 2
        policy.select(requests, trees, plan)
        policy.observe(requests, [[]] * 2, NO_TIME, plan)
    assert depths == [*[8] * TRIES, *[0] * PAUSE] * 2


# ---------------------------------------------------------------- slos-serve


def lengths(policy: SLOsServePolicy, requests: Sequence[Request], now_s: float = 0.0) -> list[int]:
    plan = policy.plan(requests, now_s)
    trees = policy.select(requests, [chain(*[0.9] * plan.depth)] * len(requests), plan).trees
    assert [request for request, tree in zip(requests, trees, strict=True) if tree.num_nodes > 1] == plan.drafting
    return [tree.max_depth for tree in trees]


def length_by_goodput(policy: SLOsServePolicy, requests: Sequence[Request]) -> int:
    return policy._best_length(policy._begin(requests, 0), policy._useful_lengths(requests))


def test_slos_serve_speculates_as_long_as_each_tier_needs() -> None:
    step = costs(0.02, 0.02)  # a little more than a second
    tight, relaxed, easy = (
        Request(i, [1, 2], 50, (Stage(tpot_slo_s),)) for i, tpot_slo_s in enumerate((0.7, 1.0, 9.0))
    )
    longest, shorter, none = lengths(SLOsServePolicy(EIGHT, step), [tight, relaxed, easy])
    assert longest > shorter > none == 0
    assert lengths(SLOsServePolicy(EIGHT, step), [easy, easy]) == [0, 0]


def test_slos_serve_speculates_longer_for_those_behind() -> None:
    config = SLOSpecConfig(max_depth=8, token_budget=8)  # with room for more prompt, chains could pay for that alone
    policy = SLOsServePolicy(config, costs(0.02, 0.02))
    [ahead] = lengths(policy, [late(0, 1.5, emitted=9)], 2.0)
    [behind] = lengths(policy, [late(0, 1.5, emitted=1)], 3.0)
    [far_behind] = lengths(policy, [late(0, 1.5, emitted=1)], 1e4)
    assert ahead == 0 < behind <= far_behind


def test_slos_serve_gives_what_is_left_to_those_without_target() -> None:
    policy = SLOsServePolicy(EIGHT, costs(0.001, 0.02))
    tight, free = Request(0, [1, 2], 50, (Stage(0.6),)), Request(1, [1, 2], 50)
    own, others = lengths(policy, [tight, free])
    assert own >= others > 0
    dear = SLOsServePolicy(EIGHT, costs(0.12, 0.02))
    own, others = lengths(dear, [Request(0, [1, 2], 50, (Stage(0.75),)), *requests_of(3)])[:2]
    assert own > others
    nobody = requests_of(2)
    assert lengths(policy, nobody) == [length_by_goodput(policy, nobody)] * 2


def test_slos_serve_decodes_what_cannot_be_kept_by_goodput() -> None:
    policy = SLOsServePolicy(EIGHT, costs(0.02))
    hopeless = Request(0, [1, 2], 50, (Stage(1e-6),))
    assert lengths(policy, [hopeless]) == [length_by_goodput(policy, [hopeless])]
    both = [hopeless, *requests_of(1)]
    assert lengths(policy, both) == [length_by_goodput(policy, both)] * 2
    # Beside one that can be kept, it is served as that one is.
    assert len({*lengths(policy, [hopeless, Request(1, [1, 2], 50, (Stage(0.8),))])}) == 1


def test_auto_looks_at_a_few_requests_while_speculation_does_not_pay() -> None:
    """Drafting for all would have the draft read everybody's prompts, for nothing."""
    config = SLOSpecConfig(max_depth=4, max_width=1)
    policy = new_policy(config, costs(0.05), SpeculationHistory(config))
    requests = requests_of(20)
    looks = list[int]()
    for _ in range(200):
        plan = policy.plan(requests, 0.0)
        drafting = requests if plan.drafting is None else plan.drafting
        useless = [0.01] * plan.depth  # and refused
        trees = [chain(*useless) if plan.depth and r in drafting else TokenTree.root_only(0) for r in requests]
        policy.select(requests, trees, plan)
        policy.observe(requests, [[] for _ in requests], NO_TIME, plan)
        if plan.depth:
            looks.append(len(drafting))
    assert set(looks) == {20, PROBED_REQUESTS} and looks == sorted(looks, reverse=True)
    assert looks.count(PROBED_REQUESTS) > 1


def test_auto_learns_from_a_few_as_from_all() -> None:
    """What a look at some says of a drafting request does not depend on how many are not drafted for."""
    config = SLOSpecConfig(max_depth=4, max_width=1)
    found = []
    for number in (PROBED_REQUESTS, 40):
        experience = SpeculationHistory(config)
        experience.depths.is_on = False
        experience.depths.num_observed = 99
        policy = new_policy(config, costs(1e-6, 1e-6), experience)
        requests = requests_of(number)
        while not (plan := policy.plan(requests, 0.0)).depth:
            policy.select(requests, [TokenTree.root_only(0)] * number, plan)
            policy.observe(requests, [[] for _ in requests], NO_TIME, plan)
        assert plan.drafting is not None and len(plan.drafting) == PROBED_REQUESTS
        trees = [chain(0.9, 0.8) if request in plan.drafting else TokenTree.root_only(0) for request in requests]
        policy.select(requests, trees, plan)
        policy.observe(requests, [[1] if request in plan.drafting else [] for request in requests], NO_TIME, plan)
        found.append(experience.depths.mass[:3, 0].tolist())
    assert found[0] == pytest.approx(found[1]) and found[0][2] > 0.5
