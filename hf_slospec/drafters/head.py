"""Drafting with a trained head (EAGLE-3, MTP), which reads hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hf_slospec.drafters.beam import Beam, Level, Scores, Vocabulary, beam_search
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.heads.block_drafter import BlockDrafter, SequentialBlockDrafter, block_trees
from hf_slospec.heads.dflash import DFlashHead, SequentialHead
from hf_slospec.heads.eagle3 import PEagleHead
from hf_slospec.heads.mtp import DraftHead
from hf_slospec.model.batch import NewTokens
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import vocab_size
from hf_slospec.model.transfer import to_device
from hf_slospec.model.tree_mask import causal_mask, draft_nodes
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray, TokenTree


@dataclass(frozen=True, eq=False)
class HeadNetwork:
    """Network of a drafting head; see :class:`Network`."""

    head: DraftHead
    vocab_size: int  # the target's

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Tokens of a reduced vocabulary; None: the head's ids are the target's."""
        ids = self.head.target_ids
        return None if ids is None else Vocabulary(ids, self.vocab_size)

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return embeddings and hidden states, concatenated, [1, num_tokens, embedding + hidden]."""
        assert states is not None, "a head returns hidden states"
        return {"inputs_embeds": torch.cat((self.head.embed_tokens(tokens), states), dim=-1)[None]}

    def scores(self, outputs: torch.Tensor) -> Scores:
        """Return logits and hidden states, which a head returns concatenated."""
        logits, states = (
            outputs[..., : -self.head.hidden_size],
            outputs[..., -self.head.hidden_size :],
        )
        return Scores(
            logits if self.head.target_ids is not None else logits[..., : self.vocab_size], states
        )


class HeadDrafter(FeatureDrafter):
    """Beam search on the predictions of a head (:class:`DraftHead`), whose K/V cache has an entry
    per known feature.
    """

    @property
    def head(self) -> DraftHead:
        """The network."""
        head: DraftHead = self.packed.model
        return head

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        network, rows = (
            HeadNetwork(self.head, self.vocab_size),
            self.packed.num_draft_rows(len(requests)),
        )
        return beam_search(
            requests, plan, network, partial(self._run, requests), self.packed.device, rows
        )

    def _run(self, requests: Sequence[Request], indices: IntArray, level: Level) -> Beam | Scores:
        """Forward the last layer of the beam of some requests, or for roots the entries of all
        waiting features.
        """
        grown: Beam | Scores
        requests = [requests[index] for index in indices]
        if level.is_root:
            grown = self._process(requests, level)
            return grown
        sequences = [self.sequences.of(request) for request in requests]
        # A token's entry has the position of the token before, whose feature it takes.
        positions = [len(request.tokens) - 2 for request in requests]
        parts = draft_nodes(self.packed, sequences, positions, level.sizes)
        grown = self.sequences.draft(
            parts, torch.arange(len(requests) * level.beam, device="cpu"), level
        )
        return grown

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
            if not self.features.num_waiting(
                request
            ):  # a step was undone: forward the last entry again
                self.sequences.of(request).length -= 1
        begins, features = zip(*(self.features.take(request) for request in requests), strict=True)
        lengths = [len(part) for part in features]
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        tokens = [
            r.tokens[begin + 1 : end + 1]
            for r, begin, end in zip(requests, begins, ends, strict=True)
        ]
        ids = to_device(
            torch.tensor([token for new in tokens for token in new], device="cpu"),
            self.packed.device,
        )
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

    @property
    def head(self) -> PEagleHead:
        """The network."""
        head: PEagleHead = self.packed.model
        return head

    @classmethod
    def min_nodes(cls, head: PEagleHead) -> int:
        return head.num_proposals

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        network, depth = (
            HeadNetwork(self.head, self.vocab_size),
            min(plan.depth, self.head.num_proposals),
        )
        outputs = self._process(requests, masks=self.head.mask_inputs(depth - 1)).logits
        logits = network.scores(outputs.view(len(requests), depth, -1)).logits
        return block_trees(
            requests,
            logits if network.vocabulary is None else network.vocabulary.spread(logits),
            plan,
        )


@dataclass(frozen=True, repr=False)
class HeadMethod(DraftMethod):
    """A trained head that reads hidden states of the target, of any format in ``drafters/heads``."""

    head: DraftHead | DFlashHead

    @property
    def kind(self) -> str:
        return self.head.kind

    @property
    def model(self) -> Any:
        return self.head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    def check(self, target: Any) -> None:
        config = target.config.get_text_config(decoder=True)
        here = next(target.parameters())
        sizes = self.head.config.vocab_size, self.head.target_hidden_size
        targets = vocab_size(target), config.hidden_size
        if sizes != targets:
            raise IncompatibleDraftError(
                f"the {self.kind} is for a target with a vocabulary of {sizes[0]} tokens and a hidden size of "
                f"{sizes[1]}; this one has {targets[0]} and {targets[1]}; use a head that was trained with this target"
            )
        for parameter in self.head.parameters():  # all of them, as some are the target's
            if (parameter.device, parameter.dtype) != (here.device, here.dtype):
                raise IncompatibleDraftError(
                    f"the {self.kind} is in {parameter.dtype} on {parameter.device} and the target in {here.dtype} on "
                    f"{here.device}; load it again after the target was moved or cast"
                )

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        block = SequentialBlockDrafter if isinstance(self.head, SequentialHead) else BlockDrafter
        by_level = PEagleDrafter if isinstance(self.head, PEagleHead) else HeadDrafter
        make = block if isinstance(self.head, DFlashHead) else by_level
        return make(draft, room.max_nodes, room.vocab_size, room.max_slots, room.max_kept)
