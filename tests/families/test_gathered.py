"""Keys, masks and positions of packed forwards in which a model's layers attend by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

from hf_slospec.families.gathered import GatheredForward
from hf_slospec.model.attention.hook import (
    AttentionHook,
    Positions,
    active_hook,
    bias_by_position,
)
from hf_slospec.model.batch import LayerShape, Stored, plan_own
from hf_slospec.model.kv_cache import KVPool
from tests.support.oracles.attention_rows import ROWS, case

WINDOW = 4
KEY = Stored(2, 3, torch.float32, torch.device("cpu"))
INDEX_KEY = Stored(1, 5, torch.float32, torch.device("cpu"))


def within_window(batch, head, query, key):
    return causal_mask_function(batch, head, query, key) & (query - key < WINDOW)


def forward_of(made):
    num_slots = len(made.keys)
    pool = KVPool([LayerShape(KEY, KEY, INDEX_KEY)], num_slots)
    for stored in pool.layers[0]:
        stored.normal_()
    position_ids = torch.tensor([[token.position for token in made.tokens]])
    return GatheredForward(pool, made.row, position_ids), pool


@pytest.fixture(params=ROWS.values(), ids=ROWS.keys())
def made(request):
    torch.manual_seed(0)
    return case(request.param, 2, 3, 3, in_order=False)


def test_every_token_sees_its_own_slots_and_no_others(made):
    forward, pool = forward_of(made)
    num_tokens = len(made.tokens)
    own = plan_own(made.row).slots
    key, value, index = (
        torch.randn(1, 2, num_tokens, 3),
        torch.randn(1, 2, num_tokens, 3),
        torch.randn(1, num_tokens, 5),
    )
    keys, values = forward.update(key, value, 0)
    index_keys = forward.update_indexer(index, 0)
    assert torch.equal(pool.keys[0][own], key[0].transpose(0, 1))
    plain, near = (forward.allowed(rule, None) for rule in (causal_mask_function, within_window))
    assert (
        forward.get_mask_sizes() == (keys.shape[2], 0)
        and keys.shape[2] - num_tokens == forward.get_seq_length()
    )
    assert torch.equal(
        torch.arange(num_tokens) + forward.get_seq_length(0), forward.positions.of_tokens[0]
    )
    # That is, a causal mask by places hides nothing from them.
    assert not plain[:, forward.num_earlier :].triu(1).any()
    for token, seen, seen_near in zip(made.tokens, plain, near, strict=True):
        assert forward.positions.of_keys is not None
        assert forward.positions.of_keys[seen].tolist() == token.positions
        assert torch.equal(keys[0][:, seen].transpose(0, 1), pool.keys[0][token.slots])
        assert torch.equal(values[0][:, seen].transpose(0, 1), pool.values[0][token.slots])
        assert torch.equal(index_keys[0][seen], pool.layers[0][2][token.slots, 0])
        assert forward.positions.of_keys[seen_near].tolist() == [
            position for position in token.positions if token.position - position < WINDOW
        ]


def test_mask_builders_are_stock_outside_of_the_context():
    forward, _ = forward_of(case(ROWS["nothing-committed"], 2, 3, 3))
    build = dict(
        batch_size=1, q_length=3, kv_length=5, q_offset=2, mask_function=causal_mask_function
    )
    with active_hook(nn.Module(), forward):
        packed = {
            name: ALL_MASK_ATTENTION_FUNCTIONS[name](**build, dtype=torch.float32)
            for name in ("sdpa", "eager")
        }
    expected = forward.allowed(causal_mask_function, None)
    assert torch.equal(packed["sdpa"][0, 0], expected)
    assert torch.equal(packed["eager"][0, 0] == 0, expected)
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_biases_by_position():
    bias = torch.tensor([[[-6.0, -4.0, -2.0, 0.0]], [[-3.0, -2.0, -1.0, 0.0]]])
    expected = [[[-4.0, -2.0, 0.0, -2.0, 0.0]], [[-2.0, -1.0, 0.0, -1.0, 0.0]]]
    assert bias_by_position(bias, torch.tensor([0, 1, 2, 1, 2])).tolist() == expected
    assert (
        bias_by_position(bias, torch.tensor([3, 9])).tolist() == [[[0.0, 0.0]]] * 2
    )  # beyond: not committed


class Table(nn.Embedding):
    def forward(self, input_ids, position_ids=None):
        return super().forward(
            torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        )


class Attention(nn.Module):
    def forward(self, alibi):
        return alibi


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, alibi):
        out: torch.Tensor = self.attention(alibi=alibi)
        return out


def test_modules_that_count_tokens_get_packed_positions_inside_the_context_only():
    model = nn.ModuleDict({"table": Table(8, 2), "block": Block()})
    ids = torch.zeros(1, 3, dtype=torch.int64)
    alibi = torch.arange(3.0)[None, None]
    positions = torch.tensor([[4, 0, 1]])
    hook = AttentionHook()
    hook.positions = Positions(positions, positions[0] % 3)
    with active_hook(model, hook):
        assert torch.equal(model["table"](ids), model["table"].weight[positions[0]])
        assert torch.equal(
            model["table"](ids, position_ids=positions), model["table"].weight[positions]
        )
        assert model["block"](alibi=alibi).tolist() == [
            [[0.0, -1.0, 0.0]]
        ]  # once, by the innermost module
    hook.positions = Positions(positions)
    with active_hook(model, hook):
        assert torch.equal(model["block"](alibi=alibi), alibi)
    assert Table.forward.__qualname__ == "Table.forward" and not hasattr(
        Attention.forward, "__wrapped__"
    )
    assert torch.equal(model["table"](ids), model["table"].weight[:3])
    assert torch.equal(model["block"](alibi=alibi), alibi)
