"""Training-time test of EAGLE-3: drafting is unrolled over several levels, as it will be done.

A level's entries take the hidden states that the entries of the level above returned, and the text's own tokens. They
attend to the first level's entries before them, and to their own entries above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_slospec.drafters.heads.head import DraftHead

LEVEL_WEIGHT = 0.8  # a level's loss counts so much relative to the level above


class Rows(NamedTuple):
    """A batch of texts, padded on the right, with what the target says of them."""

    ids: torch.Tensor  # [batch, length] int64
    counts: torch.Tensor  # [batch, length] bool, whether the next token is one to draft
    features: torch.Tensor  # [batch, length, num_features]
    probs: torch.Tensor | None  # [batch, length, draft_vocab] f32, of the next token; None: not known


def unrolled(
    head: DraftHead, ids: torch.Tensor, features: torch.Tensor, levels: int, first: int = 0, stride: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each level's logits, with the positions whose next tokens they predict.

    The first level has an entry for every token but the last ones, whose levels would be beyond the text's end. Levels
    below it have them for every ``stride``-th from ``first`` on: they do not attend to each other.

    Args:
        head: the network.
        ids: [batch, length] int64.
        features: [batch, length, num_features].
        levels: number of levels.
        first: index of the first entry that goes on below the first level.
        stride: distance of these entries.

    Yields:
        Logits [batch, num_entries, draft_vocab] and positions [num_entries] int64.
    """
    num_entries, device = ids.shape[1] - 1 - levels, ids.device
    later = torch.arange(first, num_entries, stride, device=device)
    index = torch.arange(num_entries, device=device)
    mask = torch.ones(num_entries, num_entries, dtype=torch.bool, device=device).tril()
    cache, hidden = DynamicCache(), head.combine(features[:, :num_entries])
    for level in range(levels):
        embeds = head.embed_tokens(ids[:, index + 1 + level])
        bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
        outputs = head(
            inputs_embeds=torch.cat((embeds, hidden), dim=-1),
            attention_mask=bias.expand(len(ids), 1, -1, -1),
            position_ids=index[None] + level,
            cache=cache,
        ).logits
        logits, hidden = outputs.split([outputs.shape[-1] - head.hidden_size, head.hidden_size], dim=-1)
        yield logits, index + 1 + level
        if level == 0:
            hidden, index, mask = hidden[:, later], later, mask[later]
        mask = torch.cat((mask, torch.eye(len(later), dtype=torch.bool, device=device)), dim=1)


def loss_of(head: DraftHead, rows: Rows, levels: int, first: int, stride: int) -> torch.Tensor:
    """Return the weighted mean, over levels, of the cross-entropy to the target's distribution.

    Args:
        head: the network.
        rows: texts with the target's probabilities.
        levels, first, stride: as for :func:`unrolled`.
    """
    assert rows.probs is not None, "texts to train on have probabilities"
    losses, weights = [], [LEVEL_WEIGHT**level for level in range(levels)]
    for logits, positions in unrolled(head, rows.ids, rows.features, levels, first, stride):
        entropies = F.cross_entropy(
            logits.float().flatten(0, 1), rows.probs[:, positions].flatten(0, 1), reduction="none"
        )
        counts = rows.counts[:, positions].flatten()
        losses.append((entropies * counts).sum() / counts.sum().clamp(min=1))
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return torch.as_tensor(total) / sum(weights)


@torch.no_grad()
def tokens_per_step(head: DraftHead, batches: Iterable[Rows], levels: int) -> float:
    """Return the expected tokens per step of greedy chains, on greedy texts of the target.

    It is the mean over all tokens after which a chain may begin, as if steps began at each of them equally often.
    """
    num_accepted, num_chains = 0, 0
    for rows in batches:
        accepted = begins = None
        for logits, positions in unrolled(head, rows.ids, rows.features, levels):
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
