"""A policy that came from outside: what it decides is checked before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Policy, Selection
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError


def check_tree(whose: str, request: Request, tree: TokenTree, vocab_size: int) -> None:
    """Raises InvalidInputError, which names whose tree it is, unless the request could be verified with it."""
    if not isinstance(tree, TokenTree):
        raise InvalidInputError(f"{whose} returned {type(tree).__name__} objects, where TokenTree was expected")
    whole = tree.tokens, tree.parents, tree.depths
    are_arrays = all(isinstance(column, np.ndarray) for column in (*whole, tree.path_probs))
    if not are_arrays or any(column.dtype.kind not in "iu" for column in whole):
        raise InvalidInputError(
            f"{whose} returned a tree that is not made of numpy arrays, integers but for path_probs"
        )
    if (fault := tree.fault()) is not None:
        raise InvalidInputError(f"{whose} returned a tree with a fault: {fault}")
    if int(tree.tokens[0]) != request.tokens[-1]:
        raise InvalidInputError(f"{whose} returned a tree whose root is not the request's last token")
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise InvalidInputError(f"{whose} proposed a token outside 0 .. {vocab_size - 1}")


class CheckedPolicy:
    """Hands on a user's plans and selections, or says what is wrong with them."""

    def __init__(self, policy: Policy, max_nodes: int, vocab_size: int):
        """``max_nodes``: of one request's tree, its root not counted, that there is room for."""
        self.policy, self.max_nodes, self.vocab_size = policy, max_nodes, vocab_size

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        plan = self.policy.plan(requests, begun_s, num_prefill_tokens)
        if not isinstance(plan, Plan):
            raise InvalidInputError(f"policy.plan returned {type(plan).__name__}, where Plan was expected")
        if not isinstance(plan.depth, Integral) or not isinstance(plan.width, Integral):
            raise InvalidInputError(f"policy.plan asks for depth {plan.depth!r} and width {plan.width!r}, no integers")
        if plan.depth < 0 or plan.width < 1 or plan.depth * plan.width > self.max_nodes:
            raise InvalidInputError(
                f"policy.plan asks for depth {plan.depth} and width {plan.width}, and a request has room for "
                f"{self.max_nodes} nodes; raise max_depth or max_width in SLOSpecConfig, or plan less"
            )
        if plan.drafting is None:
            return plan
        drafting = list(plan.drafting)
        if not set(drafting) <= set(requests):
            raise InvalidInputError("policy.plan drafts for requests that do not decode in this step")
        if len(set(drafting)) < len(drafting):
            raise InvalidInputError("policy.plan drafts for a request twice")
        return replace(plan, drafting=drafting)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        selection = self.policy.select(requests, candidates, plan)
        if not isinstance(selection, Selection):
            raise InvalidInputError(f"policy.select returned {type(selection).__name__}, where Selection was expected")
        if not len(selection.trees) == len(selection.expected) == len(requests):
            raise InvalidInputError(
                f"policy.select returned {len(selection.trees)} trees and {len(selection.expected)} expectations for "
                f"{len(requests)} requests"
            )
        if not np.isfinite(np.array([*selection.expected, selection.step_s], dtype=np.float64)).all():
            raise InvalidInputError("policy.select expects tokens or seconds that are not finite numbers")
        for request, tree in zip(requests, selection.trees, strict=True):
            check_tree("policy.select", request, tree, self.vocab_size)
            if tree.num_nodes - 1 > self.max_nodes:
                count = tree.num_nodes - 1
                raise InvalidInputError(f"policy.select chose {count} nodes, and there is room for {self.max_nodes}")
        return selection

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        self.policy.observe(requests, accepted, phases)
