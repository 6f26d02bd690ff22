"""Tree attention while packed forwards run, and the model's own attention at all other times."""

from __future__ import annotations

import contextvars

import numpy as np
import pytest
import torch

from hf_slospec.model.attention.hook import AttentionHook, active_hook
from hf_slospec.model.attention.sdpa import plan_sequences
from hf_slospec.model.batch import AttentionLayer, CachedSequence, LayerShape, PackedBatch, Span
from hf_slospec.model.kv_cache import KVPool
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


@pytest.mark.parametrize(
    ("window", "chunk"), [(None, None), (4, None), (None, 4), (None, 1), (5, 3)]
)
@pytest.mark.parametrize("length", [0, 3, 6])
def test_sparse_masks_by_brute_force(length, window, chunk):
    """Of each node of a tree whose nodes lie on both sides of an edge of chunks, in steps of two
    forwards.
    """
    tree_mask, offsets = tree_after_chain(2, TREE)
    positions = (length + offsets).tolist()
    sequence = CachedSequence(0, 99, length)
    num_nodes = len(positions)
    for num_tokens in (num_nodes, 3):  # all at once, or the last ones after those staged before
        span = Span(
            sequence,
            0,
            num_tokens,
            torch.from_numpy(tree_mask[-num_tokens:]),
            torch.tensor(positions),
        )
        batch = PackedBatch([span], [span.visible])
        device = torch.device("cpu")
        (keys,) = batch.plan(plan_sequences, device, window, chunk, 1, torch.float32).sequences
        mask = keys.mask
        assert mask is not None and mask.shape == (num_tokens, length + num_nodes)
        for row, node in enumerate(range(num_nodes - num_tokens, num_nodes)):
            for column, position in enumerate([*range(length), *positions]):
                is_before = column < length or bool(tree_mask[node, column - length])
                is_near = window is None or positions[node] - position < window
                is_alike = chunk is None or positions[node] // chunk == position // chunk
                assert (mask[row, column] == 0) == (is_before and is_near and is_alike)


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


def test_layers_may_differ_in_shape():
    shapes = [LayerShape(stored(2, 4), stored(2, 4)), LayerShape(stored(1, 8), stored(1, 6))]
    pool = KVPool(shapes, 5)
    assert [tuple(key.shape) for key in pool.keys] == [(5, 2, 4), (5, 1, 8)]
    assert [tuple(value.shape) for value in pool.values] == [(5, 2, 4), (5, 1, 6)]
    layer = AttentionLayer(LayerShape(stored(2, 8), stored(2, 8)))
    assert PackedModel(tiny_model("llama")).layers == [layer, layer._replace(layer_idx=1)]
