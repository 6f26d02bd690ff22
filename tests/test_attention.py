"""Tree attention: backends against a node-by-node reference, and the model's own attention at all other times."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from hf_slospec import SLOSpecGenerator
from hf_slospec.algo.tree import TokenTree
from hf_slospec.models.attention import AttentionLayer, Span, active_forward, masked_attention, sdpa_attention
from hf_slospec.models.kv_pool import CachedSequence, KVPool, LayerShape
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.sequences import tree_after_chain
from tests.tiny_models import ragged_prompts, tiny_model
from tests.toys import stored

NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
SHAPE = LayerShape(stored(NUM_KV_HEADS, KEY_DIM), stored(NUM_KV_HEADS, VALUE_DIM))
TREES = [
    TokenTree.root_only(3),
    TokenTree(np.arange(6), np.array([-1, 0, 0, 1, 1, 3]), np.array([0, 1, 1, 2, 2, 3]), np.ones(6)),
    TokenTree(np.arange(4), np.array([-1, 0, 1, 2]), np.array([0, 1, 2, 3]), np.ones(4)),
]
CASES = [(prefix_len, chain_len, tree) for prefix_len in (0, 7) for chain_len in (1, 3) for tree in TREES]


def test_chain_and_tree_masks_against_paths() -> None:
    tree = TREES[1]
    mask, offsets = tree_after_chain(3, tree)
    assert offsets.tolist() == [0, 1, 2, 3, 3, 4, 4, 5]
    for row in range(8):
        if row < 3:
            seen = set(range(row + 1))
        else:
            node, seen = row - 2, {0, 1, 2}  # the chain, its last token being the root
            while node > 0:
                seen.add(node + 2)
                node = int(tree.parents[node])
        assert set(np.flatnonzero(mask[row]).tolist()) == seen


def packed_row() -> tuple[KVPool, list[Span], list[tuple[int, list[int], list[int]]], int]:
    """Sequences of every case in one pool.  -> pool, spans, per token (its position, visible slots, their positions)"""
    pool = KVPool([SHAPE], 400)
    pool.keys[0].normal_()
    pool.values[0].normal_()
    spans: list[Span] = []
    tokens: list[tuple[int, list[int], list[int]]] = []
    for prefix_len, chain_len, tree in CASES:
        sequence: CachedSequence = pool.allocate(30)
        mask, offsets = tree_after_chain(chain_len, tree)
        sequence.length = prefix_len
        positions = prefix_len + offsets
        begin = len(tokens)
        for row in range(len(offsets)):
            fresh = np.flatnonzero(mask[row])
            slots = [*range(prefix_len), *(prefix_len + fresh)]
            tokens.append(
                (int(positions[row]), [sequence.start + s for s in slots], [*range(prefix_len), *positions[fresh]])
            )
        spans.append(Span(sequence, begin, len(tokens), torch.from_numpy(mask), torch.from_numpy(positions)))
    return pool, spans, tokens, len(tokens)


@pytest.mark.parametrize("backend", [sdpa_attention, masked_attention])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_backends_against_every_node_alone(backend: Any, window: Any, softcap: Any, has_sinks: bool) -> None:
    pool, spans, tokens, num_tokens = packed_row()
    query = torch.randn(NUM_HEADS, num_tokens, KEY_DIM)
    sinks = torch.randn(NUM_HEADS) if has_sinks else None
    visible = [span.visible for span in spans]
    out = backend(query, pool.keys[0], pool.values[0], spans, visible, 0.3, window, softcap, sinks)
    assert out.shape == (num_tokens, NUM_HEADS, VALUE_DIM)
    for row, (position, slots, positions) in enumerate(tokens):
        seen = [s for s, p in zip(slots, positions, strict=True) if window is None or position - p < window]
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = pool.keys[0][seen, kv_head] @ query[head, row] * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            extra = scores.new_empty(0) if sinks is None else sinks[head : head + 1]
            weights = torch.cat((scores, extra)).softmax(0)[: len(seen)]
            torch.testing.assert_close(out[row, head], weights @ pool.values[0][seen, kv_head])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt-oss"])  # sdpa and eager, padded by mask
def test_plain_forwards_in_other_threads_while_packed_ones_run(family: str) -> None:
    model = tiny_model(family)
    inputs = ragged_prompts(3)
    with torch.no_grad():
        expected = model(**inputs).logits
    generator = SLOSpecGenerator(model, tiny_model(family, noise=0.03))
    done, wrong = threading.Event(), list[int]()

    @torch.no_grad()
    def forward_on() -> None:
        count = 0
        while not done.is_set():
            if not torch.equal(model(**inputs).logits, expected):
                wrong.append(count)
            count += 1

    thread = threading.Thread(target=forward_on)
    thread.start()
    try:
        for _ in range(3):
            generator.generate(**inputs, do_sample=False, max_new_tokens=20)
    finally:
        done.set()
        thread.join()
    assert not wrong


def test_generating_in_several_threads_at_once() -> None:
    model = tiny_model("mistral-window")
    generator = SLOSpecGenerator(model, tiny_model("mistral-window", noise=0.03))
    prompts = [ragged_prompts(2, seed) for seed in range(4)]
    expected = [model.generate(**inputs, do_sample=False, max_new_tokens=25) for inputs in prompts]
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        results[index] = generator.generate(**prompts[index], do_sample=False, max_new_tokens=25, slo_tpot=0.01)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], tokens) for index, tokens in enumerate(expected))
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_config_point_back_in_any_order() -> None:
    model = tiny_model("llama")
    twin = type(model)(model.config)
    first, second = active_forward(model, object()), active_forward(twin, object())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "hf_slospec:sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_layers_may_differ_in_shape() -> None:
    shapes = [LayerShape(stored(2, 4), stored(2, 4)), LayerShape(stored(1, 8), stored(1, 6))]
    pool = KVPool(shapes, 5)
    assert [tuple(key.shape) for key in pool.keys] == [(5, 2, 4), (5, 1, 8)]
    assert [tuple(value.shape) for value in pool.values] == [(5, 2, 4), (5, 1, 6)]
    layer = AttentionLayer(LayerShape(stored(2, 8), stored(2, 8)))
    assert PackedModel(tiny_model("llama")).layers == [layer] * 2
