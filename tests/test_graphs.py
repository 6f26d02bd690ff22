"""Captured forwards on the CPU: traces stand in for CUDA graphs, a plain operator for the flash-attention kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.models import graphs
from hf_slospec.models.attention import choice
from tests.graph_stand_in import OpaqueStandIn, Traces
from tests.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=30, top_p=0.95)
CONFIG = SLOSpecConfig(attention="flash", policy="fixed", max_depth=3, max_width=2, check_invariants=True)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """Stands in for CUDA's graphs of all models that are made while the test runs."""
    made = Traces()
    monkeypatch.setattr(choice, "KERNELS", (OpaqueStandIn,))
    monkeypatch.setattr("hf_slospec.models.packed.maker_for", lambda device: made)
    monkeypatch.setattr(graphs, "PATIENCE", 1)
    return made


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral-window", "gemma2", "gemma3", "qwen3"])
def test_whole_models_token_for_token(family: str, traces: Traces) -> None:
    model = tiny_model(family)
    generator = SLOSpecGenerator(model, tiny_model(family, noise=0.03), config=CONFIG)
    for options in (GREEDY, SAMPLED):
        assert_same_as_stock(model, generator.generate, ragged_prompts(3), **options, max_new_tokens=36)
    print(traces.num_captured, traces.num_replayed)
    assert traces.num_replayed > 3 * traces.num_captured
