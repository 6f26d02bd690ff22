"""Forwards of heads that predict a block of tokens at a time, and the candidate trees of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hf_slospec.algo.best_first import best_first_tree
from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.coupling import coupled
from hf_slospec.models.heads.dflash import DFlashHead
from hf_slospec.models.kv_cache.pool import CachedSequence


def context_tokens(sequence: CachedSequence, combined: torch.Tensor) -> NewTokens:
    """Return tokens of the text that follow those in a head's cache, given by their features.

    They have no logits. Their K and V are kept by raising the length of the sequence, as after a prefill.

    Args:
        combined: [num_tokens, hidden], what the head's ``combine`` returned.
    """
    num_tokens = len(combined)
    positions = torch.arange(sequence.length, sequence.length + num_tokens)
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return NewTokens(sequence, torch.zeros(num_tokens, dtype=torch.int64), positions, mask, combined, is_chain=True)


def block_tokens(head: DFlashHead, sequence: CachedSequence, root_token: int) -> NewTokens:
    """Return a block: the last token of a text, of which all others are in the head's cache, and mask tokens."""
    size = head.block_size
    tokens = torch.full((size,), head.mask_token_id)
    tokens[0] = root_token
    positions = torch.arange(sequence.length, sequence.length + size)
    everything = torch.ones(size, size, dtype=torch.bool)
    mask, windowed_mask = (
        everything if sees_later else everything.tril() for sees_later in (head.sees_later, head.sees_later_in_window)
    )
    return NewTokens(sequence, tokens, positions, mask, windowed_mask=windowed_mask if head.is_windowed else None)


def block_rows(head: DFlashHead, num_requests: int, depth: int) -> torch.Tensor:
    """Return the tokens of a packed batch of blocks that predict the first ``depth`` positions after the roots.

    Returns:
        [num_requests * min(depth, block_size - 1)] int64, block after block.
    """
    firsts = head.block_size * torch.arange(num_requests)
    return (firsts[:, None] + torch.arange(1, min(depth + 1, head.block_size))).flatten()


def block_marginals(
    requests: Sequence[Request], logits: torch.Tensor, num_candidates: int
) -> tuple[IntArray, FloatArray]:
    """Return the most probable tokens of every position, by one copy from the device.

    Positions of sampled requests are coupled to the noise that will choose their tokens. Processors that read the text
    get the first candidates of the positions before.

    Args:
        logits: [num_requests, depth, vocab], of the positions after the roots.
        num_candidates: tokens per position; fewer in a smaller vocabulary.

    Returns:
        Tokens [num_requests, depth, num_candidates] int64, most probable first, and their probabilities f64.
    """
    levels: list[torch.Tensor] = []  # [num_requests, vocab] each
    for depth in range(logits.shape[1]):
        level = coupled(requests, depth, logits[:, depth : depth + 1], partial(_favourites, levels))
        levels.append(level[:, 0])
    # Rows without a possible token have no probabilities; rounding may put that of a certain one above 1.
    probs = torch.stack(levels, dim=1).float().softmax(-1).nan_to_num(nan=0.0).clamp(max=1.0)
    best = probs.topk(min(num_candidates, probs.shape[-1]), dim=-1)
    on_host = torch.stack((best.indices.double(), best.values.double())).cpu().numpy()
    return on_host[0].astype(np.int64), on_host[1]


def block_trees(requests: Sequence[Request], logits: torch.Tensor, plan: Plan) -> list[TokenTree]:
    """Return candidate trees: the ``plan.depth * plan.width`` most probable prefixes of each block's predictions.

    Args:
        logits: [num_requests, depth, vocab], of the positions after the roots; those below ``plan.depth`` are not used.
    """
    max_nodes = plan.depth * plan.width
    tokens, probs = block_marginals(requests, logits[:, : plan.depth], max_nodes)
    return [
        best_first_tree(request.tokens[-1], own_tokens, own_probs, max_nodes)
        for request, own_tokens, own_probs in zip(requests, tokens, probs, strict=True)
    ]


def _favourites(levels: Sequence[torch.Tensor], place: int) -> torch.Tensor:
    """Return the first candidates of one request's positions so far, as a path.  -> [1, depth] int64"""
    if not levels:
        return torch.empty(1, 0, dtype=torch.int64)
    return torch.stack([level[place].argmax() for level in levels])[None]
