"""Inputs and outputs of packed forwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hf_slospec.forks import cached_property
from hf_slospec.model.batch import NewTokens, PackedBatch, Plan
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.properties import hidden_states

PlanKey = tuple[Any, ...]  # (make, device, *arguments), by which layers request a plan


class DraftLevel(Protocol):
    """Computation before and after a forward of draft nodes, in one CUDA graph with it."""

    @property
    def is_root(self) -> bool:
        """Return whether it is the first level of its beam; the others follow at once."""

    @property
    def num_logits(self) -> int:
        """Rows of logits that ``outputs`` takes."""

    def resolved(self, parts: Sequence[NewTokens]) -> Sequence[NewTokens]:
        """Return the parts with boolean masks, for forwards without a graph."""

    @property
    def seen(self) -> torch.Tensor | None:
        """Values that the parts' masks index, [num_values] bool; None: the masks hold booleans."""

    def inputs(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's inputs, made of ``ForwardTensors.tokens``."""

    def outputs(self, logits: torch.Tensor) -> Any:
        """Return tensors made of logits [num_logits, vocab], in any nesting of tuples."""


class Outputs(NamedTuple):
    """Tensors that a packed forward returns."""

    logits: torch.Tensor  # [num_logits, vocab], in the model's dtype
    features: torch.Tensor | None = (
        None  # [num_tokens, num_feature_layers * hidden], hidden states concatenated
    )
    drafted: Any = None  # DraftLevel.outputs, where the path computes them in place of logits


@dataclass(frozen=True, eq=False)
class ForwardInputs:
    """New tokens of several sequences, and what a forward of them returns."""

    pool: KVPool  # storage of the parts' sequences
    parts: Sequence[NewTokens]  # one per sequence, in their order in the packed batch
    logit_rows: torch.Tensor  # [num_logits] int64, tokens of the packed batch
    feature_layers: tuple[int, ...] = ()  # hidden states to return, as in output_hidden_states
    level: DraftLevel | None = None  # ids and masks of parts may be indices into its tensors
    is_padded: bool = False  # padded to bucket sizes; masks stay indices

    @cached_property
    def resolved(self) -> Sequence[NewTokens]:
        """The parts, with boolean masks where they are not padded."""
        if self.level is None or self.is_padded:
            return self.parts
        return self.level.resolved(self.parts)

    @cached_property
    def batch(self) -> PackedBatch:
        """The batch of the resolved parts."""
        return PackedBatch.of(self.resolved, self.is_padded)

    def tensors(self, plans: Iterable[PlanKey] = ()) -> ForwardTensors:
        """Return what the model reads of the batch, on the host, with the plans of these keys."""
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

    tokens: dict[
        str, torch.Tensor
    ]  # input_ids [1, num_tokens] int64, or inputs_embeds [1, num_tokens, hidden]
    position_ids: torch.Tensor  # [1, num_tokens] int64
    logit_rows: torch.Tensor  # [num_logits] int64
    plans: dict[Any, Plan]  # not completed, by the arguments that layers request them with
    feature_layers: tuple[int, ...] = ()
    level: DraftLevel | None = None

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` or ``inputs_embeds`` of the model's forward."""
        return self.tokens if self.level is None else self.level.inputs(self.tokens)

    def model_options(self, keeps_logits: bool) -> dict[str, Any]:
        """Return further arguments of the model's forward.

        ``keeps_logits``: it takes ``logits_to_keep``."""
        options: dict[str, Any] = {"logits_to_keep": self.logit_rows} if keeps_logits else {}
        if self.feature_layers:
            options["output_hidden_states"] = list(self.feature_layers)
        return options

    def outputs(self, output: Any, keeps_logits: bool) -> Outputs:
        """Return the wanted logits and hidden states of the model's output."""
        logits = output.logits[0]
        if not keeps_logits:
            logits = logits[self.logit_rows.to(logits.device)]
        if not self.feature_layers:
            return Outputs(logits)
        return Outputs(logits, hidden_states(output, self.feature_layers, self.position_ids.device))


def _positions(part: NewTokens) -> torch.Tensor:
    """Return the positions of a part's new tokens.  -> [num_tokens] int64"""
    positions = part.positions
    if positions.shape[0] > part.num_tokens:
        positions = positions[-part.num_tokens :]
    return positions + part.sequence.position_offset if part.sequence.position_offset else positions
