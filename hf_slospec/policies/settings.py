"""Settings of policies, as far as policies read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hf_slospec.lab.policies.options import OPTIONS, PolicyOptions, policies_with

PolicyName = Literal[
    "auto",
    "adaserve",
    "adaspec",
    "thesis",
    "thesis-slo",
    "thesis-slo-capped",
    "smartspec",
    "smartspec-requests",
    "smartspec-confidence",
    "smartspec-tree",
    "turbospec",
    "slos-serve",
    "sequoia",
    "static",
    "fixed",
    "none",
]

MAX_DEPTH = 1024  # statistics and room for K/V grow with it
MAX_COUNT = 10**9  # of tokens or requests; more is a mistake, and overflows sums

Settings = TypeVar("Settings", bound="PolicySettings")
Options = TypeVar("Options", bound=PolicyOptions)


class PolicySettings(BaseModel):
    """Settings of the policy, part of :class:`~hf_slospec.SLOSpecConfig`. Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field(
        "auto",
        description="Policy that decides depth, width and nodes of each step. auto: the most expected tokens per "
        "second, weighted by how late requests are. adaserve: the paper's Algorithm 2 and equations 8 and 9, the whole "
        "token budget on every step. adaspec: chains drafted for as long as predicted goodput rises. thesis: trees "
        "grown and pruned to the token budget; thesis-slo: the latest "
        "requests' nodes first (thesis-slo-capped: with AdaServe's limits). smartspec, turbospec: chains of the length "
        "with the best goodput, the same for all requests (smartspec-requests: one per request; smartspec-confidence: "
        "until the draft is unsure; smartspec-tree: trees). slos-serve: chains as long as each tier of TPOT SLOs "
        "needs. sequoia: the best static tree for the acceptance so far. static: SpecInfer's static tree of 18 nodes. "
        "fixed: beams of max_depth and max_width on every step (max_depth=0: plain decoding, max_width=1: chains). "
        "none: plain decoding.",
    )
    max_depth: int = Field(
        12, ge=0, le=MAX_DEPTH, description="Maximum depth of token trees (D_max). 0 turns speculation off."
    )
    max_width: int = Field(3, ge=1, le=64, description="Maximum beam width of a request while drafting (W_max).")
    token_budget: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Token budget: maximum nodes verified per step, over all requests, roots included (B and B1). "
        "None: as many as cost up to four times a single token's step, by measurement.",
    )
    draft_budget: int = Field(
        96, ge=1, le=MAX_COUNT, description="Maximum draft tokens per level over all requests (B2); bounds the width."
    )
    urgency: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="auto: additional weight of a request's tokens for each token the request is late.",
    )
    policy_options: SerializeAsAny[PolicyOptions] = Field(
        PolicyOptions(),
        validate_default=True,
        description="Settings that only the named policy has, such as max_tree_nodes of thesis. They may also be given "
        "as if they were fields of the config.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        """Move settings of single policies that are given as fields into ``policy_options``."""
        given = data.get("policy_options", {}) if isinstance(data, Mapping) else None
        if isinstance(given, PolicyOptions):
            given = given.model_dump()
        if not isinstance(given, Mapping):
            return data
        options = {name: value for name, value in data.items() if policies_with(name)}
        rest = {name: value for name, value in data.items() if name not in options}
        return {**rest, "policy_options": {**given, **options}} if options else data

    @field_validator("policy_options", mode="before")
    @classmethod
    def _validate_options(cls, value: Any, info: ValidationInfo) -> Any:
        """Validate the options as those of the named policy."""
        if "policy" not in info.data:  # it is refused itself
            return PolicyOptions()
        policy: str = info.data["policy"]
        options = OPTIONS.get(policy, PolicyOptions)
        if isinstance(value, PolicyOptions):
            value = value.model_dump()
        for name in value if isinstance(value, Mapping) else ():
            if name not in options.model_fields and (policies := policies_with(name)):
                raise ValueError(
                    f"{name} is a setting of policy {' or '.join(map(repr, policies))}, not of {policy!r}; leave it "
                    "out or choose such a policy"
                )
        return options.model_validate(value)

    def model_copy(self: Settings, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Settings:
        """Return a copy with ``update``, validated. With another policy, the options of this one are dropped."""
        update = update or {}
        is_other = update.get("policy", self.policy) != self.policy
        return type(self).model_validate(
            {**self.model_dump(exclude={"policy_options"} if is_other else None), **update}
        )

    def options_of(self, kind: type[Options]) -> Options:
        """Return the policy's own options; the defaults of ``kind`` if the settings name a policy without these."""
        return self.policy_options if isinstance(self.policy_options, kind) else kind()
