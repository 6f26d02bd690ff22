"""The default policy: depth that pays off, nodes for late requests, and acceptance learned from few
requests.
"""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.hybrid import HybridDrafter
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Drafter
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.engine.step import Engine
from hf_slospec.generate.speculator import HOST_LEVEL
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import (
    BATCH_STEPS,
    MIN_DRAFTED_STEPS,
    PROBED_REQUESTS,
    SpeculationHistory,
)
from hf_slospec.policies.depth import DepthControl, Looks
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler
from tests.support.policy_costs import NO_TIME, begun, costs, late, plan_of, requests_of
from tests.support.toys.engine import policy_of, run
from tests.support.toys.models import (
    VOCAB,
    Clock,
    ToyDrafter,
    ToyTarget,
    engine_of,
    greedy,
    new_costs,
    one_hot,
)
from tests.support.toys.trees import chain, markov_model


@pytest.mark.parametrize("elapsed_s", [0.0, 6.0])
def test_auto_gives_late_requests_more_nodes_of_the_same_tree(elapsed_s):
    target = markov_model(np.random.default_rng(6), VOCAB)
    relaxed, late = (
        Request(0, RequestParams([0, 1], 90)),
        Request(1, RequestParams([0, 1], 90, (Stage(1.0),))),
    )
    clock = Clock()
    policy = policy_of(SLOSpecConfig(token_budget=6, urgency=1.0))
    engine = engine_of(
        [relaxed, late], ToyTarget(greedy(target)), ToyDrafter(target), policy, clock
    )
    engine.step()
    clock.now_s = elapsed_s
    first, second = (part.nodes for part in engine.step().requests)
    assert (second > first) if elapsed_s else (second <= first)


def test_levels_are_worth_more_for_late_requests():
    config = SLOSpecConfig(urgency=1.0)
    policy = new_policy(config, costs(1e-3), SpeculationHistory(config))
    hurried = late(0, 0.5, elapsed_s=10.0)
    relaxed = late(1, None)
    weights = plan_of(policy, [hurried, relaxed], 10.0).weights
    assert weights is not None and weights[hurried] > 1.0 > weights[relaxed]
    assert sum(weights.values()) == pytest.approx(2.0)


def sizes(targets, experience, draft, max_new_tokens=40):
    """Nodes of every request in each step under auto."""
    config = SLOSpecConfig(token_budget=8, max_depth=4)
    requests = [
        Request(i, RequestParams([0, 1], max_new_tokens, (Stage(tpot_slo_s),)))
        for i, tpot_slo_s in enumerate(targets)
    ]
    engine = engine_of(
        requests,
        ToyTarget(greedy(draft)),
        ToyDrafter(draft),
        policy_of(config, experience),
        Clock(),
    )
    return [[part.nodes for part in event.requests] for event in run(engine)]


def test_unattainable_slos_are_logged_once_and_weigh_like_none(caplog):
    model = markov_model(np.random.default_rng(6), VOCAB)
    experience = SpeculationHistory(SLOSpecConfig(max_depth=4))
    sizes([None, None], experience, model)
    assert experience.depths.num_observed > MIN_DRAFTED_STEPS
    relaxed = sizes([None, None], copy.deepcopy(experience), model)
    assert not caplog.records
    assert sizes([None, 1e-9], copy.deepcopy(experience), model) == relaxed
    assert [record.message.split(" and ")[0] for record in caplog.records] == [
        "request 1 can no longer keep its pace of 1e-09 s per token"
    ]


def test_further_unattainable_slos_of_a_call_are_logged_as_information(caplog):
    model = markov_model(np.random.default_rng(6), VOCAB)
    experience = SpeculationHistory(SLOSpecConfig(max_depth=4))
    sizes([None, None], experience, model)
    with caplog.at_level("INFO"):
        sizes([1e-9, 1e-9, 1e-9], experience, model)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]


def test_no_slo_counts_as_unattainable_before_drafts_were_observed(caplog):
    model = markov_model(np.random.default_rng(6), VOCAB)
    sizes([1e-9, None], SpeculationHistory(SLOSpecConfig(max_depth=4)), model, max_new_tokens=5)
    assert not caplog.records


