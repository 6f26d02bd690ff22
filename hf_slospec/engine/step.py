"""``Engine``, whose step is: schedule, plan, draft, select, verify, accept, commit. The model part
of verify and commit is in ``model/target.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, TypeVar

from hf_slospec.engine.checks import NO_CHECKS, Checks, check_drafts, check_plan, check_selection
from hf_slospec.engine.costs import StepCosts, level_share
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.grammar import followed
from hf_slospec.engine.interfaces import (
    Chooser,
    Clock,
    Drafter,
    Plan,
    Policy,
    Schedule,
    Scheduler,
    Selection,
    Target,
)
from hf_slospec.request.request import Request
from hf_slospec.tree.accept import accept
from hf_slospec.tree.tree import TokenTree

S = TypeVar("S", bound=Scheduler)

PAUSE = 64  # steps without drafting after memory ran out; see Engine.relieve


class Engine(Generic[S]):
    """Decodes requests together, one step at a time, until every request has finished."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: Policy,
        scheduler: S,
        costs: StepCosts,
        clock: Clock,
        check_invariants: bool = False,
        shared: Callable[[], AbstractContextManager[Any]] = nullcontext,
        checks: Checks = NO_CHECKS,
    ):
        """Make an engine of its parts.

        Args:
            target, drafter, policy, scheduler, costs: see ``engine/interfaces.py`` and
                ``engine/costs.py``.
            clock: returns monotonic seconds.
            check_invariants: check trees and K/V slots in every step, for tests.
            shared: returns a context manager in which other engines may use the models.
            checks: which results of a user's policy and drafter are checked.
        """
        self.shared = shared
        self.checks = checks
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.scheduler = scheduler
        self.costs = costs
        self.clock = clock
        self.check_invariants = check_invariants
        self._num_paused = 0  # number of next steps that do not draft

    def step(self) -> StepEvent:
        """Run one step of the requests that the scheduler chooses.

        An error in a request's logits processors or stopping criteria ends that request only. A
        MemoryError of the models is raised only before tokens are chosen. After that, chosen tokens
        stay, since processors and criteria have seen them, and K/V that could not be kept is
        recomputed.
        """
        watch = _Stopwatch(self.clock)
        num_one_offs = self._num_one_offs()
        self.costs.follow(self.target.path)
        self.forget(self.scheduler.enter(watch.begun_s))
        self._reuse()
        schedule = self.scheduler.schedule(watch.begun_s)
        planned = self._plan(schedule, watch.begun_s)
        schedule = _taking_part(schedule, planned)
        plan = self._in_force(planned, schedule, watch)
        drafting = _drafting(schedule, plan)
        candidates, num_catch_up = self._draft(schedule, drafting, plan, watch)
        selection = self._select(schedule, candidates, plan, watch)
        self._check((*candidates, *selection.trees))
        choosers = self.target.verify(schedule.choosing, selection.trees, schedule.partial_chunks)
        watch.lap("verify_s")
        num_emitted = [request.num_emitted for request in schedule.choosing]
        num_keys = schedule.num_keys
        accepted = self._accept(schedule, selection, choosers)
        self._commit(schedule, accepted, watch)
        requests = self._record(schedule, selection, accepted, num_emitted, watch.phases)
        max_depths = [tree.max_depth for tree in candidates]
        event = StepEvent(
            begun_s=watch.begun_s,
            num_decoding=len(schedule.decoding),
            depth=plan.depth,
            width=plan.width,
            phases=watch.phases,
            predicted_s=selection.step_s,
            requests=requests,
            prefill_tokens=schedule.num_prefill_tokens,
            num_keys=num_keys,
            num_drafted_for=len(drafting),
            num_catch_up=num_catch_up,
            draft_levels=max(max_depths, default=0),
            level_share=level_share(max_depths, len(drafting)),
        )
        # Of a step with one-off costs, such as graph captures, the predicted times are learned, as
        # the measured ones do not predict later steps.
        is_typical = self._num_one_offs() == num_one_offs
        learned = event if is_typical else replace(event, phases=self.costs.predicted(event))
        # A MemoryError here must not prevent that finished requests are removed below.
        with contextlib.suppress(MemoryError):
            self.costs.observe(learned, is_typical)
            if decoding := schedule.decoding:
                self.policy.observe(decoding, accepted[: len(decoding)], learned.phases, plan)
            self.scheduler.observe(learned)
        self.retire([request for request in schedule.choosing if request.is_finished])
        self._check(())
        return event

    def _reuse(self) -> None:
        """Let running requests without computed K/V use the cached K/V of common prefixes."""
        for request in self.scheduler.running:
            has_only_reused = (
                not request.num_emitted and request.kv.num_cached == request.kv.num_reused
            )
            if not request.kv.num_cached or has_only_reused:
                request.kv.num_cached = self.target.reuse(request)
                if not request.num_emitted and not request.stats.num_preempted:
                    request.kv.num_reused = request.kv.num_cached
                request.kv.num_draft_seen = self.drafter.reuse(request)

    def _plan(self, schedule: Schedule, begun_s: float) -> Plan:
        if not schedule.decoding:
            return Plan(0, 1)
        plan = self.policy.plan(schedule.decoding, begun_s, schedule.num_prefill_tokens)
        if self.checks.has_user_policy:
            plan = check_plan(plan, schedule.decoding, self.checks.max_nodes)
        return plan

    def _in_force(self, plan: Plan, schedule: Schedule, watch: _Stopwatch) -> Plan:
        """Return the policy's plan, changed so that paused drafting is left out and requests that
        must not draft are not drafted for.
        """
        if schedule.decoding and self._num_paused:
            self._num_paused -= 1
            plan = replace(plan, depth=0, drafting=())
        elif plan.depth and not all(request.params.may_draft for request in schedule.decoding):
            plan = replace(
                plan, drafting=[each for each in _drafting(schedule, plan) if each.params.may_draft]
            )
        watch.lap("select_s")
        return plan

    def _draft(
        self, schedule: Schedule, drafting: Sequence[Request], plan: Plan, watch: _Stopwatch
    ) -> tuple[Sequence[TokenTree], int]:
        """Return one candidate tree per decoding request, and the number of committed tokens that
        the drafter processed for the first time.
        """
        found = self.drafter.draft(drafting, plan) if drafting else []
        if self.checks.has_user_drafter:
            found = check_drafts(found, drafting, plan, self.checks.vocab_size)
        drafted = dict(zip(drafting, found, strict=True))
        num_catch_up = sum(request.num_draft_behind for request in drafting)
        for request, tree in drafted.items():
            # A tree without drafts may mean that the drafter has not yet processed the prompt.
            if tree.max_depth:
                request.kv.num_draft_seen = len(request.tokens)
        drafted = followed(drafted, plan)
        watch.lap("draft_s")
        trees = [
            drafted.get(request) or TokenTree.root_only(request.tokens[-1])
            for request in schedule.decoding
        ]
        return trees, num_catch_up

    def _select(
        self,
        schedule: Schedule,
        candidates: Sequence[TokenTree],
        plan: Plan,
        watch: _Stopwatch,
    ) -> Selection:
        """Return the policy's selection, to which the roots of the requests whose prefill ends are
        appended.
        """
        selection = Selection((), ())
        if schedule.decoding:
            selection = self.policy.select(schedule.decoding, candidates, plan)
            if self.checks.has_user_policy:
                check_selection(selection, schedule.decoding, self.checks)
        selection = selection.with_roots(schedule.finishing_prefill)
        watch.lap("select_s")
        return selection

    def _accept(
        self, schedule: Schedule, selection: Selection, choosers: Sequence[Chooser]
    ) -> list[Sequence[int]]:
        rows = zip(schedule.choosing, selection.trees, choosers, strict=True)
        has_callbacks = any(request.params.has_callbacks for request in schedule.choosing)
        with self.shared() if has_callbacks else nullcontext():
            return [_accepted(request, tree, choose) for request, tree, choose in rows]

    def _commit(
        self, schedule: Schedule, accepted: Sequence[Sequence[int]], watch: _Stopwatch
    ) -> None:
        pairs = zip(schedule.choosing, accepted, strict=True)
        committed = {request: nodes for request, nodes in pairs if request.error is None}
        try:
            self.target.commit(list(committed), list(committed.values()), schedule.partial_chunks)
        except MemoryError:
            # The requests keep their K/V from before the step, and prefill their new tokens next.
            self.relieve()
        else:
            for request in committed:
                request.kv.num_cached = len(request.tokens) - 1
            for chunk in schedule.partial_chunks:
                chunk.request.kv.num_cached += chunk.num_tokens
        watch.lap("host_s")

    def _record(
        self,
        schedule: Schedule,
        selection: Selection,
        accepted: Sequence[Sequence[int]],
        num_emitted: Sequence[int],
        phases: PhaseTimes,
    ) -> tuple[RequestStep, ...]:
        """Record the step in the statistics of its requests.

        Args:
            num_emitted: number of tokens that each request had emitted before the step.
        """
        now_s = self.clock()
        parts = []
        for request, tree, nodes, expected, before in zip(
            schedule.choosing,
            selection.trees,
            accepted,
            selection.expected,
            num_emitted,
            strict=True,
        ):
            # Read before record_step(), which may begin the next stage.
            tpot_slo_s = request.stage.tpot_slo_s
            elapsed_s, emitted = request.decoded(now_s)
            if request.num_emitted:  # 0 if the request failed before its first token
                request.record_step(tree.num_nodes - 1, len(nodes), expected, phases, now_s)
            committed = request.num_emitted - before
            parts.append(
                RequestStep(
                    request.index,
                    tree.num_nodes,
                    committed,
                    expected,
                    tpot_slo_s,
                    elapsed_s,
                    emitted,
                )
            )
        return tuple(parts)

    def _num_one_offs(self) -> int:
        return self.target.num_one_off_forwards + self.drafter.num_one_off_forwards

    def retire(self, finished: Sequence[Request]) -> None:
        """Remove finished requests from the scheduler and free their K/V."""
        for request in finished:
            self.scheduler.remove(request)
        self.forget(finished)

    def forget(self, requests: Sequence[Request]) -> None:
        """Free the K/V of requests in target and drafter; their tokens stay."""
        for request in requests:
            self.target.release(request)
            self.drafter.release(request)
            request.kv.num_cached = request.kv.num_draft_seen = 0

    def relieve(self) -> bool:
        """Free the drafter's memory after a MemoryError, and pause drafting; outputs do not change.

        Pausing helps since running requests always have K/V slots for their tokens, but not always
        for draft trees.

        Returns:
            True if memory was freed or drafting was not paused yet, so that the caller should try
            the step again.
        """
        if self.drafter.relieve():
            for request in self.scheduler.running:
                request.kv.num_draft_seen = 0
        elif self._num_paused:
            return False
        self._num_paused = PAUSE
        return True

    def close(self) -> None:
        """Free all state of this engine in target and drafter."""
        self.target.close()
        self.drafter.close()

    def _check(self, trees: Sequence[TokenTree]) -> None:
        if self.check_invariants:
            for tree in trees:
                tree.check()
            self.target.check(self.scheduler.running)


