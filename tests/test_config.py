"""The settings."""

from __future__ import annotations

from typing import Any

import pytest

import hf_slospec
from hf_slospec import (
    InvalidTypeError,
    SLOSpecConfig,
)
from tests.support.toys.tiny_models import tiny_model


@pytest.mark.parametrize(
    "fields",
    [
        dict(max_depth=1025), dict(token_budget=10**10), dict(draft_budget=10**10), dict(max_batch=10**10),
        dict(max_queue=10**10), dict(kv_tokens=10**10), dict(prefill_chunk=10**7), dict(urgency=float("inf")),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_have_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SLOSpecConfig(**fields)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (dict(deterministic=True), dict(exact="self")),
        (dict(deterministic=True, exact="bits"), dict(exact="bits")),
        (dict(deterministic=False), {}),
    ],
)
def test_deterministic_is_a_deprecated_alias_of_exact_self(
    given: dict[str, Any],
    same: dict[str, Any],
) -> None:
    with pytest.warns(FutureWarning, match='exact="self"') as caught:
        config = SLOSpecConfig(**given)
    assert config == SLOSpecConfig(**same)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="deterministic"):
        SLOSpecConfig(deterministic="self")


def test_config_is_frozen_and_strict() -> None:
    with pytest.raises(ValueError, match="max_depht"):
        SLOSpecConfig(max_depht=3)
    with pytest.raises(ValueError, match="frozen"):
        SLOSpecConfig().max_depth = 3
    with pytest.raises(InvalidTypeError, match="config"):
        hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), config={"max_depth": 3})
    assert all(field.description for field in SLOSpecConfig.model_fields.values())
