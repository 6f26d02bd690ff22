"""vLLM's adaptive verification (its pull request 47808): how much of the drafts to verify, by their probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.select import best_ratio_nodes
from hf_slospec.algo.tree import FloatArray, Forest, IntArray
from hf_slospec.engine.protocols import Plan, PolicyStep
from hf_slospec.engine.request import Request
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import MAX_BUDGET, max_useful_depth, without_useless_nodes
from hf_slospec.policies.registry import NamedPolicy
from hf_slospec.policies.settings import PolicySettings


class VLLMAdaptivePolicy(NamedPolicy):
    """Policy that drafts chains of ``max_depth`` tokens and verifies the number of their tokens that pays most.

    The tokens of all requests are ranked by survival probability, that of the path to them, and the best are verified,
    as many as give most expected tokens per second of a step. There are no SLOs, the probabilities are taken as they
    are, drafting never stops, and its time is spent before the choice. vLLM takes the probabilities from the confidence
    head of its drafter; here they are the draft's own.
    """

    name = "vllm-adaptive"

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        return config.max_depth

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        candidates, plan = yield Plan(max_useful_depth(requests, self.config.max_depth), 1)
        forest = Forest.of(without_useless_nodes(requests, candidates))
        draft_s = self.costs.draft_s(num_requests, plan.depth, 1, num_keys)

        def step_s(num_nodes: IntArray) -> FloatArray:
            return draft_s + self.costs.verify_s(num_nodes + num_prefill_tokens, num_requests, num_keys)

        is_verified = best_ratio_nodes(forest, forest.path_probs, MAX_BUDGET, step_s)
        yield selection_of(forest.subtrees(is_verified), float(step_s(is_verified.sum())))
