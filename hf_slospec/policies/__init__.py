"""Policies: they decide depth, width and nodes of every step. One file each."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hf_slospec.engine.checked_policy import CheckedPolicy
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.protocols import Policy
from hf_slospec.lab.policies.adaspec import AdaSpecPolicy
from hf_slospec.lab.policies.sequoia import SequoiaPolicy
from hf_slospec.lab.policies.slos_serve import SLOsServePolicy
from hf_slospec.lab.policies.smartspec import SmartSpecPolicy
from hf_slospec.lab.policies.smartspec_confidence import ConfidencePolicy
from hf_slospec.lab.policies.smartspec_tree import HeadsPolicy
from hf_slospec.lab.policies.static_tree import StaticTreePolicy
from hf_slospec.lab.policies.thesis import ThesisPolicy, ThesisSLOPolicy
from hf_slospec.lab.policies.tree_shapes import SPECINFER
from hf_slospec.lab.policies.turbospec import TurboSpecPolicy
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import AutoPolicy, SpeculationHistory
from hf_slospec.policies.fixed import FixedPolicy
from hf_slospec.policies.settings import PolicyName, PolicySettings, Settings

BASELINES: dict[PolicyName, Callable[[PolicySettings, StepCosts], Policy]] = {  # all but auto
    "adaserve": AdaServePolicy,
    "adaspec": AdaSpecPolicy,
    "thesis": ThesisPolicy,
    "thesis-slo": ThesisSLOPolicy,
    "thesis-slo-capped": lambda config, costs: ThesisSLOPolicy(config, costs, capped=True),
    "smartspec": SmartSpecPolicy,
    "smartspec-requests": lambda config, costs: SmartSpecPolicy(config, costs, by_request=True),
    "smartspec-confidence": ConfidencePolicy,
    "smartspec-tree": HeadsPolicy,
    "turbospec": TurboSpecPolicy,
    "slos-serve": SLOsServePolicy,
    "sequoia": SequoiaPolicy,
    "static": lambda config, costs: StaticTreePolicy(config.max_depth),
    "fixed": lambda config, costs: FixedPolicy(config.max_depth, config.max_width),
    "none": lambda config, costs: FixedPolicy(0, 1),
}


def new_policy(
    config: Settings,
    costs: StepCosts,
    history: SpeculationHistory | None = None,
    make_policy: Callable[[Settings, StepCosts], Policy] | None = None,
    vocab_size: int = sys.maxsize,
) -> Policy:
    """Return the policy that the config names, or the user's own.

    Args:
        config: settings; its ``policy`` does not count if ``make_policy`` is given.
        costs: predicted step times.
        history: statistics of former runs, which ``auto`` uses and updates; None: it begins without.
        make_policy: makes the user's policy, whose plans and selections are checked.
        vocab_size: bound of the token ids in selections of the user's policy.
    """
    if make_policy is not None:
        return CheckedPolicy(make_policy(config, costs), max_nodes_per_request(config, make_policy), vocab_size)
    if config.policy == "auto":
        return AutoPolicy(config, costs, history)
    return BASELINES[config.policy](config, costs)


def max_nodes_per_request(config: PolicySettings, make_policy: Callable[..., Policy] | None = None) -> int:
    """Return the maximum nodes of one request's draft tree, root not counted.

    With ``make_policy``, the policy that the config names does not count.
    """
    if config.policy == "none" and make_policy is None:
        return 0
    if config.policy == "static" and make_policy is None:
        return SPECINFER.max_depth * SPECINFER.max_width
    return config.max_depth * config.max_width
