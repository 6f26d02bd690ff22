"""Drafters for heads that draft token by token (EAGLE-3, MTP), and for P-EAGLE heads.

The networks are in ``eagle3.py`` and ``mtp.py``.
"""

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
    """Adapter through which beam search runs a drafting head; see :class:`Network`."""

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
    """Drafts by beam search with a :class:`DraftHead`, whose K/V cache has one entry per feature of
    a committed token.
    """

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        network = HeadNetwork(self.head, self.vocab_size)
        rows = self.packed.num_draft_rows(len(requests))
        run = partial(self._run, requests)
        return beam_search(requests, plan, network, run, self.packed.device, rows)

    def _run(self, requests: Sequence[Request], indices: IntArray, level: Level) -> Any:
        """Run the head on the last tree level of the requests with these indices.

        At the root level, the head instead processes all features that are waiting. For the return
        value see ``Level.grown``.
        """
        requests = [requests[index] for index in indices]
        if level.is_root:
            return self._process(requests, level)
        sequences = [self.sequences.of(request) for request in requests]
        # An entry has the position of the token whose feature it takes, which is the token before
        # the one whose embedding it takes.
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
        """Run the head on all waiting features in one packed forward, which caches their entries.

        Args:
            requests: the requests to process; all of them have had features.
            level: root level of a beam search, which computes its next level from the outputs;
                None: return the outputs of the forward.
            masks: [num_masks, embedding + hidden], inputs of mask entries to append to each
                request; their outputs are returned too, and their K/V is not kept.

        Returns:
            The outputs for each request's last entry and its mask entries.
        """
        num_masks = 0 if masks is None else len(masks)
        self.sequences.reserve(requests)
        for request in requests:
            # Nothing is waiting because a step was undone. The last feature is processed again, as
            # its entry's outputs are needed.
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
    """Drafts with a :class:`PEagleHead`: one forward predicts all levels of the draft trees."""

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        depth = min(plan.depth, self.head.num_proposals)
        outputs = self._process(requests, masks=self.head.mask_inputs(depth - 1)).logits
        logits = outputs.view(len(requests), depth, -1)[..., : -self.head.hidden_size]
        return block_trees(requests, self.spread(logits), plan)
