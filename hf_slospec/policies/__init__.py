"""Policies: who gets how much of each step. One file each."""

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.static_trees import SPECINFER
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Policy
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import AutoPolicy, Experience
from hf_slospec.policies.fixed import FixedPolicy, StaticTreePolicy
from hf_slospec.policies.smartspec import SmartSpecPolicy
from hf_slospec.policies.turbospec import TurboSpecPolicy


def new_policy(config: SLOSpecConfig, costs: StepCosts, experience: Experience) -> Policy:
    """The policy a config names."""
    if config.policy == "auto":
        return AutoPolicy(config, costs, experience)
    if config.policy == "adaserve":
        return AdaServePolicy(config, costs)
    if config.policy in ("smartspec", "smartspec-requests"):
        return SmartSpecPolicy(config, costs, by_request=config.policy == "smartspec-requests")
    if config.policy == "turbospec":
        return TurboSpecPolicy(config, costs)
    if config.policy == "static":
        return StaticTreePolicy(config.max_depth)
    return FixedPolicy(0 if config.policy == "none" else config.max_depth, config.max_width)


def max_tree_nodes(config: SLOSpecConfig) -> int:
    """Nodes of one request's draft tree at most, its root not counted."""
    if config.policy == "none":
        return 0
    if config.policy == "static":
        return SPECINFER.max_depth * SPECINFER.max_width
    return config.max_depth * config.max_width