def _taking_part(schedule: Schedule, plan: Plan) -> Schedule:
    """Return the schedule without the decoding requests that the plan leaves out of this step."""
    if plan.decoding is None:
        return schedule
    chosen = set(plan.decoding)
    return replace(
        schedule, decoding=[request for request in schedule.decoding if request in chosen]
    )


def _drafting(schedule: Schedule, plan: Plan) -> Sequence[Request]:
    """Return the decoding requests for which the drafter is called."""
    if not plan.depth:
        return ()
    return schedule.decoding if plan.drafting is None else plan.drafting


def _accepted(request: Request, tree: TokenTree, choose: Chooser) -> list[int]:
    def emit(token: int) -> int | None:
        return None if request.emit(token) else request.tokens[-1]

    try:
        return accept(tree, choose, emit)
    except BaseException as error:  # noqa: BLE001  an error of a request's processors or criteria ends that request
        request.end(error)
        return []


class _Stopwatch:
    """Measures the seconds of each phase of a step."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.phases = PhaseTimes()
        self.begun_s = self._last_s = clock()

    def lap(self, phase: str) -> None:
        """Add the seconds since the previous call (or the step's beginning) to a phase."""
        now_s = self._clock()
        self.phases += PhaseTimes(**{phase: now_s - self._last_s})
        self._last_s = now_s
