"""Pydantic model of the settings that choose and configure a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hf_slospec.errors import InputModel
from hf_slospec.policies.registry import PolicyOptions, policies_with, policy_named

# Upper bound of ``max_depth``, in tree levels: statistics and reserved K/V slots grow with it
MAX_DEPTH = 1024
# Upper bound of settings that count tokens or requests, so that their sums do not overflow
MAX_COUNT = 10**9

Settings = TypeVar("Settings", bound="PolicySettings")
Options = TypeVar("Options", bound=PolicyOptions)


class PolicySettings(InputModel):
    """Settings of the policy, inherited by :class:`~hf_slospec.SLOSpecConfig`. Frozen; unknown
    fields are rejected.
    """

    policy: str = Field(
        "auto",
        description="Policy that decides depth, width and nodes of each step: auto, adaserve, fixed, none, or another "
        "that is registered, as those after papers are.",
    )
    max_depth: int = Field(
        12,
        ge=0,
        le=MAX_DEPTH,
        description="Maximum depth of token trees (D_max). 0 turns speculation off.",
    )
    max_width: int = Field(
        3, ge=1, le=64, description="Maximum beam width of a request while drafting (W_max)."
    )
    token_budget: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Token budget: maximum nodes verified per step, over all requests, roots included (B and B1). "
        "None: by measured step times: auto and slos-serve up to four times a single token's step, adaserve and the "
        "thesis' policies the ridge of the roofline, where a step turns from memory-bound to compute-bound.",
    )
    draft_budget: int = Field(
        96,
        ge=1,
        le=MAX_COUNT,
        description="Maximum draft tokens per level over all requests (B2); bounds the width.",
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

    @field_validator("policy")
    @classmethod
    def _validate_policy(cls, value: str) -> str:
        return policy_named(value).name

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        """Move policy options that are given as fields into ``policy_options``."""
        nested = data.get("policy_options", {}) if isinstance(data, Mapping) else None
        if isinstance(nested, PolicyOptions):
            nested = nested.model_dump()
        if not isinstance(nested, Mapping):
            return data
        options = {
            name: value
            for name, value in data.items()
            if name not in cls.model_fields and policies_with(name)
        }
        rest = {name: value for name, value in data.items() if name not in options}
        return {**rest, "policy_options": {**nested, **options}} if options else data

    @field_validator("policy_options", mode="before")
    @classmethod
    def _validate_options(cls, value: Any, info: ValidationInfo) -> Any:
        """Check ``policy_options`` against the options class of the policy named by ``policy``."""
        # ``policy`` is invalid, which its own validator reports
        if "policy" not in info.data:
            return PolicyOptions()
        options = policy_named(info.data["policy"]).options
        if isinstance(value, PolicyOptions):
            value = value.model_dump()
        for name in value if isinstance(value, Mapping) else ():
            if name not in options.model_fields and (policies := policies_with(name)):
                raise ValueError(
                    f"{name} is a setting of policy {' or '.join(map(repr, policies))}, not of "
                    f"{info.data['policy']!r}; leave it out or choose such a policy"
                )
        return options.model_validate(value)

    def model_copy(
        self: Settings, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Settings:
        """Return a validated copy with the fields in ``update`` replaced. If ``policy`` changes,
        the options of the old policy are dropped.

        Fields that were never set take their defaults again, since some defaults depend on other
        fields.
        """
        update = update or {}
        is_other = update.get("policy", self.policy) != self.policy
        values = self.model_dump(
            exclude={"policy_options"} if is_other else None, exclude_unset=True
        )
        return type(self)(**{**values, **update})

    def options_of(self, kind: type[Options]) -> Options:
        """Return ``policy_options`` if of class ``kind``, else the defaults of ``kind``."""
        return self.policy_options if isinstance(self.policy_options, kind) else kind()
