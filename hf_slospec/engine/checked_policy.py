"""Validation of a user's policy: its plans and selections are checked before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan, Policy, PolicyStep, Selection, StepDecisions
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError, InvalidTypeError


def check_tree(source: str, request: Request, tree: TokenTree, vocab_size: int) -> None:
    """Check that a tree is valid for the request.

    Args:
        source: what returned the tree, for the message.
        request: the request of the tree.
        tree: the tree to check.
        vocab_size: size of the target's vocabulary.

    Raises:
        InvalidInputError: it is not.
    """
    if not isinstance(tree, TokenTree):
        raise InvalidInputError(
            f"{source} returned {type(tree).__name__} objects, where hf_slospec.TokenTree was expected"
        )
    integers = tree.tokens, tree.parents, tree.depths
    are_arrays = all(isinstance(column, np.ndarray) for column in (*integers, tree.path_probs))
    if not are_arrays or any(column.dtype.kind not in "iu" for column in integers):
        raise InvalidInputError(
            f"{source} returned a tree that is not made of numpy arrays, integers but for path_probs; use "
            "TokenTree.chain or TokenTree.root_only, or convert its fields to such arrays"
        )
    if (fault := tree.fault()) is not None:
        raise InvalidInputError(f"{source} returned an invalid tree: {fault}; parents must precede their children")
    if int(tree.tokens[0]) != request.tokens[-1]:
        raise InvalidInputError(
            f"{source} returned a tree whose root is not the request's last token: the root is {int(tree.tokens[0])} "
            f"and the last token {request.tokens[-1]}; begin the tree with request.tokens[-1]"
        )
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise InvalidInputError(
            f"{source} proposed a token outside 0 .. {vocab_size - 1}; propose ids of the target's vocabulary"
        )


class CheckedPolicy(Policy):
    """User's policy whose plans and selections are checked."""

    def __init__(self, policy: Policy, max_nodes: int, vocab_size: int):
        """Wrap a policy.

        Args:
            policy: the user's policy; it needs the base class only if it defines ``step``.
            max_nodes: maximum nodes of one request's tree, root not counted.
            vocab_size: size of the target's vocabulary.

        Raises:
            InvalidTypeError: a method is missing.
        """
        has_step = isinstance(policy, Policy) and type(policy).step is not Policy.step
        for name in () if has_step else ("plan", "select", "observe"):
            method = getattr(policy, name, None)
            if not callable(method) or getattr(method, "__func__", None) in (Policy.plan, Policy.select):
                raise InvalidTypeError(
                    f"make_policy must return a policy with a method {name!r}, see hf_slospec.Policy; got "
                    f"{type(policy).__name__}"
                )
        self._step_of_policy = policy.step if has_step else partial(Policy.step, policy)
        self.max_nodes, self.vocab_size = max_nodes, vocab_size

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        decisions = StepDecisions(self._step_of_policy(requests, begun_s, num_prefill_tokens))
        planned = self._checked_plan(requests, decisions.plan())
        candidates, plan = yield planned
        if planned.decoding is not None:
            chosen = set(planned.decoding)
            requests = [request for request in requests if request in chosen]
        accepted, phases = yield self._checked_selection(requests, decisions.select(candidates, plan))
        decisions.observe(accepted, phases)

    def _checked_plan(self, requests: Sequence[Request], plan: Any) -> Plan:
        if not isinstance(plan, Plan):
            raise InvalidInputError(
                f"policy.plan returned {type(plan).__name__}, where hf_slospec.Plan was expected; return "
                "Plan(depth, width), or Plan(0, 1) for plain decoding"
            )
        if not isinstance(plan.depth, Integral) or not isinstance(plan.width, Integral):
            raise InvalidInputError(
                f"policy.plan returned depth {plan.depth!r} and width {plan.width!r}; both must be integers"
            )
        if plan.depth < 0 or plan.width < 1 or plan.depth * plan.width > self.max_nodes:
            raise InvalidInputError(
                f"policy.plan returned depth {plan.depth} and width {plan.width}, but a request has room for "
                f"{self.max_nodes} nodes; raise max_depth or max_width in SLOSpecConfig, or plan less"
            )
        if plan.decoding is not None:
            plan = replace(plan, decoding=list(plan.decoding))
            if not plan.decoding or not set(plan.decoding) <= set(requests):
                raise InvalidInputError(
                    f"policy.plan lets {len(plan.decoding)} requests decode, of which some are not in this step, "
                    "or none; name in Plan.decoding at least one request, and only requests that it was given"
                )
            requests = plan.decoding
        if plan.drafting is None:
            return plan
        drafting = list(plan.drafting)
        if not set(drafting) <= set(requests):
            raise InvalidInputError(
                "policy.plan drafts for requests that do not decode in this step; name in "
                "Plan.drafting only requests that it was given, and that Plan.decoding does not leave out"
            )
        if len(set(drafting)) < len(drafting):
            raise InvalidInputError("policy.plan drafts for a request twice; name each once in Plan.drafting")
        return replace(plan, drafting=drafting)

    def _checked_selection(self, requests: Sequence[Request], selection: Any) -> Selection:
        if not isinstance(selection, Selection):
            raise InvalidInputError(
                f"policy.select returned {type(selection).__name__}, where hf_slospec.Selection was expected; return "
                "Selection(trees, expected), with one tree per request"
            )
        if not len(selection.trees) == len(selection.expected) == len(requests):
            raise InvalidInputError(
                f"policy.select returned {len(selection.trees)} trees and {len(selection.expected)} expectations for "
                f"{len(requests)} requests; return one of each for every request, in their order"
            )
        if not np.isfinite(np.array([*selection.expected, selection.step_s], dtype=np.float64)).all():
            raise InvalidInputError(
                "policy.select returned expected tokens or seconds that are not finite numbers; return finite ones, "
                "and 0.0 as step_s if it is not known"
            )
        for request, tree in zip(requests, selection.trees, strict=True):
            check_tree("policy.select", request, tree, self.vocab_size)
            if tree.num_nodes - 1 > self.max_nodes:
                raise InvalidInputError(
                    f"policy.select returned a tree of {tree.num_nodes - 1} nodes, but a request has room for "
                    f"{self.max_nodes}; raise max_depth or max_width in SLOSpecConfig, or select less"
                )
        return selection
