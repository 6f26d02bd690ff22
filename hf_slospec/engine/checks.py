"""Checks of what a user's policy and drafter return in a step, and ``UserPolicy``, which calls a
user's policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Policy, Selection
from hf_slospec.errors import InvalidInputError, InvalidTypeError
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree


class Checks(NamedTuple):
    """Which results of user code an engine checks, and their limits."""

    max_nodes: int = 0  # maximum number of nodes of one request's tree, root excluded
    vocab_size: int = 0  # the target's; larger token ids are refused
    has_user_policy: bool = False  # check plans and selections
    has_user_drafter: bool = False  # check candidate trees


NO_CHECKS = Checks()


class UserPolicy(Policy):
    """Calls a user's policy, which may have one of two forms.

    Either the policy defines ``plan``, ``select`` and ``observe``, where ``observe`` may leave out
    the parameter ``plan``. Or it is a subclass of :class:`Policy` with a single generator ``step``:
    it gets the arguments of ``plan``, yields the plan, is sent ``(candidates, plan)``, yields the
    selection, and is sent ``(accepted, phases)``.

    Raises:
        InvalidTypeError: a method is missing.
    """

    def __init__(self, policy: Any):
        is_subclass = isinstance(policy, Policy)
        self.falls_back = is_subclass and policy.falls_back
        self._policy = policy
        self._is_generator = is_subclass and hasattr(policy, "step")
        if self._is_generator:
            return
        for name in ("plan", "select", "observe"):
            method = getattr(policy, name, None)
            is_abstract = getattr(method, "__func__", None) in (Policy.plan, Policy.select)
            if not callable(method) or is_abstract:
                raise InvalidTypeError(
                    f"make_policy must return a policy with a method {name!r}, see "
                    f"hf_slospec.Policy; got {type(policy).__name__}"
                )
        try:
            inspect.signature(policy.observe).bind(None, None, None, None)
            self._takes_plan = True
        except TypeError:
            self._takes_plan = False

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Any:
        if self._is_generator:
            self._step = self._policy.step(requests, begun_s, num_prefill_tokens)
            return next(self._step, None)
        return self._policy.plan(requests, begun_s, num_prefill_tokens)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Any:
        if self._is_generator:
            return self._send((candidates, plan))
        return self._policy.select(requests, candidates, plan)

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        if self._is_generator:
            self._send((accepted, phases))
        else:
            further = [plan] if self._takes_plan else []
            self._policy.observe(requests, accepted, phases, *further)

    def _send(self, value: Any) -> Any:
        try:
            return self._step.send(value)
        except StopIteration:
            return None


def check_tree(source: str, request: Request, tree: TokenTree, vocab_size: int) -> None:
    """Raise InvalidInputError, whose message names ``source``, unless the tree is valid for the
    request.
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
        raise InvalidInputError(
            f"{source} returned an invalid tree: {fault}; parents must precede their children"
        )
    if int(tree.tokens[0]) != request.tokens[-1]:
        raise InvalidInputError(
            f"{source} returned a tree whose root is not the request's last token: the root is {int(tree.tokens[0])} "
            f"and the last token {request.tokens[-1]}; begin the tree with request.tokens[-1]"
        )
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise InvalidInputError(
            f"{source} proposed a token outside 0 .. {vocab_size - 1}; propose ids of the target's vocabulary"
        )


def check_plan(plan: Any, requests: Sequence[Request], max_nodes: int) -> Plan:
    """Return the plan of a user's policy, with its collections of requests converted to lists.

    Args:
        plan: what ``policy.plan`` returned.
        requests: the requests that were passed to it.
        max_nodes: maximum number of nodes of one request's tree, root excluded.

    Raises:
        InvalidInputError: the plan has a wrong type, exceeds a limit, or names requests that it
            must not name.
    """
    if not isinstance(plan, Plan):
        raise InvalidInputError(
            f"policy.plan returned {type(plan).__name__}, where hf_slospec.Plan was expected; return "
            "Plan(depth, width), or Plan(0, 1) for plain decoding"
        )
    if not isinstance(plan.depth, Integral) or not isinstance(plan.width, Integral):
        raise InvalidInputError(
            f"policy.plan returned depth {plan.depth!r} and width {plan.width!r}; both must be integers"
        )
    if plan.depth < 0 or plan.width < 1 or plan.depth * plan.width > max_nodes:
        raise InvalidInputError(
            f"policy.plan returned depth {plan.depth} and width {plan.width}, but a request has room for "
            f"{max_nodes} nodes; raise max_depth or max_width in SLOSpecConfig, or plan less"
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
        raise InvalidInputError(
            "policy.plan drafts for a request twice; name each once in Plan.drafting"
        )
    return replace(plan, drafting=drafting)


def check_selection(selection: Any, requests: Sequence[Request], checks: Checks) -> None:
    """Raise InvalidInputError unless a user's policy returned one valid tree per request, within
    the node limit, with finite expectations.
    """
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
        check_tree("policy.select", request, tree, checks.vocab_size)
        if tree.num_nodes - 1 > checks.max_nodes:
            raise InvalidInputError(
                f"policy.select returned a tree of {tree.num_nodes - 1} nodes, but a request has room for "
                f"{checks.max_nodes}; raise max_depth or max_width in SLOSpecConfig, or select less"
            )


def check_drafts(
    drafted: Any, requests: Sequence[Request], plan: Plan, vocab_size: int
) -> list[TokenTree]:
    """Return the candidate trees of a user's drafter as a list.

    Raises:
        InvalidInputError: there is not exactly one valid tree per request, or a tree exceeds the
            plan's depth or number of nodes.
    """
    if not isinstance(drafted, Iterable):
        raise InvalidInputError(
            f"drafter returned {type(drafted).__name__}; it must return TokenTree objects"
        )
    trees = list(drafted)
    if len(trees) != len(requests):
        raise InvalidInputError(
            f"drafter returned {len(trees)} trees for {len(requests)} requests; it must return one for each"
        )
    for request, tree in zip(requests, trees, strict=True):
        check_tree("drafter", request, tree, vocab_size)
        if tree.max_depth > plan.depth or tree.num_nodes - 1 > plan.depth * plan.width:
            raise InvalidInputError(
                f"drafter returned a tree of {tree.num_nodes - 1} nodes, {tree.max_depth} deep, for a plan of depth "
                f"{plan.depth} and width {plan.width}; cut it to that depth and depth * width nodes below the root"
            )
    return trees