@pytest.mark.parametrize("has_model", [False, True], ids=["alone", "before a model"])
@pytest.mark.parametrize(("draft_s", "pays"), [(0.1, True), (20.0, False)])
def test_auto_stops_drafting_that_takes_longer_on_the_host_than_it_gains(draft_s, pays, has_model):
    target, clock, config = (
        markov_model(np.random.default_rng(2), VOCAB),
        Clock(),
        SLOSpecConfig(max_depth=4),
    )

    class Slow(ToyDrafter):
        def draft(self, requests, plan):
            clock.now_s += draft_s
            return super().draft(requests, plan)

    drafter: Drafter = Slow(lambda tokens: one_hot(target(tokens).argmax()))
    step_costs = StepCosts(new_costs().verify, HOST_LEVEL)
    if has_model:  # the profile is that of the model alone
        drafter = HybridDrafter([drafter, ToyDrafter(target)])
        step_costs = new_costs()
    requests = [Request(0, RequestParams([0, 1], 600))]
    scheduler = ContinuousScheduler.of_call(requests, step_costs)
    policy = new_policy(config, step_costs, SpeculationHistory(config))
    events = run(Engine(ToyTarget(greedy(target)), drafter, policy, scheduler, step_costs, clock))
    num_drafted = sum(event.depth > 0 for event in events[-50:])
    assert num_drafted == 50 if pays else num_drafted <= 50 / Looks.MIN_GAP


def test_auto_goes_deep_with_a_draft_that_is_always_right():
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmax()))
    request = Request(0, RequestParams([0, 1], 200))
    run(
        engine_of(
            [request],
            ToyTarget(greedy(target)),
            drafter,
            policy_of(SLOSpecConfig(max_depth=6)),
            Clock(),
        )
    )
    assert request.metrics().acceptance_length > 6.0
    assert request.metrics().expected_tokens == pytest.approx(199, rel=0.1)


def run_step(policy, requests, conditional, is_accepted=True):
    """Run a step that drafts chains, of which all nodes or none are accepted; return its plan."""
    step, plan = begun(policy, requests)
    drafting = requests if plan.drafting is None else plan.drafting
    depths = [plan.depth if request in drafting else 0 for request in requests]
    step.select([chain(*[conditional] * depth) for depth in depths], plan)
    step.observe([range(1, depth + 1) if is_accepted else [] for depth in depths], NO_TIME)
    return plan


def test_auto_looks_at_a_few_requests_while_speculation_does_not_pay():
    """Drafting for all would have the draft read everybody's prompts, for nothing."""
    config = SLOSpecConfig(max_depth=4, max_width=1)
    policy = new_policy(config, costs(0.05), SpeculationHistory(config))
    requests = requests_of(20)
    looks = list[int]()
    for _ in range(200):
        plan = run_step(policy, requests, 0.01, is_accepted=False)
        if plan.depth:
            looks.append(len(plan.drafting or requests))
    assert set(looks) == {20, PROBED_REQUESTS} and looks == sorted(looks, reverse=True)
    assert looks.count(PROBED_REQUESTS) > 1


def test_auto_learns_from_a_few_as_from_all():
    """What a look at some says of a drafting request does not depend on how many are not drafted
    for.
    """
    config = SLOSpecConfig(max_depth=4, max_width=1)
    found = []
    for number in (PROBED_REQUESTS, 40):
        experience = SpeculationHistory(config)
        experience.depths.is_on = False
        experience.depths.num_observed = 99
        policy = new_policy(config, costs(1e-6, 1e-6), experience)
        requests = requests_of(number)
        while not (plan := run_step(policy, requests, 0.9)).depth:
            pass
        assert plan.drafting is not None and len(plan.drafting) == PROBED_REQUESTS
        found.append(experience.depths.mass[:3, 0].tolist())
    assert found[0] == pytest.approx(found[1]) and found[0][2] > 0.5


@pytest.mark.parametrize(("num_behind", "is_switched_on"), [(1, True), (4000, False)])
def test_auto_does_not_switch_on_for_less_than_the_draft_has_to_process_first(
    num_behind, is_switched_on
):
    config = SLOSpecConfig(max_depth=1, max_width=1)
    history = SpeculationHistory(config)
    history.depths.num_observed = 99
    history.depths.is_on = False
    history.depths.steps_since[1] = 1.0
    history.depths.mass[1] = history.depths.nodes[1] = 0.9
    draft_level = ForwardCost(LatencyCurve((1, 1001), (0.1, 10.1)))  # 0.01 s per token
    policy = new_policy(config, StepCosts(costs(1e-3).verify, draft_level), history)
    request = Request(0, RequestParams([1] * 5000, 100))
    request.kv.num_draft_seen = 5000 - num_behind
    begun(policy, [request])
    assert history.depths.is_on == is_switched_on


