"""Registry of policies by name, the base class of registered policies, and helpers that several
policies share.
"""

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


# Entry point group for policies of other packages; each entry point is a module that calls
# :func:`register` when it is imported
ENTRY_POINTS = "hf_slospec.policies"


class PolicyOptions(BaseModel):
    """Base class of the settings that only one policy has; most policies have none. Frozen; unknown
    fields are rejected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class NamedPolicy(Policy):
    """Base class of policies that ``SLOSpecConfig(policy=...)`` can name."""

    name: ClassVar[str]
    # class of the settings that only this policy has
    options: ClassVar[type[PolicyOptions]] = PolicyOptions

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
        InvalidInputError: a different class is registered under one of the names.
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
    """Return all policy classes by name, including the policies of other packages."""
    load_entry_points(ENTRY_POINTS)
    return _POLICIES


def policy_named(name: str) -> type[NamedPolicy]:
    """Return the policy class with this name; entry points are loaded only if the name is not
    registered yet.

    Raises:
        InvalidInputError: no policy has this name.
    """
    policy = _POLICIES.get(name) or all_policies().get(name)
    if policy is None:
        raise InvalidInputError(
            f"there is no policy {name!r}; choose among {', '.join(map(repr, _POLICIES))}"
        )
    return policy


def policies_with(option: str) -> list[str]:
    """Return the names of the policies whose options class has a field ``option``."""
    return [
        name for name, policy in all_policies().items() if option in policy.options.model_fields
    ]


# Largest verify step, in tokens, that is considered when the token budget is chosen automatically
MAX_BUDGET = 1024
# If ``token_budget`` is not set, a step may take this many times as long as a step of one token
MAX_SLOWDOWN = 4.0


def max_useful_depth(requests: Sequence[Request], max_depth: int) -> int:
    """Return the largest useful depth, at most ``max_depth``: a path of that depth commits depth +
    1 tokens, which at least one request may still emit.
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
    """Return the number of tokens in the largest verify step that takes at most
    :data:`MAX_SLOWDOWN` times as long as a step of one token.
    """
    times_s = _times_s(costs)
    return int(np.searchsorted(times_s, MAX_SLOWDOWN * times_s[0], side="right"))


def roofline_tokens(costs: StepCosts) -> int:
    """Return the number of tokens per step at the ridge of the measured roofline.

    The roofline is the longer of two times: the time of a single token (memory-bound), and the
    number of tokens divided by the highest measured tokens per second (compute-bound). Below the
    ridge compute is left unused; above it steps take longer without a higher rate.
    """
    times_s = _times_s(costs)
    highest_rate = float((np.arange(1, MAX_BUDGET + 1) / times_s).max())
    return max(round(float(times_s[0]) * highest_rate), 1)


def _times_s(costs: StepCosts) -> FloatArray:
    """Return the seconds of verify steps of 1, 2, ... tokens.  -> [MAX_BUDGET] f64"""
    # Corrections by measured steps may make a larger step appear faster; the maximum prevents that.
    return np.maximum.accumulate(costs.verify_s(np.arange(1, MAX_BUDGET + 1)))
