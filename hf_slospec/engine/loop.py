"""The engine: plan, draft, select, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.accept import accept
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Clock, Drafter, Policy, Target
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

    def step(self) -> list[Request]:
        """One step over all running requests; those without a first token are prefilled first.  -> who committed."""
        prefilling = [request for request in self.running if not request.is_prefilled]
        requests = prefilling or self.running
        trees = self._roots(requests) if prefilling else self._draft_trees(requests)

        choosers = self.target.verify(requests, trees)
        accepted = [accept(t, c, r.emit) for t, c, r in zip(trees, choosers, requests, strict=True)]
        self.target.commit(requests, accepted)
        self.policy.observe(trees, accepted)

        now_s = self.clock()
        for request, tree, nodes in zip(requests, trees, accepted, strict=True):
            request.account(tree.num_nodes - 1, len(nodes), now_s)
        self._retire([request for request in requests if request.is_finished])
        return requests

    def _draft_trees(self, requests: Sequence[Request]) -> Sequence[TokenTree]:
        begun_s = self.clock()
        plan = self.policy.plan(requests, begun_s)
        candidates = self.drafter.draft(requests, plan) if plan.depth else self._roots(requests)
        trees = self.policy.select(requests, candidates, plan, begun_s)
        if self.check_invariants:
            for tree in (*candidates, *trees):
                tree.check()
        return trees

    def _roots(self, requests: Sequence[Request]) -> list[TokenTree]:
        return [TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _retire(self, finished: Sequence[Request]) -> None:
        self.running = [request for request in self.running if request not in finished]
        for request in finished:
            self.target.release(request)
            self.drafter.release(request)
