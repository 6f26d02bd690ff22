"""The engine on an exact toy model: lossless, independent requests, honest metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.engine.protocols import Plan, Policy, Selection
from hf_slospec.engine.request import Request, Stage
from hf_slospec.engine.step import Engine
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import MIN_DRAFTED_STEPS, SpeculationHistory
from hf_slospec.policies.papers.adaserve import AdaServePolicy
from hf_slospec.policies.papers.adaserve_selection import SLOOrder
from hf_slospec.policies.settings import PolicyName
from tests.toy_models import (
    STOP,
    VOCAB,
    Choose,
    Clock,
    ToyDrafter,
    ToyTarget,
    WholeTrees,
    engine_of,
    greedy,
    new_costs,
    one_hot,
    sampled,
)
from tests.toys import SEEDS, NextProbs, markov_model

POLICIES = get_args(PolicyName)


def policy_of(config: SLOSpecConfig, experience: SpeculationHistory | None = None) -> Policy:
    return new_policy(config, new_costs(), experience or SpeculationHistory(config))


def random_stages(rng: np.random.Generator) -> tuple[Stage, ...]:
    """One to three, that end after some tokens or with one that is even."""
    targets = rng.choice([None, 0.01, 0.8, 10.0], rng.integers(1, 4)).tolist()
    ends = [(dict(num_tokens=3), dict(is_over=lambda tokens: tokens[-1] % 2 == 0))[rng.integers(2)] for _ in targets]
    return tuple(Stage(tpot_slo_s, **end) for tpot_slo_s, end in zip(targets, ends, strict=True))


def random_requests(rng: np.random.Generator, num_requests: int, stops: bool = True) -> list[Request]:
    return [
        Request(
            index,
            rng.integers(0, VOCAB, rng.integers(2, 6)).tolist(),
            int(rng.integers(1, 16)),
            random_stages(rng),
            is_stop=(lambda tokens: tokens[-1] == STOP) if stops else (lambda tokens: False),
        )
        for index in range(num_requests)
    ]


def decode_plainly(choose: Choose, request: Request) -> list[int]:
    """All tokens of the request when it is decoded alone, one token at a time."""
    alone = Request(request.index, list(request.tokens), request.max_new_tokens, is_stop=request.is_stop)
    while not alone.emit(choose(alone)):
        pass
    return alone.tokens


def run(engine: Engine) -> list[StepEvent]:
    events = []
    while engine.scheduler.running:
        engine.clock.now_s += 1.0
        events.append(engine.step())
    return events


def check_events(events: Sequence[StepEvent], requests: Sequence[Request]) -> None:
    """What happened in the steps adds up to what requests say of themselves."""
    for event in events:
        assert event.nodes == sum(part.nodes for part in event.requests)
        assert event.committed == sum(part.committed for part in event.requests)
        assert event.depth or event.nodes == len(event.requests)
    for request in requests:
        metrics, parts, phases, expected = request.metrics(), [], PhaseTimes(), 0.0
        for event in events:
            own = [part for part in event.requests if part.index == request.index]
            if own:
                parts += own
                phases += event.phases
                expected += 0.0 if event.is_prefill else own[0].expected
        assert sum(part.committed for part in parts) == metrics.tokens
        assert sum(part.nodes - 1 for part in parts) == metrics.drafted
        assert all(1 <= part.committed <= part.nodes for part in parts)
        assert {part.tpot_slo_s for part in parts} <= {stage.tpot_slo_s for stage in request.stages}
        assert metrics.phases == phases
        assert metrics.expected_tokens == pytest.approx(expected)


@given(
    seed=SEEDS,
    num_requests=st.integers(1, 6) | st.integers(7, 20),
    is_sampled=st.booleans(),
    likeness=st.sampled_from([0.0, 0.7, 1.0]),
    policy_name=st.sampled_from(POLICIES),
    max_depth=st.integers(0, 5),
    max_width=st.integers(1, 4),
    token_budget=st.none() | st.integers(1, 40),
    order=st.sampled_from(["ascending", "descending"]),
    tick_s=st.sampled_from([0.0, 0.1]),
)
@settings(deadline=None, max_examples=250)
def test_every_request_gets_what_plain_decoding_gives(
    seed: int,
    num_requests: int,
    is_sampled: bool,
    likeness: float,
    policy_name: str,
    max_depth: int,
    max_width: int,
    token_budget: int | None,
    order: SLOOrder,
    tick_s: float,
) -> None:
    rng = np.random.default_rng(seed)
    target, other = markov_model(rng, VOCAB), markov_model(rng, VOCAB)
    choose = sampled(target, seed) if is_sampled else greedy(target)
    requests = random_requests(rng, num_requests)
    expected = [decode_plainly(choose, request) for request in requests]

    own = dict(slo_order=order) if policy_name == "adaserve" else {}
    config = SLOSpecConfig(
        policy=policy_name, max_depth=max_depth, max_width=max_width, token_budget=token_budget, **own
    )
    policy = policy_of(config)
    toy = ToyTarget(choose)
    drafter = ToyDrafter(lambda tokens: likeness * target(tokens) + (1.0 - likeness) * other(tokens))
    events = run(engine_of(requests, toy, drafter, policy, Clock(tick_s=tick_s)))

    assert [request.tokens for request in requests] == expected
    assert sorted(r.index for r in toy.released) == sorted(r.index for r in drafter.released) == [*range(num_requests)]
    for step in toy.steps:
        if policy_name in ("auto", "adaserve"):
            assert sum(tree.num_nodes for _, tree, _ in step) <= max(policy.budget, len(step))
        assert all(tree.max_depth < num_left for _, tree, num_left in step)  # deeper nodes could not be committed
    for request in requests:
        metrics, own = request.metrics(), [tree for step in toy.steps for r, tree, _ in step if r is request]
        assert metrics.tokens == len(request.tokens) - request.prompt_len
        assert metrics.tokens == 1 + metrics.steps + metrics.accepted  # also when the request stops inside a walk
        assert metrics.steps == len(own) - 1  # the prefill is no step
        assert metrics.drafted == sum(tree.num_nodes - 1 for tree in own) >= metrics.accepted
    check_events(events, requests)


def test_requests_are_prefilled_first_and_alone() -> None:
    rng = np.random.default_rng(0)
    target = markov_model(rng, VOCAB)
    first, second, late = (Request(index, [0, 1], 9) for index in range(3))
    toy, drafter = ToyTarget(greedy(target)), ToyDrafter(target)
    engine = engine_of([first, second], toy, drafter, WholeTrees(Plan(1, 1)), Clock())
    events = [engine.step(), engine.step()]
    engine.scheduler.running.append(late)
    events += [engine.step(), engine.step()]
    assert [[part.index for part in event.requests] for event in events] == [[0, 1], [0, 1], [2], [0, 1, 2]]
    assert [event.is_prefill for event in events] == [True, False, True, False]
    assert [(event.depth, event.width) for event in events] == [(0, 1), (1, 1), (0, 1), (1, 1)]
    sizes = [[tree.num_nodes for _, tree, _ in step] for step in toy.steps]
    assert sizes == [[1, 1], [2, 2], [1], [2, 2, 2]]
    assert len(drafter.plans) == 2
    assert late.num_steps == 1


@pytest.mark.parametrize("policy_name", ["auto", "adaserve", "fixed"])
def test_depth_0_never_drafts(policy_name: str) -> None:
    target = markov_model(np.random.default_rng(1), VOCAB)
    requests = [Request(index, [0, 1], 6) for index in range(3)]
    drafter = ToyDrafter(target)
    toy = ToyTarget(greedy(target))
    run(engine_of(requests, toy, drafter, policy_of(SLOSpecConfig(policy=policy_name, max_depth=0)), Clock()))
    assert drafter.plans == []
    assert len(toy.steps) == 6
    assert [request.metrics().acceptance_length for request in requests] == [1.0] * 3


@pytest.mark.parametrize("policy_name", POLICIES)
def test_last_token_is_decoded_without_drafting(policy_name: str) -> None:
    target = markov_model(np.random.default_rng(1), VOCAB)
    drafter = ToyDrafter(target)
    request = Request(0, [0, 1], 2)
    policy = policy_of(SLOSpecConfig(policy=policy_name))
    run(engine_of([request], ToyTarget(greedy(target)), drafter, policy, Clock()))
    assert drafter.plans == []
    assert request.num_emitted == 2


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_draft_that_is_always_right_commits_whole_chains(depth: int) -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmax()))
    request = Request(0, [0, 1], 1 + 3 * (depth + 1))
    run(engine_of([request], ToyTarget(greedy(target)), drafter, WholeTrees(Plan(depth, 1)), Clock()))
    metrics = request.metrics()
    assert (metrics.steps, metrics.drafted, metrics.accepted) == (3, 3 * depth, 3 * depth)
    assert metrics.acceptance_length == depth + 1


def test_a_draft_that_is_always_wrong_costs_no_token() -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmin()))
    request = Request(0, [0, 1], 10)
    run(engine_of([request], ToyTarget(greedy(target)), drafter, WholeTrees(Plan(3, 1)), Clock()))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.drafted, metrics.accepted) == (10, 9, 27, 0)


def test_who_is_not_drafted_for_decodes_plainly() -> None:
    target = markov_model(np.random.default_rng(3), VOCAB)
    requests = [Request(index, [index, 1], 9) for index in range(3)]
    expected = [decode_plainly(greedy(target), request) for request in requests]
    toy, drafter = ToyTarget(greedy(target)), ToyDrafter(target)
    run(engine_of(requests, toy, drafter, WholeTrees(Plan(2, 1, drafting=[requests[2], requests[0]])), Clock()))
    assert [request.tokens for request in requests] == expected
    assert [request.num_drafted > 0 for request in requests] == [True, False, True]
    assert all(tree.num_nodes == 1 for step in toy.steps for request, tree, _ in step if request is requests[1])

    nobody = ToyDrafter(target)
    alone = Request(0, [0, 1], 5)
    run(engine_of([alone], ToyTarget(greedy(target)), nobody, WholeTrees(Plan(2, 1, drafting=[])), Clock()))
    assert nobody.plans == []
    assert alone.num_steps == 4


def test_finished_requests_leave_and_the_others_go_on() -> None:
    target = markov_model(np.random.default_rng(3), VOCAB)
    requests = [Request(index, [0, 1], max_new_tokens) for index, max_new_tokens in enumerate((1, 8, 3))]
    toy, drafter = ToyTarget(greedy(target)), ToyDrafter(target)
    run(engine_of(requests, toy, drafter, WholeTrees(Plan(0, 1)), Clock()))
    assert [[request.index for request, _, _ in step] for step in toy.steps] == [[0, 1, 2], *[[1, 2]] * 2, *[[1]] * 5]
    assert [request.index for request in toy.released] == [request.index for request in drafter.released] == [0, 2, 1]


def test_a_stop_inside_the_walk_ends_the_request_there() -> None:
    chain = {0: 1, 1: 2, 2: 3, 3: 0}
    request = Request(0, [0, 0], 20, is_stop=lambda tokens: tokens[-3:] == [1, 2, 3])
    toy = ToyTarget(lambda request: chain[request.tokens[-1]])
    drafter = ToyDrafter(lambda tokens: one_hot(chain[tokens[-1]]))
    run(engine_of([request], toy, drafter, WholeTrees(Plan(4, 1)), Clock()))
    assert request.tokens == [0, 0, 1, 2, 3]
    assert (request.num_steps, request.num_drafted, request.num_accepted) == (1, 4, 1)


def test_times_are_taken_when_tokens_are_committed() -> None:
    target = markov_model(np.random.default_rng(4), VOCAB)
    requests = [Request(0, [0, 1], 5, (Stage(0.5),), arrived_s=10.0), Request(1, [1, 0], 5, (Stage(0.6),))]
    clock = Clock()
    engine = engine_of(requests, ToyTarget(greedy(target)), ToyDrafter(target), WholeTrees(Plan(0, 1)), clock)
    for now_s in (12.0, 12.25, 13.0, 13.5, 14.25):
        clock.now_s = now_s
        engine.step()
    first, second = (request.metrics() for request in requests)
    assert (first.ttft_s, second.ttft_s) == (2.0, 12.0)
    assert first.tpot_s == second.tpot_s == (14.25 - 12.0) / 4
    assert (first.attained, second.attained) == (False, True)
    assert first.slack_s == pytest.approx(4 * 0.5 - 2.25)  # late by this much
    assert first.worst_tpot_s is None
    assert requests[0].decoded(15.0) == (3.0, 4)


def test_the_seconds_of_a_step_go_to_its_phases() -> None:
    target = markov_model(np.random.default_rng(4), VOCAB)
    clock = Clock()

    class Slow(ToyTarget, ToyDrafter, WholeTrees):
        """Target, drafter and policy, of which each method takes its own time."""

        def __init__(self) -> None:
            ToyTarget.__init__(self, greedy(target))
            ToyDrafter.__init__(self, target)
            WholeTrees.__init__(self, Plan(1, 1))

        def plan(self, *arguments: object) -> Plan:
            clock.now_s += 1.0
            return super().plan(*arguments)

        def draft(self, *arguments: object) -> list[TokenTree]:
            clock.now_s += 10.0
            return super().draft(*arguments)

        def select(self, *arguments: object) -> Selection:
            clock.now_s += 100.0
            return super().select(*arguments)

        def verify(self, *arguments: object) -> list[Callable[[int], int]]:
            clock.now_s += 1000.0
            return super().verify(*arguments)

        def commit(self, *arguments: object) -> None:
            clock.now_s += 10000.0
            super().commit(*arguments)

    slow = Slow()
    engine = engine_of([Request(0, [0, 1], 9)], slow, slow, slow, clock)
    assert engine.step().phases == PhaseTimes(verify_s=1000.0, host_s=10000.0)
    assert engine.step().phases == PhaseTimes(draft_s=10.0, select_s=101.0, verify_s=1000.0, host_s=10000.0)
    assert engine.scheduler.running[0].metrics().phases.total_s == clock.now_s


def test_a_request_of_one_token_has_no_tpot_and_is_not_late() -> None:
    target = markov_model(np.random.default_rng(4), VOCAB)
    request = Request(0, [0, 1], 1, (Stage(1e-9),))
    run(engine_of([request], ToyTarget(greedy(target)), ToyDrafter(target), WholeTrees(Plan(2, 2)), Clock()))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.tpot_s, metrics.acceptance_length) == (1, 0, None, None)
    assert metrics.attained is True


def test_broken_trees_are_caught_when_invariants_are_checked() -> None:
    target = markov_model(np.random.default_rng(5), VOCAB)
    drafter = ToyDrafter(lambda tokens: 1.5 * one_hot(0))
    engine = engine_of([Request(0, [0, 1], 9)], ToyTarget(greedy(target)), drafter, WholeTrees(Plan(2, 1)), Clock())
    engine.step()
    with pytest.raises(AssertionError):
        engine.step()


# ---------------------------------------------------------------- targets


def commit(request: Request, tokens: Sequence[int], now_s: float) -> None:
    for token in tokens:
        request.emit(token)
    request.account(0, 0, 1.0, PhaseTimes(), now_s)


@pytest.mark.parametrize(
    ("times", "attained"),
    [
        ([0.0, 0.5, 1.0, 3.0, 5.0], True),
        ([0.0, 0.5, 1.1, 2.0, 3.0], False),  # the first stage is late, the last one in time
        ([0.0, 0.5, 1.0, 3.0, 5.1], False),
        ([0.0, 0.9, 1.0, 4.5, 5.0], True),  # targets hold for averages
    ],
)
@pytest.mark.parametrize("stage", [Stage(0.5, 3), Stage(0.5, is_over=lambda tokens: tokens[-1] == 9)])
def test_every_stage_has_to_be_attained(stage: Stage, times: list[float], attained: bool) -> None:
    request = Request(0, [9, 9], 20, (stage, Stage(2.0)))
    targets = [request.tpot_slo_s]
    for token, now_s in zip((5, 7, 9, 9, 8), times, strict=True):
        commit(request, [token], now_s)
        targets.append(request.tpot_slo_s)
    assert targets == [0.5, 0.5, 0.5, 2.0, 2.0, 2.0]
    assert request.metrics().attained is attained
    assert request.metrics().tpot_slo_s == 2.0
    assert request.metrics().slack_s == pytest.approx(2 * 2.0 - (times[-1] - times[2]))
    assert request.decoded(10.0) == pytest.approx((10.0 - times[2], 2))


def test_a_stage_that_ends_within_a_step_ends_with_the_step() -> None:
    request = Request(0, [0], 20, (Stage(1.0, 3), Stage(None, 2), Stage(1.0)))
    commit(request, [1], 0.0)
    commit(request, [1, 1, 1, 1], 4.0)  # two of these make the stage's three; all four count for it
    assert request.tpot_slo_s is None
    assert request.decoded(5.0) == (1.0, 0)
    commit(request, [1], 6.0)
    assert request.tpot_slo_s is None  # its second token is still to come
    commit(request, [1, 1], 99.0)  # no promise, nothing to be late with
    assert request.tpot_slo_s == 1.0
    commit(request, [1], 100.0)
    assert request.metrics().attained is True


def test_stages_without_targets_attain_nothing() -> None:
    request = Request(0, [0], 20, (Stage(None, 1), Stage(None)))
    commit(request, [1], 0.0)
    commit(request, [1], 1.0)
    assert request.metrics().attained is None
    assert request.metrics().slack_s is None


def test_late_requests_get_their_nodes_first() -> None:
    """Both draft the same tree and ties favour the first; the second one is behind its target."""
    target = markov_model(np.random.default_rng(6), VOCAB)
    toy, clock = ToyTarget(greedy(target)), Clock()
    relaxed, late = Request(0, [0, 1], 30), Request(1, [0, 1], 30, (Stage(1.0),))
    policy = AdaServePolicy(SLOSpecConfig(policy="adaserve", token_budget=4, max_slo_share=9.0), new_costs())
    engine = engine_of([relaxed, late], toy, ToyDrafter(target), policy, clock)
    engine.step()
    engine.step()
    assert [tree.num_nodes for _, tree, _ in toy.steps[-1]] == [2, 2]
    clock.now_s = 1000.0
    engine.step()
    assert [tree.num_nodes for _, tree, _ in toy.steps[-1]] == [1, 3]


@pytest.mark.parametrize("elapsed_s", [0.0, 6.0])
def test_auto_gives_late_requests_more_nodes_of_the_same_tree(elapsed_s: float) -> None:
    target = markov_model(np.random.default_rng(6), VOCAB)
    relaxed, late = Request(0, [0, 1], 90), Request(1, [0, 1], 90, (Stage(1.0),))
    clock, policy = Clock(), policy_of(SLOSpecConfig(token_budget=6, urgency=1.0))
    engine = engine_of([relaxed, late], ToyTarget(greedy(target)), ToyDrafter(target), policy, clock)
    engine.step()
    clock.now_s = elapsed_s
    first, second = (part.nodes for part in engine.step().requests)
    assert (second > first) if elapsed_s else (second <= first)


def sizes(
    targets: Sequence[float | None], experience: SpeculationHistory, draft: NextProbs, max_new_tokens: int = 40
) -> list[list[int]]:
    """Nodes of every request in each step under auto."""
    config = SLOSpecConfig(token_budget=8, max_depth=4)
    requests = [Request(i, [0, 1], max_new_tokens, (Stage(tpot_slo_s),)) for i, tpot_slo_s in enumerate(targets)]
    engine = engine_of(requests, ToyTarget(greedy(draft)), ToyDrafter(draft), policy_of(config, experience), Clock())
    return [[part.nodes for part in event.requests] for event in run(engine)]


def test_hopeless_requests_are_logged_once_and_count_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    model = markov_model(np.random.default_rng(6), VOCAB)
    experience = SpeculationHistory(SLOSpecConfig(max_depth=4))
    sizes([None, None], experience, model)
    assert experience.depths.num_observed > MIN_DRAFTED_STEPS
    relaxed = sizes([None, None], copy.deepcopy(experience), model)
    assert not caplog.records
    assert sizes([None, 1e-9], copy.deepcopy(experience), model) == relaxed
    assert [record.message.split(" and ")[0] for record in caplog.records] == [
        "request 1 can no longer meet its TPOT SLO of 1e-09 s"
    ]


def test_no_request_is_given_up_before_anything_is_known(caplog: pytest.LogCaptureFixture) -> None:
    model = markov_model(np.random.default_rng(6), VOCAB)
    sizes([1e-9, None], SpeculationHistory(SLOSpecConfig(max_depth=4)), model, max_new_tokens=5)
    assert not caplog.records


@pytest.mark.parametrize(("required", "expected"), [(0.95, [2, 1]), (1.05, [1, 2])])
def test_required_tokens_count_from_the_first_token_to_the_end_of_the_step(
    required: float, expected: list[int]
) -> None:
    """Ties and the one node to give favour the first request, unless the second needs more than its root."""
    model = markov_model(np.random.default_rng(6), VOCAB)
    plan, requests = Plan(1, 2), [Request(0, [0, 1], 30), Request(1, [0, 1], 30, (Stage(1.0),))]
    for request in requests:
        commit(request, [2], 100.0)
        commit(request, [3, 2, 0, 1], 101.0)
    costs, num_keys = new_costs(), sum(len(request.tokens) for request in requests)
    step_s = float(costs.draft_s(2, plan.depth, plan.width, num_keys) + costs.verify_s(3, 2, num_keys))
    policy = AdaServePolicy(SLOSpecConfig(token_budget=3), costs)
    plan = replace(plan, state=policy.plan(requests, 100.0 + (4.0 + required) - step_s).state)
    selection = policy.select(requests, ToyDrafter(model).draft(requests, plan), plan)
    assert [tree.num_nodes for tree in selection.trees] == expected
    assert selection.step_s == pytest.approx(step_s)


# ---------------------------------------------------------------- what policies do


def test_auto_stops_drafting_what_is_never_taken() -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmin()))
    requests = [Request(index, [index, 1], 400) for index in range(2)]
    events = run(engine_of(requests, ToyTarget(greedy(target)), drafter, policy_of(SLOSpecConfig()), Clock()))
    assert sum(event.depth == 0 for event in events[100:]) > 0.97 * len(events[100:])
    assert len(events) == 400


def test_auto_goes_deep_with_a_draft_that_is_always_right() -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmax()))
    request = Request(0, [0, 1], 200)
    run(engine_of([request], ToyTarget(greedy(target)), drafter, policy_of(SLOSpecConfig(max_depth=6)), Clock()))
    assert request.metrics().acceptance_length > 6.0
    assert request.metrics().expected_tokens == pytest.approx(199, rel=0.1)
