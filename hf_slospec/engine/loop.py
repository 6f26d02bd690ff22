"""The engine: plan, draft, select, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.accept import accept
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.protocols import Clock, Drafter, Plan, Policy, Selection, Target
from hf_slospec.engine.request import Request


class Engine:
    """Decodes a set of requests together, one step at a time, until each has finished on its own terms."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: Policy,
        clock: Clock,
        requests: Sequence[Request],
        check_invariants: bool = False,
    ):
        self.target, self.drafter, self.policy, self.clock = target, drafter, policy, clock
        self.running = list(requests)
        self.check_invariants = check_invariants

    def step(self) -> StepEvent:
        """One step over all running requests; those without a first token are prefilled first."""
        prefilling = [request for request in self.running if not request.is_prefilled]
        requests = prefilling or self.running
        watch = _Stopwatch(self.clock)

        plan = Plan(0, 1) if prefilling else self.policy.plan(requests, watch.begun_s)
        select_s = watch.lap()
        candidates = self.drafter.draft(requests, plan) if plan.depth else roots(requests)
        draft_s = watch.lap()
        is_planned = not prefilling
        selection = self.policy.select(requests, candidates, plan) if is_planned else Selection.of_roots(candidates)
        self._check(candidates, selection.trees)
        select_s += watch.lap()
        choosers = self.target.verify(requests, selection.trees)
        verify_s = watch.lap()

        before = [request.num_emitted for request in requests]
        accepted = [accept(t, c, r.emit) for t, c, r in zip(selection.trees, choosers, requests, strict=True)]
        self.target.commit(requests, accepted)
        phases = PhaseTimes(draft_s, select_s, verify_s, watch.lap())
        if is_planned:
            self.policy.observe(requests, accepted, phases)
        event = self._booked(requests, before, plan, selection, accepted, phases, watch.begun_s)
        self._retire([request for request in requests if request.is_finished])
        return event

    def _booked(
        self,
        requests: Sequence[Request],
        before: Sequence[int],
        plan: Plan,
        selection: Selection,
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        begun_s: float,
    ) -> StepEvent:
        """Book the step on its requests, and describe it."""
        now_s, parts = self.clock(), []
        is_prefill = before[0] == 0
        for request, old, tree, nodes, expected in zip(
            requests, before, selection.trees, accepted, selection.expected, strict=True
        ):
            target_s, (elapsed_s, emitted) = request.target_s, request.decoded(now_s)  # a stage may end here
            request.account(tree.num_nodes - 1, len(nodes), expected, phases, now_s)
            committed = request.num_emitted - old
            parts.append(RequestStep(request.index, tree.num_nodes, committed, expected, target_s, elapsed_s, emitted))
        return StepEvent(begun_s, is_prefill, plan.depth, plan.width, phases, selection.step_s, tuple(parts))

    def _check(self, candidates: Sequence[TokenTree], trees: Sequence[TokenTree]) -> None:
        if self.check_invariants:
            for tree in (*candidates, *trees):
                tree.check()

    def _retire(self, finished: Sequence[Request]) -> None:
        self.running = [request for request in self.running if request not in finished]
        for request in finished:
            self.target.release(request)
            self.drafter.release(request)


def roots(requests: Sequence[Request]) -> list[TokenTree]:
    return [TokenTree.root_only(request.tokens[-1]) for request in requests]


class _Stopwatch:
    def __init__(self, clock: Clock):
        self.clock = clock
        self.begun_s = self.last_s = clock()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last_s, self.last_s = self.last_s, self.clock()
        return self.last_s - last_s
