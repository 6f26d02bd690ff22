"""Drafting with heads that predict one token after another (EAGLE-3, MTP), and P-EAGLE's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from hf_slospec.drafters.beam import beam_search
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.level import Level, Scores, Vocabulary
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.block_drafter import block_trees
from hf_slospec.model.batch import NewTokens
from hf_slospec.model.transfer import to_device
from hf_slospec.model.tree_mask import causal_mask, draft_nodes
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray, TokenTree

if TYPE_CHECKING:
    from hf_slospec.heads.mtp import DraftHead


@dataclass(frozen=True, eq=False)
class HeadNetwork:
    """Network of a drafting head; see :class:`Network`."""

    head: DraftHead
    vocab_size: int  # the target's

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.head.vocabulary(self.vocab_size)

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        assert states is not None, "a head returns hidden states"
        return {"inputs_embeds": torch.cat((self.head.embed_tokens(tokens), states), dim=-1)[None]}

    def scores(self, outputs: torch.Tensor) -> Scores:
        size = self.head.hidden_size
        logits = outputs[..., :-size]
        if self.head.target_ids is None:
            logits = logits[..., : self.vocab_size]
        return Scores(logits, outputs[..., -size:])


class HeadDrafter(FeatureDrafter):
    """Beam search on the predictions of a head (:class:`DraftHead`), whose K/V cache has an entry
    per known feature.
    """

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        network = HeadNetwork(self.head, self.vocab_size)
        rows = self.packed.num_draft_rows(len(requests))
        run = partial(self._run, requests)
        return beam_search(requests, plan, network, run, self.packed.device, rows)

    def _run(self, requests: Sequence[Request], indices: IntArray, level: Level) -> Any:
        """Forward the last layer of the beam of some requests, or for roots the entries of all
        waiting features; see ``Level.grown``.
        """
        requests = [requests[index] for index in indices]
        if level.is_root:
            return self._process(requests, level)
        sequences = [self.sequences.of(request) for request in requests]
        # A token's entry has the position of the token before, whose feature it takes.
        positions = [len(request.tokens) - 2 for request in requests]
        parts = draft_nodes(self.packed, sequences, positions, level.sizes)
        return self.sequences.draft(
            parts, torch.arange(len(requests) * level.beam, device="cpu"), level
        )

    def _process(
        self,
        requests: Sequence[Request],
        level: Level | None = None,
        masks: torch.Tensor | None = None,
    ) -> Any:
        """Cache the entries of all waiting features; return the level's outputs for each request's
        last entry.

        Args:
            requests: those with features.
            level: the first level of a beam; None: return the forward's outputs.
            masks: [num_masks, embedding + hidden], inputs of further entries behind each last one,
                whose outputs are returned too, and which are not kept.
        """
        num_masks = 0 if masks is None else len(masks)
        self.sequences.reserve(requests)
        for request in requests:
            # A step was undone: forward the last entry again.
            if not self.features[request].num_tokens:
                self.sequences.of(request).length -= 1
        begins, features = zip(
            *(self.features[request].take() for request in requests), strict=True
        )
        lengths = [len(part) for part in features]
        tokens = [
            token
            for request, begin, length in zip(requests, begins, lengths, strict=True)
            for token in request.tokens[begin + 1 : begin + 1 + length]
        ]
        ids = to_device(torch.tensor(tokens, device="cpu"), self.packed.device)
        hidden = self.head.combine(torch.cat(features).to(self.packed.device))
        inputs = torch.cat((self.head.embed_tokens(ids), hidden), dim=-1).split(lengths)
        parts = []
        for request, begin, entry_ids, embeds in zip(
            requests, begins, ids.split(lengths), inputs, strict=True
        ):
            sequence = self.sequences.of(request)
            if masks is not None:
                embeds = torch.cat((embeds, masks))
                entry_ids = pad(entry_ids, (0, num_masks))
            positions = torch.from_numpy(
                self.packed.clamp_positions(np.arange(begin, begin + len(embeds)))
            )
            parts.append(
                NewTokens(
                    sequence, entry_ids, positions, causal_mask(len(embeds)), embeds, is_chain=True
                )
            )
        last_rows = torch.from_numpy(np.cumsum(np.array(lengths) + num_masks) - 1)
        if num_masks:
            last_rows = (last_rows[:, None] + torch.arange(-num_masks, 1, device="cpu")).flatten()
        if level is None:
            outputs: Any = self.sequences.forward(parts, last_rows)
        else:
            outputs = self.sequences.draft(parts, last_rows, level)
        for request, length in zip(requests, lengths, strict=True):
            self.sequences.of(request).length += length
        return outputs


class PEagleDrafter(HeadDrafter):
    """Trees of the most probable prefixes of what a P-EAGLE head predicts, with one forward for all
    levels.
    """

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        depth = min(plan.depth, self.head.num_proposals)
        outputs = self._process(requests, masks=self.head.mask_inputs(depth - 1)).logits
        logits = outputs.view(len(requests), depth, -1)[..., : -self.head.hidden_size]
        return block_trees(requests, self.spread(logits), plan)
