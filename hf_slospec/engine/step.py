"""The engine: whose turn it is, plan, draft, select, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.accept import accept
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.protocols import Chooser, Clock, Drafter, Plan, Policy, Scheduler, Selection, Target, Schedule
from hf_slospec.engine.request import Request


class Engine:
    """Decodes requests together, one step at a time, until each has finished on its own terms."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: Policy,
        scheduler: Scheduler,
        clock: Clock,
        check_invariants: bool = False,
    ):
        self.target, self.drafter, self.policy, self.scheduler = target, drafter, policy, scheduler
        self.clock, self.check_invariants = clock, check_invariants

    def step(self) -> StepEvent:
        """One step of the requests whose turn it is.

        What a request's own processors or criteria raise fails that request only. A MemoryError of the models passes,
        and then no token has been committed.
        """
        watch = _Stopwatch(self.clock)
        schedule = self.scheduler.schedule(watch.begun_s)
        self.forget(schedule.preempted)
        plan = (
            self.policy.plan(schedule.decoding, watch.begun_s, schedule.num_prefill_tokens)
            if schedule.decoding
            else Plan(0, 1)
        )
        select_s = watch.lap()
        candidates = self._candidates(schedule.decoding, plan)
        draft_s = watch.lap()
        selection = (
            self.policy.select(schedule.decoding, candidates, plan) if schedule.decoding else Selection.of_roots([])
        )
        selection = selection.with_roots(roots(schedule.finishing_prefill))
        select_s += watch.lap()
        requests, trees = [*schedule.decoding, *schedule.finishing_prefill], selection.trees
        self._check((*candidates, *trees))
        choosers = self.target.verify(requests, trees, schedule.partial_chunks)
        verify_s = watch.lap()

        emitted = [request.num_emitted for request in requests]
        accepted = [_accepted(*part) for part in zip(requests, trees, choosers, strict=True)]
        self._commit(requests, accepted, schedule)
        phases = PhaseTimes(draft_s, select_s, verify_s, watch.lap())
        if schedule.decoding:
            self.policy.observe(schedule.decoding, accepted[: len(schedule.decoding)], phases, plan)
        event = self._booked(schedule, requests, emitted, plan, selection, accepted, phases, watch.begun_s)
        self.scheduler.observe(event)
        self.retire([request for request in requests if request.is_finished])
        self._check(())
        return event

    def _candidates(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """What is drafted; of those who are not drafted for, roots."""
        drafting = requests if plan.drafting is None else plan.drafting
        if not plan.depth or not drafting:
            return roots(requests)
        drafted = dict(zip(drafting, self.drafter.draft(drafting, plan), strict=True))
        return [drafted.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _commit(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], schedule: Schedule) -> None:
        sound = [(request, nodes) for request, nodes in zip(requests, accepted, strict=True) if request.error is None]
        self.target.commit([request for request, _ in sound], [nodes for _, nodes in sound], schedule.partial_chunks)
        for request, _ in sound:
            request.num_cached = len(request.tokens) - 1
        for chunk in schedule.partial_chunks:
            chunk.request.num_cached += chunk.num_tokens

    def _booked(
        self,
        schedule: Schedule,
        requests: Sequence[Request],
        emitted: Sequence[int],
        plan: Plan,
        selection: Selection,
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        begun_s: float,
    ) -> StepEvent:
        """Book the step on its requests, and describe it."""
        now_s, parts = self.clock(), []
        for request, old, tree, nodes, expected in zip(
            requests, emitted, selection.trees, accepted, selection.expected, strict=True
        ):
            tpot_slo_s, (elapsed_s, since) = request.tpot_slo_s, request.decoded(now_s)  # a stage may end here
            if request.num_emitted:  # else it failed before its first token
                request.account(tree.num_nodes - 1, len(nodes), expected, phases, now_s)
            committed = request.num_emitted - old
            parts.append(RequestStep(request.index, tree.num_nodes, committed, expected, tpot_slo_s, elapsed_s, since))
        return StepEvent(
            begun_s=begun_s,
            num_decoding=len(schedule.decoding),
            depth=plan.depth,
            width=plan.width,
            phases=phases,
            predicted_s=selection.step_s,
            requests=tuple(parts),
            prefill_tokens=schedule.num_prefill_tokens,
        )

    def retire(self, finished: Sequence[Request]) -> None:
        """Requests are finished, for whatever reason."""
        for request in finished:
            self.scheduler.remove(request)
        self.forget(finished)

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what models hold of requests; their tokens stay."""
        for request in requests:
            self.target.release(request)
            self.drafter.release(request)
            request.num_cached = 0

    def _check(self, trees: Sequence[TokenTree]) -> None:
        if self.check_invariants:
            for tree in trees:
                tree.check()
            self.target.check(self.scheduler.running)


def roots(requests: Sequence[Request]) -> list[TokenTree]:
    return [TokenTree.root_only(request.tokens[-1]) for request in requests]


def _accepted(request: Request, tree: TokenTree, choose: Chooser) -> list[int]:
    try:
        return accept(tree, choose, request.emit)
    except BaseException as error:  # noqa: BLE001  whatever the request's own processors and criteria raise is theirs
        request.end(error)
        return []


class _Stopwatch:
    def __init__(self, clock: Clock):
        self.clock = clock
        self.begun_s = self.last_s = clock()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last_s, self.last_s = self.last_s, self.clock()
        return self.last_s - last_s
