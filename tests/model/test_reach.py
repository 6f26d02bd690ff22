"""What a model's layers see, as read from the masks that it builds; texts longer than windows and
chunks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, masking_utils

from hf_slospec import SLOSpecGenerator
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import Reach, reach_of
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.toys.tiny_models import (
    GROUPED,
    WINDOW,
    assert_same_as_stock,
    ragged_prompts,
    sharpened,
    tiny_model,
)

NO_PADDING = torch.zeros(1, dtype=torch.int64)
LLAMA4: dict[str, Any] = GROUPED | dict(
    head_dim=8, attention_chunk_size=WINDOW, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48,
    no_rope_layers=[1, 0],
)  # fmt: skip
PHIMOE: dict[str, Any] = GROUPED | dict(
    sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
)


def model_of(name: str, settings: dict[str, Any], noise: float = 0.0) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**settings)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    return sharpened(lambda: model_class(config), 0, noise)


@pytest.mark.parametrize("size", [2, 3, 9, 4096])
def test_masks_of_every_kind(size: int) -> None:
    window = masking_utils.sliding_window_causal_mask_function(size)
    chunks = masking_utils.chunked_causal_mask_function(size, NO_PADDING)
    assert reach_of(masking_utils.causal_mask_function, None) == Reach()
    assert reach_of(masking_utils.causal_mask_function, size) == Reach()
    assert reach_of(window, size) == Reach(window=size)
    assert reach_of(chunks, size) == Reach(chunk=size)
    for other in (window, chunks):
        assert reach_of(other, size + 1) is None and reach_of(other, None) is None


def test_masks_that_are_none_of_these() -> None:
    both = masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5),
        masking_utils.chunked_causal_mask_function(9, NO_PADDING),
    )
    assert reach_of(both, 5) is None and reach_of(both, 9) is None
    assert reach_of(masking_utils.bidirectional_mask_function, None) is None
    looks_up = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.int64))
    assert reach_of(looks_up, None) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_of_models(attention: str) -> None:
    cases = [
        ("Llama4Text", LLAMA4, [Reach(chunk=WINDOW), Reach()]),
        ("Phimoe", PHIMOE, [Reach(window=WINDOW)] * 2),
    ]
    for name, settings, expected in cases:
        model = model_of(name, settings | dict(attn_implementation=attention))
        assert [Reach(layer.window, layer.chunk) for layer in PackedModel(model).layers] == expected
        assert model.config._attn_implementation == attention
    found = [Reach(layer.window, layer.chunk) for layer in PackedModel(tiny_model("gemma3")).layers]
    assert found == [Reach(window=WINDOW), Reach()]


@pytest.mark.parametrize(
    ("name", "settings"), [("Llama4Text", LLAMA4), ("Phimoe", PHIMOE)], ids=["llama4", "phimoe"]
)
@pytest.mark.parametrize(
    "sampling", [dict(do_sample=False), dict(do_sample=True)], ids=["greedy", "sampled"]
)
def test_texts_longer_than_windows_and_chunks(
    name: str, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Prompts of 12 to 24 tokens and 24 new ones: nodes of one tree lie on both sides of a chunk's
    edge.
    """
    model = model_of(name, settings)
    generator = SLOSpecGenerator(model, model_of(name, settings, noise=0.03), config=DRAFTS_ALWAYS)
    prompts = ragged_prompts(3)
    if name == "Llama4Text":  # whose padded rows are refused
        prompts["attention_mask"][:] = 1
    out = assert_same_as_stock(model, generator.generate, prompts, **sampling, max_new_tokens=24)
    assert sum(row.accepted for row in out.slo) > 0


@pytest.mark.parametrize(
    "sampling", [dict(do_sample=False), dict(do_sample=True)], ids=["greedy", "sampled"]
)
def test_layers_that_ask_for_their_length(sampling: dict[str, Any]) -> None:
    """Llama 4's temperatures grow with the position in its layers without RoPE; here with every
    third one.
    """
    settings = LLAMA4 | dict(floor_scale=3, attn_scale=0.5)
    model = model_of("Llama4Text", settings)
    generator = SLOSpecGenerator(
        model, model_of("Llama4Text", settings, noise=0.03), config=DRAFTS_ALWAYS
    )
    prompt = torch.randint(3, 101, (1, 20))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    out = assert_same_as_stock(model, generator.generate, inputs, **sampling, max_new_tokens=24)
    assert out.slo[0].accepted > 0
