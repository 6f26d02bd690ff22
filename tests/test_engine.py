"""The engine on an exact toy model: lossless, independent requests, honest metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.algo.latency import LatencyCurve, StepCosts
from hf_slospec.algo.select import SLOOrder
from hf_slospec.algo.tree import ROOT, TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.loop import Engine
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import AutoPolicy
from tests.toys import SEEDS, NextProbs, beam_tree, draw, markov_model, path_to

Choose = Callable[[Request], int]  # the token plain decoding gives a request after its tokens as they stand

VOCAB, STOP = 5, 4
COSTS = StepCosts(
    verify=LatencyCurve((1, 2, 4, 8, 16, 32, 64), (1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 6.0)),
    draft_level=LatencyCurve((1, 64), (0.05, 0.2)),
)


def greedy(target: NextProbs) -> Choose:
    return lambda request: int(target(request.tokens).argmax())


def sampled(target: NextProbs, seed: int) -> Choose:
    """Noise belongs to a row and a position, as in plain decoding with the request's own generator."""

    def choose(request: Request) -> int:
        noise = np.random.default_rng((seed, request.index, request.num_emitted)).random()
        return draw(target(request.tokens), noise)

    return choose


def one_hot(token: int) -> np.ndarray:
    return np.eye(VOCAB)[token]


class ToyTarget:
    """Chooses tokens by an exact model and checks what the engine owes a target."""

    def __init__(self, choose: Choose):
        self.choose = choose
        self.steps = list[list[tuple[Request, TokenTree, int]]]()  # request, tree and tokens left before the step
        self.cached: dict[Request, list[int]] = {}
        self.released = list[Request]()

    def verify(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Callable[[int], int]]:
        step = list(zip(requests, trees, (request.num_left for request in requests), strict=True))
        self.steps.append(step)
        assert not set(requests) & set(self.released)
        assert all(request.tokens[-1] == tree.tokens[ROOT] for request, tree, _ in step)
        return [functools.partial(self._choose, request, tree, list(request.tokens)) for request, tree, _ in step]

    def _choose(self, request: Request, tree: TokenTree, before: list[int], node: int) -> int:
        assert request.tokens == [*before, *path_to(tree, node)]  # processors see the path
        return self.choose(request)

    def commit(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]]) -> None:
        for (request, tree, _), nodes in zip(self.steps[-1], accepted, strict=True):
            known = self.cached.get(request, request.tokens[: request.prompt_len - 1])
            self.cached[request] = [*known, *(int(tree.tokens[node]) for node in (ROOT, *nodes))]
            assert self.cached[request] == request.tokens[:-1]  # all but the next root
        assert [request for request, _, _ in self.steps[-1]] == list(requests)

    def release(self, request: Request) -> None:
        self.released.append(request)


class ToyDrafter:
    """Beam search on an exact draft model."""

    def __init__(self, draft: NextProbs):
        self.next_probs = draft
        self.plans = list[Plan]()
        self.released = list[Request]()

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        assert not set(requests) & set(self.released)
        self.plans.append(plan)
        return [beam_tree(self.next_probs, request.tokens, plan.depth, plan.width) for request in requests]

    def release(self, request: Request) -> None:
        self.released.append(request)


class WholeTrees:
    """Verifies all that was drafted."""

    def __init__(self, plan: Plan):
        self.fixed = plan

    def plan(self, requests: Sequence[Request], begun_s: float) -> Plan:
        return self.fixed

    def observe(self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]]) -> None:
        """Nothing to learn."""

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, now_s: float
    ) -> Sequence[TokenTree]:
        return candidates


