"""Baseline policies: ``fixed`` verifies the same beam in every step, ``none`` decodes without
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.registry import NamedPolicy, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree


class FixedPolicy(NamedPolicy):
    """Policy that drafts ``max_depth`` levels of ``max_width`` nodes in every step and verifies all
    of them; a depth of 0 is plain decoding.

    A width of 1 makes chains, as in vLLM's and transformers' speculative decoding.
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
    """Return a selection that verifies all nodes of the trees. The expected tokens of a request are
    the sum of its tree's path probabilities.
    """
    return Selection(trees, [float(tree.path_probs.sum()) for tree in trees], step_s)
