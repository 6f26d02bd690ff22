"""Baselines: the same beam in every step, or plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.registry import NamedPolicy, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree


class FixedPolicy(NamedPolicy):
    """Policy that verifies whole beams of ``max_depth`` and ``max_width`` on every step; depth 0 is
    plain decoding.

    A width of 1 makes chains, as in vLLM's and transformers' speculation.
    """

    name = "fixed"

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        return Plan(max_useful_depth(requests, self.config.max_depth), self.config.max_width)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        return selection_of(without_useless_nodes(requests, candidates))


class PlainPolicy(FixedPolicy):
    """Policy that drafts nothing: plain decoding."""

    name = "none"
    falls_back = True

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        return 0

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        return Plan(0, 1)


def selection_of(trees: Sequence[TokenTree], step_s: float = 0.0) -> Selection:
    """Return the selection of these trees, with the sums of their path probabilities as expected
    tokens.
    """
    return Selection(trees, [float(tree.path_probs.sum()) for tree in trees], step_s)
