"""Masks, positions and token ids of the new tokens of packed forwards: a chain of tokens after a
sequence's committed ones, and the nodes of its draft tree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_slospec.model.batch import FIRST_SEEN, CachedSequence, NewTokens
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.tree.tree import TokenTree

# Tokens. Masks of chains up to this length are cached, as most chains of a step are short.
MAX_CACHED_LEN = 16
MAX_LAYOUTS = 64  # maximum number of cached results of _level_layout


def chain(
    packed: PackedModel,
    sequence: CachedSequence,
    tokens: Sequence[int],
) -> NewTokens:
    """Return new tokens that follow the committed ones; each attends to all tokens before it."""
    mask = causal_mask(len(tokens))
    return _new_tokens(packed, sequence, tokens, np.arange(len(tokens)), mask, is_chain=True)


def chain_and_tree(
    packed: PackedModel,
    sequence: CachedSequence,
    tokens: Sequence[int],
    tree: TokenTree,
) -> NewTokens:
    """Return new tokens: a chain, whose last token is the tree's root, and the tree's other
    nodes.
    """
    if tree.num_nodes == 1:
        return chain(packed, sequence, tokens)
    mask, offsets = tree_after_chain(len(tokens), tree)
    return _new_tokens(
        packed, sequence, [*tokens, *tree.tokens[1:]], offsets, torch.from_numpy(mask)
    )


def tree_after_chain(chain_len: int, tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Return mask and position offsets of a chain that ends with the tree's root, followed by the
    tree's other nodes.

    Returns:
        mask [num_tokens, num_tokens] bool, True = may attend; and offsets [num_tokens] int64,
            positions minus the position of the chain's first token. num_tokens is chain_len +
            tree.num_nodes - 1.
    """
    num_tokens = chain_len + tree.num_nodes - 1
    mask = np.tri(num_tokens, dtype=np.bool_)
    mask[chain_len:, chain_len:] = tree.ancestor_mask()[1:, 1:]
    offsets = np.concatenate((np.arange(chain_len), chain_len - 1 + tree.depths[1:]))
    return mask, offsets


def draft_nodes(
    packed: PackedModel,
    sequences: Sequence[CachedSequence],
    root_positions: Sequence[int],
    sizes: Sequence[int],
) -> list[NewTokens]:
    """Return the last level of each request's draft tree as new tokens, for trees whose tokens only
    the device knows.

    Args:
        packed: the draft model.
        sequences: one per request.
        root_positions: [num_requests], positions of the roots.
        sizes: number of nodes of each level of one tree; the first level is the root, whose K/V is
            cached.

    Returns:
        One part per request. Its token ids are indices into the tokens of all requests' last
            levels, [num_requests * beam]; its mask holds indices into the level's table of mask
            values, which begins with :data:`FIRST_SEEN` constant values.
    """
    depths, indices, masks = _level_layout(len(sequences), tuple(sizes))
    positions = torch.from_numpy(packed.clamp_positions(np.add.outer(root_positions, depths)))
    columns = zip(sequences, indices, positions.unbind(), masks, strict=True)
    return [NewTokens(*column) for column in columns]


@functools.lru_cache(maxsize=MAX_LAYOUTS)
def _level_layout(
    num_requests: int, sizes: tuple[int, ...]
) -> tuple[np.ndarray, Sequence[torch.Tensor], Any]:
    """Return depths of all nodes but the root, and each request's token ids and masks, as indices
    (see :func:`draft_nodes`). The result is cached and must not be changed.
    """
    beam = sizes[-1]
    num_staged = sum(sizes[1:])
    depths = np.repeat(np.arange(len(sizes)), sizes)[1:]
    indices = torch.arange(num_requests * beam, device="cpu").view(num_requests, beam)
    masks = torch.arange(FIRST_SEEN, FIRST_SEEN + num_requests * beam * num_staged, device="cpu")
    return depths, indices.unbind(), masks.view(num_requests, beam, num_staged).unbind()


def causal_mask(length: int) -> torch.Tensor:
    """Return the causal mask of a chain. It may be cached and must not be changed.  -> [length,
    length] bool
    """
    return _cached_mask(length) if length <= MAX_CACHED_LEN else _new_mask(length)


def _new_mask(length: int) -> torch.Tensor:
    return torch.from_numpy(np.tri(length, dtype=np.bool_))


_cached_mask = functools.cache(_new_mask)


def _new_tokens(
    packed: PackedModel,
    sequence: CachedSequence,
    tokens: Sequence[int],
    offsets: np.ndarray,
    mask: torch.Tensor,
    is_chain: bool = False,
) -> NewTokens:
    embeds = sequence.embeds
    if embeds is not None:
        embeds = embeds[sequence.length : sequence.length + len(tokens)]
    assert embeds is None or len(embeds) in (0, len(tokens)), (
        "a prompt given as embeddings is prefilled by itself"
    )
    return NewTokens(
        sequence,
        torch.from_numpy(packed.clamp_tokens(np.array(tokens, dtype=np.int64))),
        torch.from_numpy(packed.clamp_positions(sequence.length + offsets)),
        mask,
        embeds if embeds is not None and len(embeds) else None,
        is_chain,
    )
