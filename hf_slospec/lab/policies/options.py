"""Settings that belong to single policies after papers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hf_slospec.policies.adaserve_selection import SLOOrder


class PolicyOptions(BaseModel):
    """Settings of one policy; most policies have none. Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AdaServeOptions(PolicyOptions):
    """Settings of ``adaserve``."""

    depth_offset: int = Field(0, ge=0, description="c1 of AdaServe's equation 8: larger means shallower trees.")
    slo_order: SLOOrder = Field(
        "ascending", description="Order of the requests in the SLO phase, by the tokens they require."
    )
    max_slo_share: float = Field(
        1.2, gt=0, description="n_max as a multiple of an even share of the budget: the SLO phase's limit per request."
    )


class ThesisOptions(PolicyOptions):
    """Settings of ``thesis``."""

    max_tree_nodes: int | None = Field(
        None, ge=1, description="Maximum nodes of one request's tree, its root included (S). None: no limit."
    )


class ThesisSLOOptions(PolicyOptions):
    """Settings of ``thesis-slo``."""

    slack: float = Field(0.0, ge=0, description="Seconds per step to be ahead of TPOT SLOs by (epsilon).")


class CappedThesisSLOOptions(ThesisSLOOptions):
    """Settings of ``thesis-slo-capped``."""

    max_slo_share: float = Field(
        1.2, gt=0, description="n_max as a multiple of an even share of the budget: a late request's limit."
    )


class SmartSpecOptions(PolicyOptions):
    """Settings of ``smartspec`` and ``smartspec-requests``."""

    prefill_disabling: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Requests that arrive while more than this share of the last 100 steps drafted nothing are never "
        "drafted for, which saves the draft's prefill. 1: all requests are drafted for.",
    )


class ConfidenceOptions(PolicyOptions):
    """Settings of ``smartspec-confidence``."""

    min_confidence: float = Field(
        0.5, ge=0, lt=1, description="A token with at most this probability is the last one drafted."
    )


OPTIONS: dict[str, type[PolicyOptions]] = {  # by policy; policies without settings are left out
    "adaserve": AdaServeOptions,
    "thesis": ThesisOptions,
    "thesis-slo": ThesisSLOOptions,
    "thesis-slo-capped": CappedThesisSLOOptions,
    "smartspec": SmartSpecOptions,
    "smartspec-requests": SmartSpecOptions,
    "smartspec-confidence": ConfidenceOptions,
}


def policies_with(option: str) -> list[str]:
    """Return the policies that have the option; none if there is no such option."""
    return [policy for policy, options in OPTIONS.items() if option in options.model_fields]
