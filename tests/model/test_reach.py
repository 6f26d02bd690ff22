"""What a model's layers see, as read from the masks that it builds; texts longer than windows and
chunks.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import masking_utils

from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import Reach, reach_of
from tests.support.stock_matrix import model_of
from tests.support.toys.tiny_models import WINDOW, tiny_model

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [2, 3, 9, 4096])
def test_masks_of_every_kind(size):
    window = masking_utils.sliding_window_causal_mask_function(size)
    chunks = masking_utils.chunked_causal_mask_function(size, NO_PADDING)
    assert reach_of(masking_utils.causal_mask_function, None) == Reach()
    assert reach_of(masking_utils.causal_mask_function, size) == Reach()
    assert reach_of(window, size) == Reach(window=size)
    assert reach_of(chunks, size) == Reach(chunk=size)
    for other in (window, chunks):
        assert reach_of(other, size + 1) is None and reach_of(other, None) is None


def test_masks_that_are_none_of_these():
    both = masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5),
        masking_utils.chunked_causal_mask_function(9, NO_PADDING),
    )
    assert reach_of(both, 5) is None and reach_of(both, 9) is None
    assert reach_of(masking_utils.bidirectional_mask_function, None) is None
    looks_up = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.int64))
    assert reach_of(looks_up, None) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_of_models(attention):
    expected = {
        "llama4-chunks": [Reach(chunk=WINDOW), Reach()],
        "phimoe-window": [Reach(window=WINDOW)] * 2,
    }
    for name, reaches in expected.items():
        model = copy.deepcopy(model_of(name))
        model.set_attn_implementation(attention)
        assert [Reach(layer.window, layer.chunk) for layer in PackedModel(model).layers] == reaches
        assert model.config._attn_implementation == attention
    found = [Reach(layer.window, layer.chunk) for layer in PackedModel(tiny_model("gemma3")).layers]
    assert found == [Reach(window=WINDOW), Reach()]
