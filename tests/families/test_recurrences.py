"""Recurrences over trees against the recurrence itself, node after node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.families.recurrences import (
    Inputs,
    Updates,
    convolution,
    linear_recurrence,
    parents,
    selective_chain,
    selective_tree,
    windows,
)

HEADS = 2
KEY_DIM = 3
VALUE_DIM = 4
CHANNELS = 5
KERNEL = 4


@st.composite
def trees(draw):
    """Parents of the nodes of one or several trees below a state, -1 being the state."""
    size = draw(st.integers(1, 9))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


def ancestors(tree):
    mask = torch.eye(len(tree), dtype=torch.bool)
    for node, parent in enumerate(tree):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def path_to(tree, node):
    return [] if node < 0 else [*path_to(tree, tree[node]), node]


def stepped(state, tree, key, value, decay, beta):
    """States after each node; tensors [heads, nodes, dim]."""
    states = list[torch.Tensor]()
    for node, parent in enumerate(tree):
        before = decay[:, node].exp()[..., None] * (state if parent < 0 else states[parent])
        k = key[:, node]
        v = value[:, node]
        if beta is not None:
            v = beta[:, node] * (v - torch.einsum("hk,hkv->hv", k, before))
        states.append(before + torch.einsum("hk,hv->hkv", k, v))
    return states


@pytest.mark.parametrize("is_delta_rule", [False, True])
@pytest.mark.parametrize("decay_dim", [1, KEY_DIM])
@given(tree=trees(), seed=st.integers(0, 99), split=st.integers(0, 8), node=st.integers(0, 8))
def test_linear_recurrence(is_delta_rule, decay_dim, tree, seed, split, node):
    generator = torch.Generator().manual_seed(seed)

    def random(dim):
        return torch.randn(HEADS, len(tree), dim, generator=generator, dtype=torch.float64)

    query = random(KEY_DIM)
    key = random(KEY_DIM)
    value = random(VALUE_DIM)
    decay = -random(decay_dim).exp()
    beta = random(1).sigmoid() if is_delta_rule else None
    state = torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=generator, dtype=torch.float64)
    states = stepped(state, tree, key, value, decay, beta)
    expected = torch.stack(
        [torch.einsum("hk,hkv->hv", query[:, at], s) for at, s in enumerate(states)], dim=1
    )

    mask = ancestors(tree)
    found = []
    updates = None
    for begin, end in (
        (0, min(split, len(tree))),
        (min(split, len(tree)), len(tree)),
    ):  # as a draft does, by levels
        if begin < end:
            parts = [part[None, :, begin:end] for part in (query, key, value, decay)]
            rate = None if beta is None else beta[None, :, begin:end]
            out, updates = linear_recurrence(
                *parts, rate, state[None], mask[None, begin:end, :end], updates
            )
            found.append(out[0])
    torch.testing.assert_close(torch.cat(found, dim=1), expected)

    node %= len(tree)
    assert updates is not None
    own = Updates(*(tensor[0] for tensor in updates))
    after = own.after(state, torch.tensor(path_to(tree, node)))
    torch.testing.assert_close(after, states[node])


@given(tree=trees(), seed=st.integers(0, 99), node=st.integers(0, 8), has_bias=st.booleans())
def test_convolution(tree, seed, node, has_bias):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(tree), CHANNELS, generator=generator)
    state, weight = (
        torch.randn(KERNEL - 1, CHANNELS, generator=generator),
        torch.randn(CHANNELS, KERNEL),
    )
    bias = torch.randn(CHANNELS, generator=generator) if has_bias else None
    rows = torch.cat((state, inputs))
    window = windows(ancestors(tree)[None], KERNEL)
    others = torch.randn(1, *rows.shape)  # another sequence of the batch
    out = convolution(torch.cat((others, rows[None])), window.expand(2, -1, -1), weight, bias)[1]
    for at in range(len(tree)):
        text = torch.cat((state, inputs[path_to(tree, at)])).T
        expected = torch.nn.functional.conv1d(text[None], weight[:, None], bias, groups=CHANNELS)[
            0, :, -1
        ]
        torch.testing.assert_close(out[at], expected)
    path = path_to(tree, node % len(tree))
    after = Inputs(inputs).after(state, torch.tensor(path))
    torch.testing.assert_close(after, torch.cat((state, inputs[path]))[-(KERNEL - 1) :])


@given(tree=trees(), seed=st.integers(0, 99), split=st.integers(0, 8))
def test_selective_scan(tree, seed, split):
    generator = torch.Generator().manual_seed(seed)
    decays, added = torch.rand(2, len(tree), CHANNELS, KEY_DIM, generator=generator)
    read, state = (
        torch.randn(len(tree), KEY_DIM, generator=generator),
        torch.randn(CHANNELS, KEY_DIM),
    )
    expected = list[torch.Tensor]()
    for at, parent in enumerate(tree):
        expected.append(decays[at] * (state if parent < 0 else expected[parent]) + added[at])
    mask = ancestors(tree)
    split = min(split, len(tree) - 1)
    known = state.new_empty(0, *state.shape)
    outs = []
    for begin, end in ((0, split), (split, len(tree))):
        if begin < end:
            own = slice(begin, end)
            out, known = selective_tree(
                state, known, decays[own], added[own], read[own], parents(mask[begin:end, :end])
            )
            outs.append(out)
    torch.testing.assert_close(known, torch.stack(expected))
    torch.testing.assert_close(
        torch.cat(outs), torch.stack([s @ r for s, r in zip(expected, read, strict=True)])
    )


def test_selective_chain_is_a_tree_without_branches():
    decays, added = torch.rand(2, 7, CHANNELS, KEY_DIM)
    read = torch.randn(7, KEY_DIM)
    state = torch.randn(CHANNELS, KEY_DIM)
    out, after = selective_chain(state, decays, added, read)
    tree_out, states = selective_tree(
        state, state.new_empty(0, *state.shape), decays, added, read, list(range(-1, 6))
    )
    torch.testing.assert_close(out, tree_out)
    torch.testing.assert_close(after, states[-1])


@given(tree=trees())
def test_parents(tree):
    assert parents(ancestors(tree)) == tree
