"""Toy target, drafter, policy and clock behind the engine's protocols; all exact."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Drafter, Plan, Policy, Selection, Target
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.engine.step import Engine
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.tree.tree import ROOT
from tests.support.toys.trees import beam_tree, draw, path_to

Choose = Callable[
    [Request], int
]  # the token plain decoding gives a request after its tokens as they stand

VOCAB = 5
STOP = 4


def new_costs():
    return StepCosts(
        verify=ForwardCost(
            LatencyCurve((1, 2, 4, 8, 16, 32, 64), (1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 6.0)), 0.01, 0.001
        ),
        draft_level=ForwardCost(LatencyCurve((1, 64), (0.05, 0.2))),
    )


def greedy(target):
    return lambda request: int(target(request.tokens).argmax())


def sampled(target, seed):
    """Noise belongs to a row and a position, as in plain decoding with the request's own generator."""

    def choose(request):
        noise = np.random.default_rng((seed, request.index, request.num_emitted)).random()
        return draw(target(request.tokens), noise)

    return choose


def one_hot(token):
    return np.eye(VOCAB)[token]


class ToyTarget(Target):
    """Chooses tokens by an exact model and checks what the engine owes a target."""

    def __init__(self, choose):
        self.choose = choose
        self.steps = []  # request, tree and tokens left before the step
        self.fed = []  # tokens of the chunks of each step
        self.cached = {}
        self.released = []

    def verify(self, requests, trees, chunks=()):
        step = list(zip(requests, trees, (request.num_left for request in requests), strict=True))
        self.steps.append(step)
        self.fed.append(sum(chunk.num_tokens for chunk in chunks))
        assert len({*requests, *(chunk.request for chunk in chunks)}) == len(requests) + len(chunks)
        assert all(request.tokens[-1] == tree.tokens[ROOT] for request, tree, _ in step)
        assert all(0 < chunk.num_tokens < chunk.request.num_uncached for chunk in chunks)
        return [
            functools.partial(self._choose, request, tree, list(request.tokens))
            for request, tree, _ in step
        ]

    def _choose(self, request, tree, before, node):
        assert request.tokens == [*before, *path_to(tree, node)]  # processors see the path
        return self.choose(request)

    def commit(
        self,
        requests,
        accepted,
        chunks=(),
    ):
        trees = {request: tree for request, tree, _ in self.steps[-1]}
        for request, nodes in zip(requests, accepted, strict=True):
            committed = [int(trees[request].tokens[node]) for node in nodes]
            behind = (
                len(request.tokens) - 1 - len(committed)
            )  # tokens up to the root, which was fed
            self.cached[request] = [*request.tokens[:behind], *committed]
            assert self.cached[request] == request.tokens[:-1]  # all but the next root
        for chunk in chunks:
            known = self.cached.setdefault(chunk.request, [])
            known += chunk.request.tokens[len(known) :][: chunk.num_tokens]

    def release(self, request):
        self.released.append(request)
        self.cached.pop(request, None)

    def check(self, requests):
        assert {request for request in requests if request.kv.num_cached} == self.cached.keys()
        assert all(len(known) == request.kv.num_cached for request, known in self.cached.items())


class ToyDrafter(Drafter):
    """Beam search on an exact draft model."""

    def __init__(self, draft):
        self.next_probs = draft
        self.plans = []
        self.released = []

    def draft(self, requests, plan):
        self.plans.append(plan)
        return [
            beam_tree(self.next_probs, request.tokens, plan.depth, plan.width)
            for request in requests
        ]

    def release(self, request):
        self.released.append(request)


class WholeTrees(Policy):
    """Verifies all that was drafted."""

    def __init__(self, plan):
        self.fixed = plan

    def plan(self, requests, begun_s, num_prefill_tokens=0):
        return self.fixed

    def select(self, requests, candidates, plan):
        return Selection(candidates, [float(tree.path_probs.sum()) for tree in candidates])


class NowAndThen(WholeTrees):
    """Drafts whole trees in some stretches of steps, and nothing in others."""

    STRETCH = 6  # steps

    def __init__(self, drafting):
        super().__init__(drafting)
        self._num_steps = 0

    def plan(self, *arguments):
        self._num_steps += 1
        is_drafting = self._num_steps // self.STRETCH % 2
        return super().plan(*arguments) if is_drafting else Plan(0, 1)


class Clock:
    def __init__(self, now_s=0.0, tick_s=0.0):
        self.now_s = now_s
        self.tick_s = tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


def engine_of(requests, target, drafter, policy, clock, check_invariants=True):
    """One that decodes these requests as a batch."""
    costs = new_costs()
    scheduler = ContinuousScheduler.of_call(requests, costs)
    return Engine(target, drafter, policy, scheduler, costs, clock, check_invariants)
