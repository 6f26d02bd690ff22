"""Model family of encoder-decoders, and the encoder outputs of one ``generate`` call, which the
decoders of target and draft attend to.

``cross_attention.py`` computes the cross-attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel

from hf_slospec.errors import UnsupportedInputError, UnsupportedOptionError
from hf_slospec.families.cross_attention import DecoderForward, decoder_arguments, encode
from hf_slospec.model.attention.hook import AttentionHook
from hf_slospec.model.batch import AttentionLayer, Encoded
from hf_slospec.model.family import ModelFamily
from hf_slospec.model.probe import InterfaceProbe, probed
from hf_slospec.model.properties import attends_to_encoder, given_cache

# Keys of the model_kwargs of stock generate that belong to the encoder, not to the decoder.
ENCODER_INPUTS = {
    "encoder_outputs",
    "attention_mask",
    "inputs_embeds",
}
# Draft model -> targets whose encoder has the same weights. Entries are not checked again: if
# weights change, drafts get worse, but outputs stay correct.
_same_encoder = WeakKeyDictionary[Any, "WeakSet[Any]"]()


def decoder_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of stock ``generate``'s ``model_kwargs``, under the names that
    decoder-only models use (without ``decoder_``, and with the self-attention cache).

    Raises:
        UnsupportedOptionError: ``decoder_inputs_embeds`` is set, which cannot be speculated.
    """
    if model_kwargs.get("decoder_inputs_embeds") is not None:
        raise UnsupportedOptionError(
            "decoder_inputs_embeds cannot be combined with slo_tpot; pass the text so far as decoder_input_ids"
        )
    inputs = {name: value for name, value in model_kwargs.items() if name not in ENCODER_INPUTS}
    name, cache = given_cache(inputs)
    if cache is not None:
        inputs[name] = cache.self_attention_cache
    return {name.removeprefix("decoder_"): value for name, value in inputs.items()}


class EncoderInputs:
    """The encoder's inputs and outputs of one ``generate`` call.

    K and V of the outputs are computed once for each decoder that attends to them.
    """

    def __init__(self, model: PreTrainedModel, inputs: Any, model_kwargs: dict[str, Any]):
        """Keep the inputs and outputs that stock ``generate`` prepared.

        Args:
            model: the target.
            inputs: the encoder's main input, one row per prompt; needed for a draft model whose
                encoder differs from the target's.
            model_kwargs: stock ``generate``'s keyword arguments for the target, with
                ``encoder_outputs`` for every row (several rows per prompt if it returns several
                sequences).

        Raises:
            UnsupportedInputError: the attention mask masks all inputs of a row.
        """
        self._model = model
        self._inputs = inputs
        self._outputs: torch.Tensor = model_kwargs["encoder_outputs"][0]  # [batch, length, hidden]
        self._mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        # Whisper's mask is longer than the encoder outputs, as it covers mel frames.
        is_of_outputs = self._mask is not None and self._mask.shape == self._outputs.shape[:2]
        if is_of_outputs and not bool(model_kwargs["attention_mask"].any(-1).all()):
            raise UnsupportedInputError(
                "attention_mask leaves out all of a row; give its encoder at least one input"
            )
        # K and V of each row, by id() of a model; the call keeps the models alive.
        self._rows: dict[int, list[Encoded]] = {}
        self._of_target: Encoded = {}  # the target's K and V of all rows: [batch, ...]

    def of_row(self, row: int) -> Callable[[Any], Encoded | None]:
        """Return a function that maps a model to the K and V that its decoder attends to for this
        row; to None if the model has no cross-attention.
        """
        return functools.partial(self._encoded, row)

    def _encoded(self, row: int, model: Any) -> Encoded | None:
        if not attends_to_encoder(model):
            return None
        if id(model) not in self._rows:
            self._rows[id(model)], by_layer = encode(model, self._outputs_for(model), self._mask)
            if model is self._model:
                self._of_target = by_layer
        return self._rows[id(model)][row]

    @torch.no_grad()
    def _outputs_for(self, model: Any) -> torch.Tensor:
        """Return the encoder outputs that a model's decoder attends to.

        A draft whose encoder has other weights than the target's encodes the inputs itself.
        """
        if model is self._model:
            return self._outputs
        if not model.config.is_encoder_decoder or _has_encoder_of(model, self._model):
            return self._outputs.to(model.dtype)
        num_rows = len(self._outputs) // len(self._inputs)
        inputs = self._inputs.to(model.dtype) if self._inputs.is_floating_point() else self._inputs
        mask = {} if self._mask is None else {"attention_mask": self._mask[::num_rows]}
        prepared = model._prepare_text_encoder_decoder_kwargs_for_generation(
            inputs, mask, model.main_input_name, model.generation_config
        )
        outputs: torch.Tensor = prepared["encoder_outputs"][0]
        return outputs.repeat_interleave(num_rows, dim=0)

    def fill(self, model_kwargs: dict[str, Any]) -> Any:
        """Fill the cross-attention part of the cache in ``model_kwargs`` with the target's K and V
        of the encoder outputs, as stock ``generate`` would, and return the cache.
        """
        _, cache = given_cache(model_kwargs)
        for layer_idx, (keys, values) in self._of_target.items():
            cache.cross_attention_cache.update(keys, values, layer_idx)
            cache.is_updated[layer_idx] = True
        return cache


def _has_encoder_of(draft: Any, target: Any) -> bool:
    """Return whether the encoders of two models have equal weights, as when the draft is distilled
    with a frozen encoder.
    """
    targets = _same_encoder.setdefault(draft, WeakSet())
    if target not in targets:
        weights, target_weights = (model.get_encoder().state_dict() for model in (draft, target))
        if weights.keys() != target_weights.keys() or not all(
            torch.equal(weights[name], target_weights[name]) for name in weights
        ):
            return False
        targets.add(target)
    return True


class EncoderDecoders(ModelFamily):
    """Encoder-decoders, and decoders with cross-attention over another model's encoder outputs."""

    attends_to_encoder = True

    def claims(self, model: Any) -> bool:
        return attends_to_encoder(model)

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        return self, probed(model, ids, InterfaceProbe, DecoderForward)[0]

    def new_hook(self, *arguments: Any) -> AttentionHook:
        hook = super().new_hook(*arguments)
        spans = arguments[-1]
        return hook if spans[0].sequence.encoded is None else DecoderForward(hook, spans)

    encode = staticmethod(encode)
    decoder_arguments = staticmethod(decoder_arguments)

    def prepared(
        self, model: Any, inputs: Any, model_kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], EncoderInputs | None]:
        if not model.config.is_encoder_decoder:
            return model_kwargs, None
        return decoder_inputs(model_kwargs), EncoderInputs(model, inputs, model_kwargs)
