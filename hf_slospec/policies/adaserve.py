"""AdaServe (arXiv 2501.12162): depth and width by equations 8 and 9, nodes by Algorithm 2, a fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from hf_slospec.algo.tree import IntArray, TokenTree
from hf_slospec.engine.protocols import Plan, PolicyStep
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.policies.adaserve_selection import SLOOrder, adaptive_shape, required_tokens, select_nodes
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import max_useful_depth, roofline_tokens, without_useless_nodes
from hf_slospec.policies.registry import NamedPolicy, PolicyOptions
from hf_slospec.policies.settings import PolicySettings


class AdaServeOptions(PolicyOptions):
    """Settings of ``adaserve``."""

    depth_offset: int = Field(0, ge=0, description="c1 of AdaServe's equation 8: larger means shallower trees.")
    width_offset: int = Field(0, description="c2 of AdaServe's equation 9: larger means wider trees.")
    min_depth: int = Field(
        0,
        ge=0,
        description="D_min of AdaServe's equation 8. The paper's systems have 3 and 4, and never stop drafting.",
    )
    slo_order: SLOOrder = Field(
        "ascending", description="Order of the requests in the SLO phase, by the tokens they require."
    )
    max_slo_share: float = Field(
        1.2, gt=0, description="n_max as a multiple of an even share of the budget: the SLO phase's limit per request."
    )


class AdaServePolicy(NamedPolicy):
    """Policy that selects nodes for TPOT SLOs first, and spends the whole token budget on every step.

    As in the paper, the draft's probabilities are not calibrated. Step times come from the cost model, which measured
    steps correct; the artifact adds 5 % to constant ones. Without a given token budget, B is the ridge of the measured
    roofline; the artifact has 512 for Llama-70B on four A100, and 256 for Qwen-32B.
    """

    name = "adaserve"
    options: ClassVar[type[PolicyOptions]] = AdaServeOptions

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.settings = config.options_of(AdaServeOptions)
        self.budget = config.token_budget or roofline_tokens(costs)

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        candidates, plan = yield Plan(*self._shape(requests))
        candidates = without_useless_nodes(requests, candidates)
        num_keys = sum(len(request.tokens) for request in requests)
        draft_s = self.costs.draft_s(len(requests), plan.depth, plan.width, num_keys)
        step_s = float(draft_s + self.costs.verify_s(self.budget, len(requests), num_keys))
        required = [required_tokens(*request.decoded(begun_s), step_s, request.pace_s) for request in requests]
        nodes = self._nodes(requests, candidates, required)
        yield selection_of([tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)], step_s)

    def _shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return the depth and the width of candidate trees."""
        return adaptive_shape(
            len(requests),
            self.budget,
            self.config.draft_budget,
            max_useful_depth(requests, self.config.max_depth),
            self.config.max_width,
            self.settings.depth_offset,
            self.settings.width_offset,
            self.settings.min_depth,
        )

    def _nodes(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], required: Sequence[float]
    ) -> list[IntArray]:
        """Return the nodes to verify of each candidate tree, given the tokens that each request requires."""
        return select_nodes(
            candidates,
            required,
            self.budget,
            max_slo_nodes=int(self.settings.max_slo_share * self.budget / len(requests)),
            order=self.settings.slo_order,
        )
