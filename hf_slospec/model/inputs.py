"""Inputs and outputs of packed forwards, which all forward paths share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hf_slospec.forks import cached_property
from hf_slospec.model.batch import AttentionPlan, NewTokens, PackedBatch
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.properties import hidden_states

PlanKey = tuple[Any, ...]  # (make, device, *arguments): arguments with which layers call plan()


class DraftLevel(Protocol):
    """One level of drafting on the device: what a drafter computes before and after the draft
    model's forward. A CUDA graph can contain all three.
    """

    @property
    def is_root(self) -> bool:
        """Return whether this is the first level of its draft trees; later levels follow without a
        pause.
        """

    @property
    def num_logits(self) -> int:
        """Number of rows of logits that :meth:`outputs` takes."""

    def resolved(self, parts: Sequence[NewTokens]) -> Sequence[NewTokens]:
        """Return the parts with token ids and boolean masks in place of indices, for eager
        forwards.
        """

    @property
    def seen(self) -> torch.Tensor | None:
        """Table of booleans that the parts' masks hold indices into, [num_values] bool; None: masks
        are boolean.
        """

    def inputs(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward, made from ``ForwardTensors.tokens``."""

    def outputs(self, logits: torch.Tensor) -> Any:
        """Return what the drafter computes from logits [num_logits, vocab]: tensors in any nesting
        of tuples.
        """


class Outputs(NamedTuple):
    """Tensors that a packed forward returns."""

    logits: torch.Tensor  # [num_logits, vocab], in the model's dtype
    # [num_tokens, num_feature_layers * hidden], hidden states of the feature layers, concatenated
    features: torch.Tensor | None = None
    drafted: Any = None  # DraftLevel.outputs, if the path has computed them


@dataclass(frozen=True, eq=False)
class ForwardInputs:
    """New tokens of several sequences, and which logits and hidden states a forward returns for
    them.
    """

    pool: KVPool  # storage of the parts' sequences
    parts: Sequence[NewTokens]  # one per sequence, in the order of the packed batch
    # [num_logits] int64, indices in the packed batch of the tokens whose logits to return
    logit_rows: torch.Tensor
    feature_layers: tuple[int, ...] = ()  # hidden states to return, as in output_hidden_states
    # A level of drafting; token ids and masks of the parts may be indices into its tensors.
    level: DraftLevel | None = None
    is_padded: bool = False  # padded to bucket sizes, as for CUDA graphs; masks stay indices

    @cached_property
    def resolved(self) -> Sequence[NewTokens]:
        """The parts, with boolean masks unless they are padded."""
        if self.level is None or self.is_padded:
            return self.parts
        return self.level.resolved(self.parts)

    @cached_property
    def batch(self) -> PackedBatch:
        """The packed batch that consists of :attr:`resolved`."""
        return PackedBatch.of(self.resolved, self.is_padded)

    def tensors(self, plans: Iterable[PlanKey] = ()) -> ForwardTensors:
        """Return the tensors that the model reads, on the host, and the plans for these keys."""
        parts = self.resolved
        embeds = [part.embeds for part in parts if part.embeds is not None]
        assert not embeds or len(embeds) == len(parts), (
            "all sequences of a prefill have embeddings, or none"
        )
        tokens = torch.cat(embeds or [part.input_ids for part in parts])[None]
        return ForwardTensors(
            {"inputs_embeds" if embeds else "input_ids": tokens},
            torch.cat([_positions(part) for part in parts])[None],
            self.logit_rows,
            {key: key[0](self.batch, *key[2:]) for key in plans},
            self.feature_layers,
            self.level,
        )


@dataclass(frozen=True, eq=False)
class ForwardTensors:
    """Tensors that a forward reads, besides weights, the pool and recurrent states."""

    # "input_ids": [1, num_tokens] int64, or "inputs_embeds": [1, num_tokens, hidden]
    tokens: dict[str, torch.Tensor]
    position_ids: torch.Tensor  # [1, num_tokens] int64
    logit_rows: torch.Tensor  # [num_logits] int64, see ForwardInputs
    # Plans before AttentionPlan.completed, keyed by the arguments with which layers call plan().
    plans: dict[Any, AttentionPlan]
    feature_layers: tuple[int, ...] = ()
    level: DraftLevel | None = None

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Return the argument ``input_ids`` or ``inputs_embeds`` of the model's forward."""
        return self.tokens if self.level is None else self.level.inputs(self.tokens)

    def model_options(self, keeps_logits: bool) -> dict[str, Any]:
        """Return the arguments of the model's forward that choose its outputs.

        Args:
            keeps_logits: the model's forward takes ``logits_to_keep``.
        """
        options: dict[str, Any] = {"logits_to_keep": self.logit_rows} if keeps_logits else {}
        if self.feature_layers:
            options["output_hidden_states"] = list(self.feature_layers)
        return options

    def outputs(self, output: Any, keeps_logits: bool) -> Outputs:
        """Return the requested logits and hidden states from the output of the model's forward."""
        logits = output.logits[0]
        if not keeps_logits:
            logits = logits[self.logit_rows.to(logits.device)]
        if not self.feature_layers:
            return Outputs(logits)
        return Outputs(logits, hidden_states(output, self.feature_layers, self.position_ids.device))


def _positions(part: NewTokens) -> torch.Tensor:
    """Return the positions of a part's new tokens, staged ones left out.  -> [num_tokens] int64"""
    positions = part.positions
    if positions.shape[0] > part.num_tokens:
        positions = positions[-part.num_tokens :]
    return positions + part.sequence.position_offset if part.sequence.position_offset else positions
