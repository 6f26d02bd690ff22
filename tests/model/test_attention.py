"""Tree attention while packed forwards run, and the model's own attention at all other times."""

from __future__ import annotations

import contextvars

import numpy as np

from hf_slospec.model.attention.hook import AttentionHook, active_hook
from hf_slospec.model.batch import AttentionLayer, LayerShape
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.tree_mask import tree_after_chain
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.tiny_models import tiny_model
from tests.support.toys.trees import stored

TREE = TokenTree(
    np.arange(6), np.array([-1, 0, 0, 1, 1, 3]), np.array([0, 1, 1, 2, 2, 3]), np.ones(6)
)


def test_chain_and_tree_masks_against_paths():
    mask, offsets = tree_after_chain(3, TREE)
    assert offsets.tolist() == [0, 1, 2, 3, 3, 4, 4, 5]
    for row in range(8):
        if row < 3:
            seen = set(range(row + 1))
        else:
            # the chain, its last token being the root
            node = row - 2
            seen = {0, 1, 2}
            while node > 0:
                seen.add(node + 2)
                node = int(TREE.parents[node])
        assert set(np.flatnonzero(mask[row]).tolist()) == seen


def test_models_that_share_a_config_point_back_in_any_order():
    contextvars.copy_context().run(
        _leave_in_the_order_of_entry
    )  # which leaves the first one active in this context


def _leave_in_the_order_of_entry():
    model = tiny_model("llama")
    twin = type(model)(model.config)
    first = active_hook(model, AttentionHook())
    second = active_hook(twin, AttentionHook())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "hf_slospec:sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_layers_are_found_with_their_shapes():
    layer = AttentionLayer(LayerShape(stored(2, 8), stored(2, 8)))
    assert PackedModel(tiny_model("llama")).layers == [layer, layer._replace(layer_idx=1)]
