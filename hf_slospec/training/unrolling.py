"""Unrolling of all draft levels of a head over training texts, and the loss and the accepted tokens
that follow from it.

Heads that draft token by token are trained as in EAGLE-3's training-time test. An entry is the
head's input for one text position at one draft level: a token of the text, and the hidden state
that the head returned for this position at the level above. It attends to the first level's entries
up to this position, and to entries of the same position at the levels between. DSpark heads draft
blocks. A block begins at a token of the text and predicts the tokens after it, each given the
text's token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_slospec.heads.dspark import DSparkHead
from hf_slospec.heads.mtp import DraftHead

LEVEL_WEIGHT = 0.8  # weight of a level's loss, relative to the level above
# Distance, in tokens, of the text positions that have entries below the first level, and of blocks
STRIDE = 5


class TextBatch(NamedTuple):
    """A batch of texts, padded on the right, with hidden states and probabilities of the target."""

    ids: torch.Tensor  # [batch, length] int64
    counts: torch.Tensor  # [batch, length] bool, whether the next token enters the loss
    # [batch, length, num_features], hidden states of the target that the head reads
    features: torch.Tensor
    # [batch, length, draft_vocab] f32, the target's for the next token; None: not computed
    probs: torch.Tensor | None


class UnrolledLevel(NamedTuple):
    """Predictions of a head at one level of drafting."""

    logits: torch.Tensor  # [batch, num_entries, draft_vocab]
    positions: torch.Tensor  # [num_entries] int64, in the text; the next tokens are predicted
    # [batch, num_entries] f32, predicted by the confidence head; None: the head has none
    log_acceptance: torch.Tensor | None = None


def unrolled(
    head: DraftHead,
    ids: torch.Tensor,
    features: torch.Tensor,
    levels: int,
    first: int = 0,
    stride: int = 1,
) -> Iterator[UnrolledLevel]:
    """Yield the predictions at each draft level of a head that drafts token by token.

    The first level has an entry for every token except the last ones, whose deeper levels would lie
    beyond the text's end. Deeper levels have entries for every ``stride``-th token from ``first``
    on. The others can be left out, as entries of different positions do not attend to each other
    there.

    Args:
        head: the EAGLE-3 head or MTP layer.
        ids: [batch, length] int64.
        features: [batch, length, num_features].
        levels: number of levels.
        first: index of the first token that has entries below the first level.
        stride: distance between such tokens.
    """
    num_entries = ids.shape[1] - 1 - levels
    device = ids.device
    later = torch.arange(first, num_entries, stride, device=device)
    index = torch.arange(num_entries, device=device)
    mask = torch.ones(num_entries, num_entries, dtype=torch.bool, device=device).tril()
    cache = DynamicCache()
    hidden = head.combine(features[:, :num_entries])
    for level in range(levels):
        embeds = head.embed_tokens(ids[:, index + 1 + level])
        bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
        outputs = head(
            inputs_embeds=torch.cat((embeds, hidden), dim=-1),
            attention_mask=bias.expand(len(ids), 1, -1, -1),
            position_ids=index[None] + level,
            cache=cache,
        ).logits
        logits, hidden = outputs.split(
            [outputs.shape[-1] - head.hidden_size, head.hidden_size], dim=-1
        )
        yield UnrolledLevel(logits, index + 1 + level)
        if level == 0:
            hidden = hidden[:, later]
            index = later
            mask = mask[later]
        mask = torch.cat((mask, torch.eye(len(later), dtype=torch.bool, device=device)), dim=1)


def unrolled_blocks(
    head: DSparkHead,
    ids: torch.Tensor,
    features: torch.Tensor,
    levels: int,
    first: int = 0,
    stride: int = 1,
) -> Iterator[UnrolledLevel]:
    """Yield the predictions at each draft level of a block head, with blocks at every ``stride``-th
    token from ``first + 1`` on.

    A block attends to the features of the tokens before it, and to all of its own tokens, of which
    it has ``levels``. Arguments are as for :func:`unrolled`.
    """
    assert head.block_size == levels and not head.first_slot and not head.is_recurrent
    length = ids.shape[1] - 1 - levels
    device = ids.device
    cache = DynamicCache()
    # Text positions at which blocks begin
    roots = torch.arange(1 + first, 1 + length, stride, device=device)
    tokens = torch.full((len(ids), len(roots), levels), head.mask_token_id, device=device)
    tokens[..., 0] = ids[:, roots]
    context = torch.arange(length, device=device)
    head.cache_context(head.combine(features[:, :length]), context[None], cache)
    begins, numbers = (
        part.repeat_interleave(levels) for part in (roots, torch.arange(len(roots), device=device))
    )
    mask = torch.cat((context < begins[:, None], numbers == numbers[:, None]), dim=1)
    bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
    outputs = head(
        input_ids=tokens.flatten(1),
        attention_mask=bias.expand(len(ids), 1, -1, -1),
        position_ids=(roots[:, None] + torch.arange(levels, device=device)).flatten()[None],
        cache=cache,
    ).logits.view(len(ids), len(roots), levels, -1)
    for level in range(levels):
        read = ids[:, roots + level]
        parents = read.flatten()[:, None]
        logits, _, log_acceptance = head.after(
            parents, outputs[:, :, level].flatten(0, 1), None, level
        )
        yield UnrolledLevel(
            logits.view(*read.shape, -1),
            roots + level,
            None if log_acceptance is None else log_acceptance.view(read.shape),
        )


def _unroll(head: DraftHead | DSparkHead) -> Callable[..., Iterator[UnrolledLevel]]:
    return unrolled_blocks if isinstance(head, DSparkHead) else unrolled


def loss_of(head: DraftHead | DSparkHead, rows: TextBatch, levels: int, first: int) -> torch.Tensor:
    """Return the weighted mean, over levels, of the cross-entropy to the target's distribution.

    A confidence head adds the cross-entropy between its predicted acceptance and the acceptance
    rate when the target samples, which is the overlap of draft and target distribution.

    Args:
        head: the head that is trained.
        rows: texts with the target's probabilities.
        levels: number of levels.
        first: index of the first token that has entries below the first level, or of the token
            before the first block.
    """
    assert rows.probs is not None, "texts to train on have probabilities"
    losses = []
    weights = [LEVEL_WEIGHT**level for level in range(levels)]
    for level in _unroll(head)(head, rows.ids, rows.features, levels, first, STRIDE):
        logits = level.logits.float().flatten(0, 1)
        probs = rows.probs[:, level.positions].flatten(0, 1)
        entropies = F.cross_entropy(logits, probs, reduction="none")
        if level.log_acceptance is not None:
            entropies = entropies + _confidence_loss(
                level.log_acceptance.flatten(), logits.detach(), probs
            )
        counts = rows.counts[:, level.positions].flatten()
        losses.append((entropies * counts).sum() / counts.sum().clamp(min=1))
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return torch.as_tensor(total) / sum(weights)


def _confidence_loss(
    log_acceptance: torch.Tensor, logits: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy of predicted acceptance to the overlap of both distributions.  ->
    [num_rows] f32

    Args:
        log_acceptance: [num_rows] f32.
        logits: [num_rows, draft_vocab] f32, without gradients.
        probs: [num_rows, draft_vocab] f32, the target's.
    """
    overlap = torch.minimum(logits.softmax(-1), probs).sum(-1)
    log_rejection = (-torch.expm1(log_acceptance)).clamp(min=torch.finfo(torch.float32).tiny).log()
    return -overlap * log_acceptance - (1 - overlap) * log_rejection


@torch.no_grad()
def tokens_per_step(
    head: DraftHead | DSparkHead, batches: Iterable[TextBatch], levels: int
) -> float:
    """Return the expected tokens per step of greedy chains, on greedy texts of the target.

    This is the mean over all positions at which a chain may begin; in generation, steps do not
    begin at all positions equally often."""
    num_accepted = 0
    num_chains = 0
    # Blocks begin at every token, and are computed in several parts to save memory.
    num_parts = STRIDE if isinstance(head, DSparkHead) else 1
    for rows in batches:
        for first in range(num_parts):
            accepted = begins = None
            for logits, positions, _ in _unroll(head)(
                head, rows.ids, rows.features, levels, first, num_parts
            ):
                drafted = logits.argmax(-1)
                if head.target_ids is not None:
                    drafted = head.target_ids[drafted]
                hits = (drafted == rows.ids[:, positions + 1]) & rows.counts[:, positions]
                begins = rows.counts[:, positions] if begins is None else begins
                accepted = hits if accepted is None else accepted & hits
                num_accepted += int((accepted & begins).sum())
            assert begins is not None, "at least one level"
            num_chains += int(begins.sum())
    return 1 + num_accepted / max(1, num_chains)
