"""Drafters for heads that predict a block of tokens in one forward (DFlash, DFlash2, DSpark,
Domino, XPress, LiLiCorr), and the draft trees built from such predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_slospec.drafters.beam import beam_search
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.level import Beam, Level, Scores
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.batch import CachedSequence, NewTokens
from hf_slospec.model.coupling import coupled, is_ranked
from hf_slospec.request.request import Request
from hf_slospec.tree.best_first import best_first_tree
from hf_slospec.tree.tree import FloatArray, IntArray, TokenTree

if TYPE_CHECKING:
    from hf_slospec.heads.dflash import DFlashHead


class BlockDrafter(FeatureDrafter):
    """Drafts with a :class:`DFlashHead`: one forward predicts all levels of the draft trees."""

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self._process([request for request in requests if self.features[request].num_tokens])
        self.sequences.reserve(requests)
        parts = [
            block_tokens(self.head, self.sequences.of(request), request.tokens)
            for request in requests
        ]
        rows = block_rows(self.head, len(requests), plan.depth)
        outputs = self.sequences.forward(parts, rows).logits
        return self._trees(requests, outputs.view(len(requests), -1, outputs.shape[-1]), plan)

    def _trees(
        self, requests: Sequence[Request], outputs: torch.Tensor, plan: Plan
    ) -> list[TokenTree]:
        """Return one draft tree per request.

        Args:
            requests: one request per block.
            outputs: [num_requests, depth, output_size], outputs of the blocks' tokens.
            plan: depth and width of the trees.
        """
        return block_trees(requests, self.spread(outputs), plan)

    def _process(self, requests: Sequence[Request]) -> None:
        """Cache K/V of the context tokens whose features are waiting, in one packed forward."""
        if not requests:
            return
        self.sequences.reserve(requests)
        begins, features = zip(
            *(self.features[request].take() for request in requests), strict=True
        )
        lengths = [len(part) for part in features]
        combined = self.head.combine(torch.cat(features).to(self.packed.device)).split(lengths)
        sequences = [self.sequences.of(request) for request in requests]
        parts = [context_tokens(*part) for part in zip(sequences, begins, combined, strict=True)]
        self.sequences.forward(parts, torch.empty(0, dtype=torch.int64, device="cpu"))
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.length += length


class SequentialBlockDrafter(BlockDrafter):
    """Drafts with a :class:`SequentialHead`: one forward of the block, then a beam search in which
    the head corrects each level's logits by the tokens chosen before.
    """

    def _trees(
        self, requests: Sequence[Request], outputs: torch.Tensor, plan: Plan
    ) -> list[TokenTree]:
        states = self.head.initial_states(outputs) if self.head.is_recurrent else None
        if self.head.first_read_slot < self.head.first_slot:
            tokens = [[self.head.token_before(request.tokens)] for request in requests]
            before = torch.tensor(tokens, device=outputs.device)
            states = self.head.after(before, outputs[:, 0], states, -1).states
            outputs = outputs[:, self.head.first_slot :]
        plan = replace(plan, depth=min(plan.depth, outputs.shape[1]))
        run = partial(self._grown, outputs)
        return beam_search(requests, plan, None, run, outputs.device, len(requests), states)

    def _grown(self, outputs: torch.Tensor, _: IntArray, level: Level) -> Beam | Scores:
        """Return the beam extended by one tree level, or the scores of that level if choosing its
        nodes needs the requests' sampling noise or grammars; see ``Level.grown``.
        """
        depth = len(level.sizes) - 1
        states = level.inherited_states
        scores: Scores = self.head.after(level.tokens, outputs[:, depth], states, depth)
        if level.is_coupled:
            return scores._replace(logits=self.spread(scores.logits))
        vocabulary = self.head.vocabulary(self.vocab_size)
        if vocabulary is None:
            scores = scores._replace(logits=scores.logits[..., : self.vocab_size])
        return level.extended(scores, vocabulary)


class LatticeBlockDrafter(SequentialBlockDrafter):
    """Drafts with a :class:`LiLiCorrHead`, which scores the candidates of a whole block at once,
    before the beam search.
    """

    def _trees(
        self, requests: Sequence[Request], outputs: torch.Tensor, plan: Plan
    ) -> list[TokenTree]:
        last = [part for request in requests if (part := self.features[request].last) is not None]
        contexts = self.head.combine(torch.cat(last).to(self.packed.device))
        return super()._trees(requests, self.head.lattice(outputs, contexts), plan)


def context_tokens(sequence: CachedSequence, begin: int, combined: torch.Tensor) -> NewTokens:
    """Return one request's part of a packed forward that caches K and V of context tokens.

    Context tokens are committed tokens whose features are known; they have no logits. The caller
    keeps their K and V by raising ``sequence.length``, as after a prefill.

    Args:
        sequence: the request's context tokens that are already cached.
        begin: index of the first new context token among the request's tokens.
        combined: [num_tokens, hidden], from the head's ``combine``.
    """
    num_tokens = len(combined)
    positions = torch.arange(begin, begin + num_tokens, device="cpu")
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device="cpu").tril()
    return NewTokens(
        sequence,
        torch.zeros(num_tokens, dtype=torch.int64, device="cpu"),
        positions,
        mask,
        combined,
        is_chain=True,
    )


def block_tokens(head: DFlashHead, sequence: CachedSequence, token_ids: Sequence[int]) -> NewTokens:
    """Return one request's part of a packed forward: its last token, then mask tokens.

    Args:
        head: the head whose block size, mask token and attention rules apply.
        sequence: the request's cached context tokens, which are all tokens but the last.
        token_ids: all tokens of the request.
    """
    size = head.block_size
    tokens = torch.full((size,), head.mask_token_id, device="cpu")
    tokens[0] = token_ids[-1]
    positions = torch.arange(len(token_ids) - 1, len(token_ids) - 1 + size, device="cpu")
    everything = torch.ones(size, size, dtype=torch.bool, device="cpu")
    mask, windowed_mask = (
        everything if sees_later else everything.tril()
        for sees_later in (head.sees_later, head.sees_later_in_window)
    )
    return NewTokens(
        sequence, tokens, positions, mask, windowed_mask=windowed_mask if head.is_windowed else None
    )


def block_rows(head: DFlashHead, num_requests: int, depth: int) -> torch.Tensor:
    """Return the indices of the block tokens whose outputs are needed to draft ``depth`` levels.

    A block predicts at most ``num_proposals`` levels. Heads that read the whole block need the
    outputs of all its tokens from ``first_read_slot`` on.

    Returns:
        [num_requests * num_rows] int64, indices in a packed batch of one block per request.
    """
    starts = head.block_size * torch.arange(num_requests, device="cpu")
    num_levels = head.num_proposals if head.reads_whole_block else min(depth, head.num_proposals)
    end = head.first_slot + num_levels
    slots = torch.arange(head.first_read_slot, end, device="cpu")
    return (starts[:, None] + slots).flatten()


def block_marginals(
    requests: Sequence[Request], logits: torch.Tensor, num_candidates: int
) -> tuple[IntArray, FloatArray]:
    """Return the most probable tokens of every position and their probabilities.

    For sampled requests, logits are first coupled to the noise with which the target will sample.
    Logits processors that read ``input_ids`` get the most probable tokens of earlier positions.
    Results are copied from the device once.

    Args:
        requests: one request per block.
        logits: [num_requests, depth, vocab], for the positions after each request's last token.
        num_candidates: number of tokens per position; at most the vocabulary's size.

    Returns:
        Tokens [num_requests, depth, num_candidates] int64, most probable first, and their
        probabilities f64.
    """
    ranked = _coupled_positions(requests, logits).float()
    best = ranked.topk(min(num_candidates, ranked.shape[-1]), dim=-1)
    logprobs = best.values - ranked.logsumexp(-1, keepdim=True)
    # Rounding may give a token of probability 1 a log probability above 0. Where no token is
    # allowed, all log probabilities are NaN.
    logprobs = logprobs.clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    tokens, values = torch.stack((best.indices.double(), logprobs.double())).cpu().numpy()
    return tokens.astype(np.int64), np.minimum.accumulate(np.exp(values), axis=-1)


def block_trees(requests: Sequence[Request], logits: torch.Tensor, plan: Plan) -> list[TokenTree]:
    """Return one draft tree per request: its ``plan.depth * plan.width`` most probable prefixes.

    The predictions of a block's positions are taken as independent.

    Args:
        requests: one request per block.
        logits: [num_requests, depth, vocab], for the positions after each request's last token;
            positions beyond ``plan.depth`` are ignored.
        plan: depth and width of the trees.
    """
    max_nodes = plan.depth * plan.width
    tokens, probs = block_marginals(requests, logits[:, : plan.depth], max_nodes)
    return [
        best_first_tree(request.tokens[-1], row_tokens, row_probs, max_nodes)
        for request, row_tokens, row_probs in zip(requests, tokens, probs, strict=True)
    ]


def _coupled_positions(requests: Sequence[Request], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits after each request's sampling noise and grammar, by which candidates are
    ranked.  -> [num_requests, depth, vocab]
    """
    if not any(map(is_ranked, requests)):
        return logits
    levels: list[torch.Tensor] = []  # [num_requests, vocab] each
    for depth in range(logits.shape[1]):
        level = coupled(requests, depth, logits[:, depth : depth + 1], partial(_best_path, levels))
        levels.append(level[:, 0])
    return torch.stack(levels, dim=1)


def _best_path(levels: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """Return the most probable token of each level so far, for one request.  -> [1, depth] int64"""
    if not levels:
        return torch.empty(1, 0, dtype=torch.int64, device="cpu")
    return torch.stack([level[index].argmax() for level in levels])[None]
