"""The settings."""

from __future__ import annotations

from typing import Any

import pytest

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_depth": 1025}, "max_depth"),
    *(
        ({name: 10**10}, name)
        for name in ("token_budget", "draft_budget", "max_batch", "max_queue", "kv_tokens")
    ),
    ({"prefill_chunk": 10**7}, "prefill_chunk"),
    ({"urgency": float("inf")}, "urgency"),
    ({"max_depht": 3}, "max_depht"),
    ({"deterministic": "self"}, "deterministic"),
    *(({"guarantee": value}, "guarantee") for value in (0.0, 1.0, -0.5, 95)),
    ({"guarantee": 0.9, "admission": "edf"}, "guarantee needs admission 'slo'"),
    ({"policy": "adaserv"}, "^policy: there is no policy 'adaserv'; choose among 'auto'"),
    ({"policy": 3}, "valid string"),
    ({"max_tree_nodes": 32}, "max_tree_nodes is a setting of policy 'thesis', not of 'auto'"),
    (
        {"policy": "none", "max_slo_share": 1.0},
        "of policy 'adaserve' or 'thesis-slo-capped', not of 'none'",
    ),
    (
        {"policy": "thesis", "policy_options": {"slack": 0.1}},
        "slack is a setting of policy 'thesis-slo' or",
    ),
    (
        {"policy": "thesis", "max_tree_nodes": 0},
        "^policy_options.max_tree_nodes: Input should be greater",
    ),
    ({"policy": "thesis", "max_tree_node": 1}, "max_tree_node: Extra inputs are not permitted"),
    (
        {"policy": "thesis", "policy_options": {"max_depth": 1}},
        "max_depth: Extra inputs are not permitted",
    ),
    (
        {"policy": "thesis", "policy_options": 1, "max_tree_nodes": 1},
        "should be a valid dictionary",
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=str)
def test_impossible_settings_are_refused_by_name(fields, words):
    with pytest.raises(InvalidInputError, match=words):
        SLOSpecConfig(**fields)
    with pytest.raises(SLOSpecError, match=words):
        SLOSpecConfig().model_copy(update=fields)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (dict(deterministic=True), dict(exact="self")),
        (dict(deterministic=True, exact="bits"), dict(exact="bits")),
        (dict(deterministic=False), {}),
    ],
)
def test_deterministic_is_a_deprecated_alias_of_exact_self(given, same):
    with pytest.warns(FutureWarning, match='exact="self"') as caught:
        config = SLOSpecConfig(**given)
    assert config == SLOSpecConfig(**same)
    assert caught[0].filename == __file__


def test_fields_are_described_and_frozen():
    with pytest.raises(InvalidInputError, match="frozen"):
        SLOSpecConfig().max_depth = 3
    assert all(field.description for field in SLOSpecConfig.model_fields.values())
