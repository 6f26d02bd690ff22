"""vLLM's adaptive verification, in one scenario or two."""

from __future__ import annotations

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.policies.smartspec_variants import VLLMAdaptivePolicy
from tests.support.policy_costs import begun, costs, requests_of, sizes
from tests.support.toys.trees import chain

SEVEN = SLOSpecConfig(policy="vllm-adaptive", max_depth=7)


def test_whole_chains_are_drafted_and_as_much_verified_as_pays():
    trees = [chain(*[0.95] * 7), chain(0.3, 0.9, 0.9), chain(*[0.6] * 7)]
    _, plan = begun(VLLMAdaptivePolicy(SEVEN, costs(0.02)), requests_of(3))
    assert (plan.depth, plan.width) == (7, 1)
    cheap, fair, dear = (sizes(VLLMAdaptivePolicy(SEVEN, costs(token_s)), requests_of(3), trees)
                         for token_s in (0.0, 0.2, 9.0))  # fmt: skip
    assert cheap == [8, 4, 8]
    assert fair[0] > fair[2] >= fair[1]
    assert dear == [1, 1, 1]
    assert VLLMAdaptivePolicy.max_nodes(SEVEN) == 7
