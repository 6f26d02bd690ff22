"""Speculation policies: each decides the depth, width and nodes of every step's draft trees. The
interface ``Policy`` is in ``engine/interfaces.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_slospec.engine.checks import UserPolicy
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Policy
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import AutoPolicy, SpeculationHistory
from hf_slospec.policies.fixed import FixedPolicy, PlainPolicy
from hf_slospec.policies.registry import NamedPolicy, policy_named, register
from hf_slospec.policies.settings import PolicySettings, Settings

register(AutoPolicy, AdaServePolicy, FixedPolicy, PlainPolicy)


def new_policy(
    config: Settings,
    costs: StepCosts,
    history: SpeculationHistory | None = None,
    make_policy: Callable[[Settings, StepCosts], Policy] | None = None,
) -> Policy:
    """Create the policy that ``config.policy`` names, or the user's policy that ``make_policy``
    returns.

    Args:
        config: settings; its ``policy`` is ignored if ``make_policy`` is given.
        costs: cost model that predicts step times.
        history: acceptance statistics of earlier runs, which ``auto`` reads and updates; None:
            start without any.
        make_policy: takes ``config`` and ``costs``, and returns the user's policy; None: there is
            none.
    """
    if make_policy is not None:
        return UserPolicy(make_policy(config, costs))
    named = policy_named(config.policy)
    return named(config, costs, history) if issubclass(named, AutoPolicy) else named(config, costs)


def max_nodes_per_request(
    config: PolicySettings, make_policy: Callable[..., Policy] | None = None
) -> int:
    """Return the maximum nodes of one request's draft tree, root not counted.

    If ``make_policy`` is given, it is ``max_depth * max_width``, whatever ``config.policy`` says.
    """
    kind = policy_named(config.policy) if make_policy is None else NamedPolicy
    return kind.max_nodes(config)