class Clock:
    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def random_requests(rng: np.random.Generator, num_requests: int, stops: bool = True) -> list[Request]:
    return [
        Request(
            index,
            rng.integers(0, VOCAB, rng.integers(2, 6)).tolist(),
            int(rng.integers(1, 16)),
            target_s=(None, 0.01, 0.8, 10.0)[rng.integers(4)],
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


def run(engine: Engine) -> None:
    while engine.running:
        engine.clock.now_s += 1.0
        engine.step()


@given(
    seed=SEEDS,
    num_requests=st.integers(1, 6),
    is_sampled=st.booleans(),
    likeness=st.sampled_from([0.0, 0.7, 1.0]),
    policy_class=st.sampled_from([AdaServePolicy, AutoPolicy]),
    max_depth=st.integers(0, 5),
    max_width=st.integers(1, 4),
    token_budget=st.none() | st.integers(1, 40),
    order=st.sampled_from(["ascending", "descending"]),
)
@settings(deadline=None, max_examples=200)
def test_every_request_gets_what_plain_decoding_gives(
    seed: int,
    num_requests: int,
    is_sampled: bool,
    likeness: float,
    policy_class: type[AdaServePolicy],
    max_depth: int,
    max_width: int,
    token_budget: int | None,
    order: SLOOrder,
) -> None:
    rng = np.random.default_rng(seed)
    target, other = markov_model(rng, VOCAB), markov_model(rng, VOCAB)
    choose = sampled(target, seed) if is_sampled else greedy(target)
    requests = random_requests(rng, num_requests)
    expected = [decode_plainly(choose, request) for request in requests]

    config = SLOSpecConfig(max_depth=max_depth, max_width=max_width, token_budget=token_budget, slo_order=order)
    policy = policy_class(config, COSTS)
    toy = ToyTarget(choose)
    drafter = ToyDrafter(lambda tokens: likeness * target(tokens) + (1.0 - likeness) * other(tokens))
    run(Engine(toy, drafter, policy, Clock(), requests, check_invariants=True))

    assert [request.tokens for request in requests] == expected
    assert sorted(r.index for r in toy.released) == sorted(r.index for r in drafter.released) == [*range(num_requests)]
    for step in toy.steps:
        assert sum(tree.num_nodes for _, tree, _ in step) <= max(policy.budget, len(step))
        assert all(tree.max_depth < num_left for _, tree, num_left in step)  # deeper nodes could not be committed
    for request in requests:
        metrics, own = request.metrics(), [tree for step in toy.steps for r, tree, _ in step if r is request]
        assert metrics.tokens == len(request.tokens) - request.prompt_len
        assert metrics.tokens == 1 + metrics.steps + metrics.accepted  # also when the request stops inside a walk
        assert metrics.steps == len(own) - 1  # the prefill is no step
        assert metrics.drafted == sum(tree.num_nodes - 1 for tree in own) >= metrics.accepted


def test_requests_are_prefilled_first_and_alone() -> None:
    rng = np.random.default_rng(0)
    target = markov_model(rng, VOCAB)
    first, second, late = (Request(index, [0, 1], 9) for index in range(3))
    toy, drafter = ToyTarget(greedy(target)), ToyDrafter(target)
    engine = Engine(toy, drafter, WholeTrees(Plan(1, 1)), Clock(), [first, second])
    assert engine.step() == [first, second]
    assert engine.step() == [first, second]
    engine.running.append(late)
    assert engine.step() == [late]
    assert engine.step() == [first, second, late]
    sizes = [[tree.num_nodes for _, tree, _ in step] for step in toy.steps]
    assert sizes == [[1, 1], [2, 2], [1], [2, 2, 2]]
    assert len(drafter.plans) == 2
    assert late.num_steps == 1


@pytest.mark.parametrize("policy_class", [AdaServePolicy, AutoPolicy])
def test_depth_0_never_drafts(policy_class: type[AdaServePolicy]) -> None:
    target = markov_model(np.random.default_rng(1), VOCAB)
    requests = [Request(index, [0, 1], 6) for index in range(3)]
    drafter = ToyDrafter(target)
    toy = ToyTarget(greedy(target))
    run(Engine(toy, drafter, policy_class(SLOSpecConfig(max_depth=0), COSTS), Clock(), requests))
    assert drafter.plans == []
    assert len(toy.steps) == 6
    assert [request.metrics().acceptance_length for request in requests] == [1.0] * 3


def test_last_token_is_decoded_without_drafting() -> None:
    target = markov_model(np.random.default_rng(1), VOCAB)
    drafter = ToyDrafter(target)
    request = Request(0, [0, 1], 2)
    run(Engine(ToyTarget(greedy(target)), drafter, AdaServePolicy(SLOSpecConfig(), COSTS), Clock(), [request]))
    assert drafter.plans == []
    assert request.num_emitted == 2


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_draft_that_is_always_right_commits_whole_chains(depth: int) -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmax()))
    request = Request(0, [0, 1], 1 + 3 * (depth + 1))
    run(Engine(ToyTarget(greedy(target)), drafter, WholeTrees(Plan(depth, 1)), Clock(), [request]))
    metrics = request.metrics()
    assert (metrics.steps, metrics.drafted, metrics.accepted) == (3, 3 * depth, 3 * depth)
    assert metrics.acceptance_length == depth + 1


def test_a_draft_that_is_always_wrong_costs_no_token() -> None:
    target = markov_model(np.random.default_rng(2), VOCAB)
    drafter = ToyDrafter(lambda tokens: one_hot(target(tokens).argmin()))
    request = Request(0, [0, 1], 10)
    run(Engine(ToyTarget(greedy(target)), drafter, WholeTrees(Plan(3, 1)), Clock(), [request]))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.drafted, metrics.accepted) == (10, 9, 27, 0)


def test_finished_requests_leave_and_the_others_go_on() -> None:
    target = markov_model(np.random.default_rng(3), VOCAB)
    requests = [Request(index, [0, 1], max_new_tokens) for index, max_new_tokens in enumerate((1, 8, 3))]
    toy, drafter = ToyTarget(greedy(target)), ToyDrafter(target)
    run(Engine(toy, drafter, WholeTrees(Plan(0, 1)), Clock(), requests))
    assert [[request.index for request, _, _ in step] for step in toy.steps] == [[0, 1, 2], *[[1, 2]] * 2, *[[1]] * 5]
    assert [request.index for request in toy.released] == [request.index for request in drafter.released] == [0, 2, 1]


