"""Families of models: what a plugin does for models whose layers the core's forwards do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from hf_slospec.assembly import load_plugins
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.attention.hook import AttentionHook
from hf_slospec.model.batch import AttentionLayer, Encoded, Plans, SequenceStates, Span
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.probe import InterfaceProbe, probed
from hf_slospec.model.properties import (
    attends_to_encoder,
    evaluating,
    input_device,
    layer_types,
)


class EncoderOutputs(Protocol):
    """The encoder's outputs of one call, which each decoder attends to."""

    def of_row(self, row: int) -> Callable[[Any], Encoded | None]:
        """Return the function that returns what a model's decoder attends to for one row."""

    def fill(self, model_kwargs: dict[str, Any]) -> Any:
        """Add K and V of the encoder's outputs to the cache that stock prepared, and return it."""


class ModelFamily:
    """Decoders whose layers attend through transformers' interface; base of the other families."""

    # Types of layers in configs; "mlp" and "moe" process each token alone.
    kinds: Iterable[str] = (
        *("mlp", "moe"),
        *("full_attention", "sliding_attention", "chunked_attention"),
    )
    attends_to_encoder = False
    state_bytes = 0  # of the states of one sequence, in layers that keep one in place of K and V

    @property
    def has_states(self) -> bool:
        """Return whether some layers keep a state, which cannot be cut to fewer tokens."""
        return self.state_bytes > 0

    def claims(self, model: Any) -> bool:
        """Return whether the model, by its config and class, may belong to this family."""
        is_plain = not getattr(model, "_is_stateful", False) and not attends_to_encoder(model)
        return is_plain and set(layer_types(model)) <= set(self.kinds)

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        """Return the model's family and its layers that attend, seen in forwards of one token.

        Args:
            ids: the token, [1, 1] int64.

        Raises:
            UnsupportedModelError: the forward failed, or the layers do not fit this family.
        """
        return self, probed(model, ids, InterfaceProbe)[0]

    def new_hook(
        self,
        pool: KVPool,
        batch: Plans,
        backend: Backend,
        layers: Sequence[AttentionLayer],
        position_ids: torch.Tensor,
        spans: Sequence[Span],
    ) -> AttentionHook:
        """Return the hook of a packed forward.

        Args:
            position_ids: [1, num_tokens] int64.
            spans: the batch's sequences; none in a forward that reads tensors only.
        """
        return PackedForward(pool, batch, backend, layers, position_ids)

    def new_states(self, length: int) -> SequenceStates | None:
        """Return the states of a sequence of ``length`` tokens, all zeros; None without states."""
        return None

    def read_states(self, cache: Any, row: int, length: int) -> SequenceStates | None:
        """Return the states of one row of a transformers cache after ``length`` tokens."""
        return None

    def write_states(self, cache: Any, rows: Sequence[SequenceStates | None]) -> None:
        """Replace the states of a transformers cache by those of each row, if the family has any."""

    def encode(
        self, model: Any, outputs: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[list[Encoded], Encoded]:
        """Return K and V that a decoder's layers make of an encoder's outputs.

        Args:
            outputs: [batch, length, hidden].
            mask: [batch, length]; None: all of them are attended to.

        Returns:
            Those of each row, and by layer those of all rows, [batch, num_heads, length, dim].
        """
        raise NotImplementedError

    def decoder_arguments(
        self,
        model: Any,
        options: dict[str, Any],
        outputs: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Return arguments of a decoder's forward by the names that its encoder-decoder has."""
        raise NotImplementedError

    def prepared(
        self, model: Any, inputs: Any, model_kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], EncoderOutputs | None]:
        """Return a decoder's inputs of a call, and its encoder's outputs.

        Args:
            inputs: the encoder's main input for every prompt.
            model_kwargs: what stock ``generate`` prepared.
        """
        return model_kwargs, None


DECODER = ModelFamily()
FAMILIES = [DECODER]  # in the order in which models are probed; plugins set others


@torch.no_grad()
def probe_layers(model: Any) -> tuple[ModelFamily, list[AttentionLayer]]:
    """Return the model's family and its layers that attend; see :meth:`ModelFamily.probe`.

    Raises:
        UnsupportedModelError: the model fits no family.
    """
    load_plugins()
    lacks = "" if len(FAMILIES) > 1 else " without hf_slospec.families, which is not there"
    if unknown := set(layer_types(model)).difference(*(family.kinds for family in FAMILIES)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {sorted(unknown)}, which cannot hold a tree of tokens{lacks}"
        )
    ids = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    refusal = UnsupportedModelError(f"{type(model).__name__} cannot be speculated{lacks}")
    with evaluating(model):
        for family in FAMILIES:
            if family.claims(model):
                try:
                    return family.probe(model, ids)
                except UnsupportedModelError as error:
                    refusal = error
    raise refusal
