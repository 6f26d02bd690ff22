"""Policies: who gets how much of each step. One file each."""

from collections.abc import Callable

from hf_slospec.algo.latency import StepCosts
from hf_slospec.config import PolicyName, SLOSpecConfig
from hf_slospec.engine.protocols import Policy
from hf_slospec.policies.auto import AutoPolicy, SpeculationHistory
from hf_slospec.policies.fixed import FixedPolicy, StaticTreePolicy
from hf_slospec.policies.papers.adaserve import AdaServePolicy
from hf_slospec.policies.papers.sequoia import SequoiaPolicy
from hf_slospec.policies.papers.slos_serve import SLOsServePolicy
from hf_slospec.policies.papers.smartspec import SmartSpecPolicy
from hf_slospec.policies.papers.smartspec_confidence import ConfidencePolicy
from hf_slospec.policies.papers.smartspec_tree import HeadsPolicy
from hf_slospec.policies.papers.thesis import ThesisPolicy, ThesisSLOPolicy
from hf_slospec.policies.papers.tree_shapes import SPECINFER
from hf_slospec.policies.papers.turbospec import TurboSpecPolicy

NewPolicy = Callable[[SLOSpecConfig, StepCosts], Policy]
NEW: dict[PolicyName, NewPolicy] = {
    "adaserve": AdaServePolicy,
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


def new_policy(config: SLOSpecConfig, costs: StepCosts, experience: SpeculationHistory) -> Policy:
    """The policy a config names."""
    if config.policy == "auto":
        return AutoPolicy(config, costs, experience)
    return NEW[config.policy](config, costs)


def max_tree_nodes(config: SLOSpecConfig, make_policy: NewPolicy | None = None) -> int:
    """Nodes of one request's draft tree at most, its root not counted; a policy of one's own has no name."""
    if config.policy == "none" and make_policy is None:
        return 0
    if config.policy == "static" and make_policy is None:
        return SPECINFER.max_depth * SPECINFER.max_width
    return config.max_depth * config.max_width
