"""Registry of policies by name. Each policy is one class with its name, options and limits."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from hf_slospec.engine.protocols import Policy
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.errors import InvalidInputError

if TYPE_CHECKING:
    from hf_slospec.policies.settings import PolicySettings

ENTRY_POINTS = "hf_slospec.policies"  # group; each entry is a module that registers policies when it is imported


class PolicyOptions(BaseModel):
    """Settings of one policy; most policies have none. Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NamedPolicy(Policy):
    """Base class of policies that ``SLOSpecConfig(policy=...)`` can name."""

    name: ClassVar[str]
    options: ClassVar[type[PolicyOptions]] = PolicyOptions  # settings of this policy only

    def __init__(self, config: PolicySettings, costs: StepCosts):
        self.config, self.costs = config, costs

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
        known = _POLICIES.setdefault(policy.name, policy)
        if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
            raise InvalidInputError(
                f"policy {policy.name!r} is {known.__module__}.{known.__qualname__} already; choose another name"
            )
        _POLICIES[policy.name] = policy


def all_policies() -> dict[str, type[NamedPolicy]]:
    """Return all policies by name, those of other packages included."""
    _load_entry_points()
    return _POLICIES


@functools.cache
def _load_entry_points() -> None:
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        entry.load()


def policy_named(name: str) -> type[NamedPolicy]:
    """Return the policy of this name; entry points are loaded only if the name is not registered yet.

    Raises:
        InvalidInputError: there is none.
    """
    policy = _POLICIES.get(name) or all_policies().get(name)
    if policy is None:
        raise InvalidInputError(f"there is no policy {name!r}; choose among {', '.join(map(repr, _POLICIES))}")
    return policy


def policies_with(option: str) -> list[str]:
    """Return the names of the policies that have the option."""
    return [name for name, policy in all_policies().items() if option in policy.options.model_fields]