def test_a_stop_inside_the_walk_ends_the_request_there() -> None:
    chain = {0: 1, 1: 2, 2: 3, 3: 0}
    request = Request(0, [0, 0], 20, is_stop=lambda tokens: tokens[-3:] == [1, 2, 3])
    toy = ToyTarget(lambda request: chain[request.tokens[-1]])
    drafter = ToyDrafter(lambda tokens: one_hot(chain[tokens[-1]]))
    run(Engine(toy, drafter, WholeTrees(Plan(4, 1)), Clock(), [request]))
    assert request.tokens == [0, 0, 1, 2, 3]
    assert (request.num_steps, request.num_drafted, request.num_accepted) == (1, 4, 1)


def test_times_are_taken_when_tokens_are_committed() -> None:
    target = markov_model(np.random.default_rng(4), VOCAB)
    requests = [Request(0, [0, 1], 5, target_s=0.5, arrived_s=10.0), Request(1, [1, 0], 5, target_s=0.6)]
    clock = Clock()
    engine = Engine(ToyTarget(greedy(target)), ToyDrafter(target), WholeTrees(Plan(0, 1)), clock, requests)
    for now_s in (12.0, 12.25, 13.0, 13.5, 14.25):
        clock.now_s = now_s
        engine.step()
    first, second = (request.metrics() for request in requests)
    assert (first.ttft_s, second.ttft_s) == (2.0, 12.0)
    assert first.tpot_s == second.tpot_s == (14.25 - 12.0) / 4
    assert (first.attained, second.attained) == (False, True)
    assert requests[0].elapsed_s(15.0) == 3.0


def test_a_request_of_one_token_has_no_tpot_and_is_not_late() -> None:
    target = markov_model(np.random.default_rng(4), VOCAB)
    request = Request(0, [0, 1], 1, target_s=1e-9)
    run(Engine(ToyTarget(greedy(target)), ToyDrafter(target), WholeTrees(Plan(2, 2)), Clock(), [request]))
    metrics = request.metrics()
    assert (metrics.tokens, metrics.steps, metrics.tpot_s, metrics.acceptance_length) == (1, 0, None, None)
    assert metrics.attained is True


def test_broken_trees_are_caught_when_invariants_are_checked() -> None:
    target = markov_model(np.random.default_rng(5), VOCAB)
    drafter = ToyDrafter(lambda tokens: 1.5 * one_hot(0))
    engine = Engine(ToyTarget(greedy(target)), drafter, WholeTrees(Plan(2, 1)), Clock(), [Request(0, [0, 1], 9)], True)
    engine.step()
    with pytest.raises(AssertionError):
        engine.step()


def test_late_requests_get_their_nodes_first() -> None:
    """Both draft the same tree and ties favour the first; the second one is behind its target."""
    target = markov_model(np.random.default_rng(6), VOCAB)
    toy, clock = ToyTarget(greedy(target)), Clock()
    relaxed, late = Request(0, [0, 1], 30), Request(1, [0, 1], 30, target_s=1.0)
    policy = AdaServePolicy(SLOSpecConfig(token_budget=4, max_slo_share=9.0), COSTS)
    engine = Engine(toy, ToyDrafter(target), policy, clock, [relaxed, late])
    engine.step()
    engine.step()
    assert [tree.num_nodes for _, tree, _ in toy.steps[-1]] == [2, 2]
    clock.now_s = 1000.0
    engine.step()
    assert [tree.num_nodes for _, tree, _ in toy.steps[-1]] == [1, 3]


@pytest.mark.parametrize(("required", "sizes"), [(0.95, [2, 1]), (1.05, [1, 2])])
def test_required_tokens_count_from_the_first_token_to_the_end_of_the_step(required: float, sizes: list[int]) -> None:
    """Ties and the one node to give favour the first request, unless the second needs more than its root."""
    model = markov_model(np.random.default_rng(6), VOCAB)
    plan, requests = Plan(1, 2), [Request(0, [0, 1], 30), Request(1, [0, 1], 30, target_s=1.0, first_token_s=100.0)]
    requests[1].tokens += [2, 3, 2, 0, 1]  # four tokens after the first
    step_s = COSTS.draft_s(2, plan.depth, plan.width) + float(COSTS.verify(3))
    now_s = 100.0 + (4.0 + required) - step_s
    policy = AdaServePolicy(SLOSpecConfig(token_budget=3), COSTS)
    trees = policy.select(requests, ToyDrafter(model).draft(requests, plan), plan, now_s)
    assert [tree.num_nodes for tree in trees] == sizes