@pytest.mark.parametrize(("says", "is_understated"), [(0.3, True), (0.999, False)])
def test_limits_of_drafting_are_in_the_drafts_own_probabilities(says, is_understated):
    """A draft that is always right but says 0.3 is given limits that are lower by as much as it
    understates.
    """
    target = markov_model(np.random.default_rng(2), VOCAB)

    def draft(tokens):
        right = one_hot(target(tokens).argmax())
        return says * right + (1.0 - says) / (VOCAB - 1) * (1.0 - right)

    config = SLOSpecConfig(max_depth=3, max_width=1)
    experience = SpeculationHistory(config)
    parts = ToyTarget(greedy(target)), ToyDrafter(draft), policy_of(config, experience), Clock()
    run(engine_of([Request(0, RequestParams([0, 1], 200))], *parts))
    assert (experience.understated > 1.8) == is_understated
    drafting = Request(1, RequestParams([0, 1], 50))
    drafting.emit(1)
    plans = []
    for ratio in (1.0, experience.understated):
        own = copy.deepcopy(experience)
        own.understated = ratio
        plans.append(plan_of(policy_of(config, own), [drafting]))
    assert plans[1].min_gain == pytest.approx(plans[0].min_gain / experience.understated)
    assert plans[1].min_path_prob == pytest.approx(plans[0].min_path_prob / experience.understated)


def test_what_is_still_to_be_learned_keeps_no_request_alive():
    """Outcomes of a few steps are learned from together, and their requests may end before."""
    config = SLOSpecConfig(max_depth=2, max_width=1)
    history = SpeculationHistory(config)
    policy = new_policy(config, costs(1e-6, 1e-6), history)
    requests = requests_of(1)

    def take_step():
        """Decode one step; return how many were learned from until now."""
        step, plan = begun(policy, requests)
        step.select([chain(0.9, 0.8)], plan)
        step.observe([[1]], NO_TIME)
        return history.depths.num_observed

    counts = [take_step() for _ in range(100)]
    assert BATCH_STEPS in np.diff(counts) and 1 in np.diff(counts[: DepthControl.WARMUP_TREES])
    while (now := take_step()) == counts[-1]:
        pass
    assert take_step() == now
    known = weakref.ref(requests.pop())
    gc.collect()
    assert known() is None
    assert history.acceptance.calibrations  # to ask is to learn
    assert history.depths.num_observed == now + 1


@pytest.mark.parametrize(
    ("due_s", "num_levels"), [(float("inf"), 4), (1.25, 4), (1.12, 2), (1.04, 0)], ids=str
)
def test_drafts_leave_time_for_first_tokens_that_are_due(due_s, num_levels):
    """A step of plain decoding takes 1 s, a level of drafting 0.05 s."""
    config = SLOSpecConfig(max_depth=4, max_width=1)
    step_costs = costs(1e-6, 0.05)
    history = SpeculationHistory(config)
    policy = new_policy(config, step_costs, history)
    requests = requests_of(2)
    for _ in range(40):
        run_step(policy, requests, 0.99)
    step_costs.first_tokens.begin(due_s, None)
    _, plan = begun(policy, requests)
    assert plan.depth == num_levels


def test_steps_are_shorter_where_requests_with_tight_ttft_slos_arrive():
    config = SLOSpecConfig(max_depth=4, max_width=1)
    depths = []
    for ttft_slo_s in (float("inf"), 3.0, 2.2):
        step_costs = costs(1e-6, 0.05)
        policy, requests = (
            new_policy(config, step_costs, SpeculationHistory(config)),
            requests_of(2),
        )
        step_costs.first_tokens.arrived(ttft_slo_s, 1)
        for _ in range(60):
            step_costs.first_tokens.begin(float("inf"), lambda num_tokens: 1.0 + 0.0 * num_tokens)
            plan = run_step(policy, requests, 0.99)
        depths.append(plan.depth)
    assert depths[0] == depths[1] == 4 > depths[2] > 0
