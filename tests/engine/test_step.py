"""Steps of the engine on the toy model: prefill, drafting, commits, times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Policy, Selection
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.policy_names import POLICIES
from tests.support.toys.engine import decode_plainly, policy_of, run
from tests.support.toys.models import (
    VOCAB,
    Clock,
    ToyDrafter,
    ToyTarget,
    WholeTrees,
    engine_of,
    greedy,
    one_hot,
)
from tests.support.toys.trees import markov_model

TARGET = markov_model(np.random.default_rng(2), VOCAB)


def engine_with(requests, policy, target=None, drafter=None, clock=None):
    """Return an engine that decodes greedily; a plan in place of a policy verifies whole trees."""
    return engine_of(
        requests,
        target or ToyTarget(greedy(TARGET)),
        drafter or ToyDrafter(TARGET),
        WholeTrees(policy) if isinstance(policy, Plan) else policy,
        clock or Clock(),
    )


def request_of(new, index=0):
    return Request(index, RequestParams([0, 1], new))


def test_requests_are_prefilled_first_and_alone():
    first, second, late = (request_of(9, index) for index in range(3))
    toy = ToyTarget(greedy(TARGET))
    drafter = ToyDrafter(TARGET)
    engine = engine_with([first, second], Plan(1, 1), target=toy, drafter=drafter)
    events = [engine.step(), engine.step()]
    engine.scheduler.running.append(late)
    events += [engine.step(), engine.step()]
    assert [[part.index for part in event.requests] for event in events] == [
        [0, 1],
        [0, 1],
        [2],
        [0, 1, 2],
    ]
    assert [event.is_prefill for event in events] == [True, False, True, False]
    assert [(event.depth, event.width) for event in events] == [(0, 1), (1, 1), (0, 1), (1, 1)]
    sizes = [[tree.num_nodes for _, tree, _ in step] for step in toy.steps]
    assert sizes == [[1, 1], [2, 2], [1], [2, 2, 2]]
    assert len(drafter.plans) == 2
    assert late.stats.num_steps == 1


@pytest.mark.parametrize("policy_name", ["auto", "adaserve", "fixed"])
def test_depth_0_never_drafts(policy_name):
    requests = [request_of(6, index) for index in range(3)]
    drafter = ToyDrafter(TARGET)
    toy = ToyTarget(greedy(TARGET))
    run(
        engine_with(
            requests,
            policy_of(SLOSpecConfig(policy=policy_name, max_depth=0)),
            target=toy,
            drafter=drafter,
        )
    )
    assert drafter.plans == []
    assert len(toy.steps) == 6
    assert [request.metrics().acceptance_length for request in requests] == [1.0] * 3


@pytest.mark.parametrize("policy_name", POLICIES)
def test_last_token_is_decoded_without_drafting(policy_name):
    drafter = ToyDrafter(TARGET)
    request = request_of(2)
    policy = policy_of(SLOSpecConfig(policy=policy_name))
    run(engine_with([request], policy, drafter=drafter))
    assert drafter.plans == []
    assert request.num_emitted == 2


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_draft_that_is_always_right_commits_whole_chains(depth):
    drafter = ToyDrafter(lambda tokens: one_hot(TARGET(tokens).argmax()))
    request = Request(0, RequestParams([0, 1], 1 + 3 * (depth + 1)))
    run(engine_with([request], Plan(depth, 1), drafter=drafter))
    metrics = request.metrics()
    assert (metrics.steps, metrics.drafted, metrics.accepted) == (3, 3 * depth, 3 * depth)
    assert metrics.acceptance_length == depth + 1


def test_a_draft_that_is_always_wrong_costs_no_token():
    drafter = ToyDrafter(lambda tokens: one_hot(TARGET(tokens).argmin()))
    request = request_of(10)
    run(engine_with([request], Plan(3, 1), drafter=drafter))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.drafted, metrics.accepted) == (10, 9, 27, 0)


def test_requests_outside_plan_drafting_decode_plainly():
    requests = [Request(index, RequestParams([index, 1], 9)) for index in range(3)]
    expected = [decode_plainly(greedy(TARGET), request) for request in requests]
    toy = ToyTarget(greedy(TARGET))
    drafter = ToyDrafter(TARGET)
    run(
        engine_with(
            requests, Plan(2, 1, drafting=[requests[2], requests[0]]), target=toy, drafter=drafter
        )
    )
    assert [request.tokens for request in requests] == expected
    assert [request.stats.num_drafted > 0 for request in requests] == [True, False, True]
    assert all(
        tree.num_nodes == 1
        for step in toy.steps
        for request, tree, _ in step
        if request is requests[1]
    )

    nobody = ToyDrafter(TARGET)
    alone = request_of(5)
    run(engine_with([alone], Plan(2, 1, drafting=[]), drafter=nobody))
    assert nobody.plans == []
    assert alone.stats.num_steps == 4


def test_requests_outside_plan_decoding_keep_their_tokens_and_continue_later():
    class Alternating(WholeTrees):
        """Lets one request decode in each step."""

        def plan(self, requests, begun_s, num_prefill_tokens=0):
            fewest = min(requests, key=lambda request: request.num_emitted)
            return replace(super().plan(requests, begun_s, num_prefill_tokens), decoding=[fewest])

    requests = [Request(index, RequestParams([index, 1], 9)) for index in range(3)]
    expected = [decode_plainly(greedy(TARGET), request) for request in requests]
    toy = ToyTarget(greedy(TARGET))
    drafter = ToyDrafter(TARGET)
    events = run(engine_with(requests, Alternating(Plan(2, 1)), target=toy, drafter=drafter))
    assert [request.tokens for request in requests] == expected
    assert [len(event.decoding) for event in events[1:]] == [1] * (len(events) - 1)
    assert all(
        event.num_decoding == event.num_drafted_for == 1 for event in events[1:] if event.depth
    )


def test_finished_requests_leave_and_the_others_go_on():
    requests = [request_of(max_new_tokens, index) for index, max_new_tokens in enumerate((1, 8, 3))]
    toy = ToyTarget(greedy(TARGET))
    drafter = ToyDrafter(TARGET)
    run(engine_with(requests, Plan(0, 1), target=toy, drafter=drafter))
    assert [[request.index for request, _, _ in step] for step in toy.steps] == [
        [0, 1, 2],
        *[[1, 2]] * 2,
        *[[1]] * 5,
    ]
    assert (
        [request.index for request in toy.released]
        == [request.index for request in drafter.released]
        == [0, 2, 1]
    )


def test_a_stop_inside_the_walk_ends_the_request_there():
    chain = {0: 1, 1: 2, 2: 3, 3: 0}
    request = Request(0, RequestParams([0, 0], 20, is_stop=lambda tokens: tokens[-3:] == [1, 2, 3]))
    toy = ToyTarget(lambda request: chain[request.tokens[-1]])
    drafter = ToyDrafter(lambda tokens: one_hot(chain[tokens[-1]]))
    run(engine_with([request], Plan(4, 1), target=toy, drafter=drafter))
    assert request.tokens == [0, 0, 1, 2, 3]
    assert (request.stats.num_steps, request.stats.num_drafted, request.stats.num_accepted) == (
        1,
        4,
        1,
    )


def test_times_are_taken_when_tokens_are_committed():
    requests = [
        Request(0, RequestParams([0, 1], 5, (Stage(0.5),)), 10.0),
        Request(1, RequestParams([1, 0], 5, (Stage(0.6),))),
    ]
    clock = Clock()
    engine = engine_with(requests, Plan(0, 1), clock=clock)
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


def test_the_seconds_of_a_step_go_to_its_phases():
    clock = Clock()

    class Slow(ToyTarget, ToyDrafter, WholeTrees):
        """Target, drafter and policy, of which each method takes its own time."""

        def __init__(self):
            ToyTarget.__init__(self, greedy(TARGET))
            ToyDrafter.__init__(self, TARGET)
            WholeTrees.__init__(self, Plan(1, 1))

        def plan(self, *arguments):
            clock.now_s += 1.0
            return super().plan(*arguments)

        def draft(self, *arguments):
            clock.now_s += 10.0
            return super().draft(*arguments)

        def select(self, *arguments):
            clock.now_s += 100.0
            return super().select(*arguments)

        def verify(self, *arguments):
            clock.now_s += 1000.0
            return super().verify(*arguments)

        def commit(self, *arguments):
            clock.now_s += 10000.0
            super().commit(*arguments)

    slow = Slow()
    engine = engine_with([request_of(9)], slow, target=slow, drafter=slow, clock=clock)
    assert engine.step().phases == PhaseTimes(verify_s=1000.0, host_s=10000.0)
    assert engine.step().phases == PhaseTimes(
        draft_s=10.0, select_s=101.0, verify_s=1000.0, host_s=10000.0
    )
    assert engine.scheduler.running[0].metrics().phases.total_s == clock.now_s


def test_costs_follow_at_once_when_forwards_are_computed_in_another_way():
    clock = Clock()

    class Switching(ToyTarget):
        path = "eager"
        num_one_off_forwards = 0
        num_compared = 0

        def verify(self, *arguments):
            clock.now_s += {"eager": 2.0, "compiled": 1.2}[self.path]
            if self.num_compared:  # computed in both ways
                clock.now_s = clock.now_s + 2.0
                self.num_compared = self.num_compared - 1
                self.num_one_off_forwards += 1
            return super().verify(*arguments)

    toy = Switching(greedy(TARGET))
    request = request_of(200)
    engine = engine_with([request], Plan(0, 1), target=toy, clock=clock)
    for _ in range(50):
        event = engine.step()
    assert engine.costs.predicted(event).verify_s == pytest.approx(2.0, rel=0.1)
    others = engine.costs.for_own_engine()
    toy.path = "compiled"
    toy.num_compared = 2
    for _ in range(3):
        event = engine.step()
    assert others.verify_s(4) == engine.costs.verify_s(4)
    assert engine.costs.predicted(event).verify_s == pytest.approx(1.2, rel=0.05)


def test_a_request_of_one_token_has_no_tpot_and_is_not_late():
    request = Request(0, RequestParams([0, 1], 1, (Stage(1e-9),)))
    run(engine_with([request], Plan(2, 2)))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.tpot_s, metrics.acceptance_length) == (
        1,
        0,
        None,
        None,
    )
    assert metrics.attained is True


def test_broken_trees_are_caught_when_invariants_are_checked():
    drafter = ToyDrafter(lambda tokens: 1.5 * one_hot(0))
    engine = engine_with([request_of(9)], Plan(2, 1), drafter=drafter)
    engine.step()
    with pytest.raises(AssertionError):
        engine.step()


def test_while_drafting_is_paused_the_policy_learns_of_no_drafts():
    depths = []

    class Watching(Policy):
        def plan(self, *_):
            return Plan(2, 1)

        def select(self, requests, candidates, plan):
            self.max_depth = candidates[0].max_depth
            return Selection.of_roots(candidates)

        def observe(self, _, accepted, phases, plan):
            depths.append((plan.depth, self.max_depth, len(accepted)))

    engine = engine_with([request_of(9)], Watching())
    engine.step()
    engine.relieve()
    engine.step()
    engine._num_paused = 0
    engine.step()
    assert depths == [(0, 0, 1), (2, 2, 1)]
