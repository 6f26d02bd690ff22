"""Validation of a user's policy: its decisions are checked before they are carried out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Policy, Selection
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError, InvalidTypeError


def check_tree(source: str, request: Request, tree: TokenTree, vocab_size: int) -> None:
    """Check that the request can be verified with the tree.

    Args:
        source: name of what returned the tree, for the message.
        request: the request that the tree is for.
        tree: the tree to check.
        vocab_size: bound of the token ids.

    Raises:
        InvalidInputError: it cannot.
    """
    if not isinstance(tree, TokenTree):
        raise InvalidInputError(f"{source} returned {type(tree).__name__} objects, where TokenTree was expected")
    whole = tree.tokens, tree.parents, tree.depths
    are_arrays = all(isinstance(column, np.ndarray) for column in (*whole, tree.path_probs))
    if not are_arrays or any(column.dtype.kind not in "iu" for column in whole):
        raise InvalidInputError(
            f"{source} returned a tree that is not made of numpy arrays, integers but for path_probs"
        )
    if (fault := tree.fault()) is not None:
        raise InvalidInputError(f"{source} returned an invalid tree: {fault}")
    if int(tree.tokens[0]) != request.tokens[-1]:
        raise InvalidInputError(
            f"{source} returned a tree whose root is not the request's last token: the root is {int(tree.tokens[0])} "
            f"and the last token {request.tokens[-1]}"
        )
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise InvalidInputError(f"{source} proposed a token outside 0 .. {vocab_size - 1}")


class CheckedPolicy:
    """User's policy whose plans and selections are checked."""

    def __init__(self, policy: Policy, max_nodes: int, vocab_size: int):
        """Wrap a policy.

        Args:
            policy: the user's; its ``observe`` may leave out the last parameter, ``plan``.
            max_nodes: maximum nodes of one request's tree, root not counted.
            vocab_size: bound of the token ids.

        Raises:
            InvalidTypeError: it lacks a method.
        """
        for name in ("plan", "select", "observe"):
            if not callable(getattr(policy, name, None)):
                raise InvalidTypeError(
                    f"make_policy must return a policy with a method {name!r}, see hf_slospec.Policy; got "
                    f"{type(policy).__name__}"
                )
        self.policy, self.max_nodes, self.vocab_size = policy, max_nodes, vocab_size
        self._observes_plan = _takes(policy.observe, 4)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        plan = self.policy.plan(requests, begun_s, num_prefill_tokens)
        if not isinstance(plan, Plan):
            raise InvalidInputError(f"policy.plan returned {type(plan).__name__}, where Plan was expected")
        if not isinstance(plan.depth, Integral) or not isinstance(plan.width, Integral):
            raise InvalidInputError(
                f"policy.plan returned depth {plan.depth!r} and width {plan.width!r}; both must be integers"
            )
        if plan.depth < 0 or plan.width < 1 or plan.depth * plan.width > self.max_nodes:
            raise InvalidInputError(
                f"policy.plan returned depth {plan.depth} and width {plan.width}, but a request has room for "
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
            raise InvalidInputError("policy.select returned expected tokens or seconds that are not finite numbers")
        for request, tree in zip(requests, selection.trees, strict=True):
            check_tree("policy.select", request, tree, self.vocab_size)
            if tree.num_nodes - 1 > self.max_nodes:
                raise InvalidInputError(
                    f"policy.select returned a tree of {tree.num_nodes - 1} nodes, but a request has room for "
                    f"{self.max_nodes}; raise max_depth or max_width in SLOSpecConfig, or select less"
                )
        return selection

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        observe: Callable[..., None] = self.policy.observe
        observe(requests, accepted, phases, *([plan] if self._observes_plan else []))


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Return whether the function can be called with this many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True
