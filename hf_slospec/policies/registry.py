"""Registry of policies by name. Each policy is one class with its name, options and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Policy
from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import load_entry_points
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import FloatArray, TokenTree

if TYPE_CHECKING:
    from hf_slospec.policies.settings import PolicySettings


# Group; each entry is a module that registers policies when it is imported
ENTRY_POINTS = "hf_slospec.policies"


class PolicyOptions(BaseModel):
    """Settings of one policy; most policies have none. Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NamedPolicy(Policy):
    """Base class of policies that ``SLOSpecConfig(policy=...)`` can name."""

    name: ClassVar[str]
    options: ClassVar[type[PolicyOptions]] = PolicyOptions  # settings of this policy only

    def __init__(self, config: PolicySettings, costs: StepCosts):
        self.config = config
        self.costs = costs

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        """Return the maximum nodes of one request's draft tree, root not counted."""
        return config.max_depth * config.max_width


_POLICIES: dict[str, type[NamedPolicy]] = {}


def register(*policies: type[NamedPolicy]) -> None:
    """Add policies to the registry, under their names.

    Raises:
        InvalidInputError: another class has the name.
    """
    for policy in policies:
        registered = _POLICIES.setdefault(policy.name, policy)
        if (registered.__module__, registered.__qualname__) != (
            policy.__module__,
            policy.__qualname__,
        ):
            raise InvalidInputError(
                f"policy {policy.name!r} is {registered.__module__}.{registered.__qualname__} already; choose another "
                "name"
            )
        _POLICIES[policy.name] = policy


def all_policies() -> dict[str, type[NamedPolicy]]:
    """Return all policies by name, those of other packages included."""
    load_entry_points(ENTRY_POINTS)
    return _POLICIES


def policy_named(name: str) -> type[NamedPolicy]:
    """Return the policy of this name; entry points are loaded only if the name is not registered
    yet.

    Raises:
        InvalidInputError: there is none.
    """
    policy = _POLICIES.get(name) or all_policies().get(name)
    if policy is None:
        raise InvalidInputError(
            f"there is no policy {name!r}; choose among {', '.join(map(repr, _POLICIES))}"
        )
    return policy


def policies_with(option: str) -> list[str]:
    """Return the names of the policies that have the option."""
    return [
        name for name, policy in all_policies().items() if option in policy.options.model_fields
    ]


MAX_BUDGET = 1024  # tokens
# Without a given token budget, a step may take this many times as long as one of a single token
MAX_SLOWDOWN = 4.0


def max_useful_depth(requests: Sequence[Request], max_depth: int) -> int:
    """Return the largest depth up to ``max_depth`` at which some request can commit a whole path:
    depth + 1 tokens.
    """
    return min(max_depth, max(request.num_left for request in requests) - 1)


def without_useless_nodes(
    requests: Sequence[Request], candidates: Sequence[TokenTree]
) -> list[TokenTree]:
    """Return the candidate trees without nodes that are too deep to be committed within
    ``max_new_tokens``.
    """
    return [
        tree.up_to(request.num_left - 1) for tree, request in zip(candidates, requests, strict=True)
    ]


def affordable_tokens(costs: StepCosts) -> int:
    """Return the maximum tokens whose verify step costs at most :data:`MAX_SLOWDOWN` times a single
    token's step.
    """
    times_s = _times_s(costs)
    return int(np.searchsorted(times_s, MAX_SLOWDOWN * times_s[0], side="right"))


def roofline_tokens(costs: StepCosts) -> int:
    """Return the tokens at which the measured roofline has its ridge.

    The roofline is the time of a single token (memory-bound) or the number of tokens at their
    highest rate (compute-bound), whichever is longer. Below the ridge compute is left unused; above
    it the step takes longer and the rate does not rise.
    """
    times_s = _times_s(costs)
    highest_rate = float((np.arange(1, MAX_BUDGET + 1) / times_s).max())
    return max(round(float(times_s[0]) * highest_rate), 1)


def _times_s(costs: StepCosts) -> FloatArray:
    """Return the seconds of verify steps of 1, 2, ... tokens.  -> [MAX_BUDGET] f64"""
    return np.maximum.accumulate(
        costs.verify_s(np.arange(1, MAX_BUDGET + 1))
    )  # corrections by size may break monotonicity, hence the maximum
