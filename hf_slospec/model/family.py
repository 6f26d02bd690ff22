"""Model families: how to probe, call and cache models that need more than attention through
transformers' interface. Plugins register families for layers with states, encoders and others.
"""

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
    """The encoder's outputs for one call, which the decoders of target and draft attend to."""

    def of_row(self, row: int) -> Callable[[Any], Encoded | None]:
        """Return a function that takes a model and returns the K/V that its decoder attends to for
        one row.
        """

    def fill(self, model_kwargs: dict[str, Any]) -> Any:
        """Add K and V of the encoder's outputs to the cache that stock ``generate`` has prepared,
        and return it.
        """


class ModelFamily:
    """Family of decoders whose layers attend through transformers' attention interface; base of the
    other families.
    """

    # Values of ``layer_types`` in configs that this family supports; layers of types "mlp" and
    # "moe" process each token alone.
    kinds: Iterable[str] = (
        *("mlp", "moe"),
        *("full_attention", "sliding_attention", "chunked_attention"),
    )
    attends_to_encoder = False
    state_bytes = 0  # bytes of one sequence's recurrent states, in layers without K and V

    @property
    def has_states(self) -> bool:
        """Return whether some layers keep a recurrent state, which cannot be rolled back to fewer
        tokens.
        """
        return self.state_bytes > 0

    def claims(self, model: Any) -> bool:
        """Return whether the model may belong to this family, judged by its config and class."""
        is_plain = not getattr(model, "_is_stateful", False) and not attends_to_encoder(model)
        return is_plain and set(layer_types(model)) <= set(self.kinds)

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        """Return the model's family and its attention layers, found by forwards of one token.

        Args:
            model: a model that this family claims.
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
        """Return the attention hook of a packed forward.

        Args:
            pool: storage of the batch's sequences.
            batch: source of the plans that layers read.
            backend: computes attention.
            layers: attention layers, in the order of their K/V in the pool.
            position_ids: [1, num_tokens] int64.
            spans: the batch's sequences; empty in a forward that reads tensors only (CUDA graphs).
        """
        return PackedForward(pool, batch, backend, layers, position_ids)

    def new_states(self, length: int) -> SequenceStates | None:
        """Return recurrent states of zeros for a sequence of ``length`` tokens; None if the family
        has none.
        """
        return None

    def read_states(self, cache: Any, row: int, length: int) -> SequenceStates | None:
        """Return the recurrent states of one row of a transformers cache after ``length``
        tokens.
        """
        return None

    def write_states(self, cache: Any, rows: Sequence[SequenceStates | None]) -> None:
        """Replace the recurrent states in a transformers cache by those of each row; do nothing if
        the family has none.
        """

    def encode(
        self, model: Any, outputs: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[list[Encoded], Encoded]:
        """Compute the K and V that a decoder's cross-attention layers make of an encoder's outputs.

        Args:
            model: the decoder's model.
            outputs: [batch, length, hidden].
            mask: [batch, length], 1 = may be attended to; None: all may.

        Returns:
            K and V of each row, without masked keys; and K and V of all rows by layer, [batch,
            num_heads, length, dim].
        """
        raise NotImplementedError

    def decoder_arguments(
        self,
        model: Any,
        options: dict[str, Any],
        outputs: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a decoder's forward that attends to an encoder's outputs: the
        outputs are added, and the other arguments renamed as an encoder-decoder names them.

        Args:
            model: the decoder's model.
            options: arguments as a decoder-only model names them.
            outputs: the encoder's outputs, [batch, length, hidden].
            mask: mask of the encoder's outputs, [batch, length]; None: all may be attended to.
        """
        raise NotImplementedError

    def prepared(
        self, model: Any, inputs: Any, model_kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], EncoderOutputs | None]:
        """Split the inputs of a call into the decoder's arguments and the encoder's outputs (None
        for decoders without an encoder).

        Args:
            model: the model.
            inputs: the encoder's main input for every prompt.
            model_kwargs: arguments that stock ``generate`` has prepared.
        """
        return model_kwargs, None


DECODER = ModelFamily()
FAMILIES = [DECODER]  # in the order in which they are tried; a plugin replaces the list's items


@torch.no_grad()
def probe_layers(model: Any) -> tuple[ModelFamily, list[AttentionLayer]]:
    """Return the model's family and its attention layers; see :meth:`ModelFamily.probe`.

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
