"""Inputs of a packed forward: everything that it reads of requests, as tensors that are made before
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hf_slospec.model.batch import NewTokens, PackedBatch, Plan


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
        """Return the model's inputs, made of ``Inputs.tokens``."""

    def outputs(self, logits: torch.Tensor) -> Any:
        """Return tensors made of the model's logits [num_logits, vocab], in any nesting of tuples."""


class Outputs(NamedTuple):
    """Tensors that a packed forward returns."""

    logits: torch.Tensor  # [num_logits, vocab], in the model's dtype
    features: torch.Tensor | None = (
        None  # [num_tokens, num_feature_layers * hidden], hidden states concatenated
    )


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors that a forward reads, besides weights, the pool and the states of recurrent layers."""

    tokens: dict[
        str, torch.Tensor
    ]  # input_ids [1, num_tokens] int64, or inputs_embeds [1, num_tokens, hidden]
    position_ids: torch.Tensor  # [1, num_tokens] int64
    logit_rows: torch.Tensor  # [num_logits] int64
    plans: dict[Any, Plan]  # not completed, by the arguments that layers request them with
    feature_layers: tuple[
        int, ...
    ] = ()  # hidden states to return, numbered as in the model's output_hidden_states
    level: DraftLevel | None = None

    @classmethod
    def of(
        cls,
        parts: Sequence[NewTokens],
        batch: PackedBatch,
        requested: Iterable[Any],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...] = (),
        level: DraftLevel | None = None,
    ) -> Inputs:
        """Return the inputs of a batch of these parts, with the plans of ``requested``: (make,
        device, *arguments).
        """
        embeds = [part.embeds for part in parts if part.embeds is not None]
        assert not embeds or len(embeds) == len(parts), (
            "all sequences of a prefill have embeddings, or none"
        )
        tokens = torch.cat(embeds or [part.input_ids for part in parts])[None]
        return cls(
            {"inputs_embeds" if embeds else "input_ids": tokens},
            torch.cat([_positions(part) for part in parts])[None],
            logit_rows,
            {key: key[0](batch, *key[2:]) for key in requested},
            feature_layers,
            level,
        )


def _positions(part: NewTokens) -> torch.Tensor:
    """Return the positions of a part's new tokens.  -> [num_tokens] int64"""
    positions = part.positions
    if positions.shape[0] > part.num_tokens:
        positions = positions[-part.num_tokens :]
    return positions + part.sequence.position_offset if part.sequence.position_offset else positions
