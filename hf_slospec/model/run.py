"""Calls of a model's forward for packed batches, and for the outputs of an encoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_slospec.families.cross_attention import DecoderForward, EncodedCache
from hf_slospec.families.gathered import MaskSource, own_attention
from hf_slospec.model.attention.forward import Positions, given_positions
from hf_slospec.model.attention.hook import active_forward
from hf_slospec.model.batch import Encoded
from hf_slospec.model.properties import cache_option, given_position_ids, has_states_only

# Mask builders return a 4D mask unchanged, and packed attention does not read it.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)


def run_model(
    model: Any,
    forward: Any,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Run the model for a packed batch, with ``forward`` as its cache and attention, and return its
    output.

    With ``attention_mask=None``, models that use the attention interface get a mask that keeps them
    from building one."""
    options = dict(inputs, use_cache=True, return_dict=True) | given_position_ids(
        model, position_ids
    )
    options |= cache_option(forward, model)
    if has_states_only(model):
        with active_forward(model, forward):
            return model(**options)
    if isinstance(forward, MaskSource):
        if any(name.endswith("token_type_ids") for name, _ in model.named_buffers()):
            options["token_type_ids"] = torch.zeros_like(
                position_ids
            )  # the buffer may be shorter than a packed batch
        with own_attention(forward), given_positions(model, forward.positions):
            return model(**options)
    if attention_mask is None:
        attention_mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=position_ids.device)
    options["attention_mask"] = attention_mask
    if isinstance(
        forward, DecoderForward
    ):  # which has what the layers need of the encoder's outputs
        options = decoder_arguments(
            model, options, torch.zeros(1, 1, 1, device=position_ids.device), attention_mask
        )
    with active_forward(model, forward), given_positions(model, Positions(position_ids)):
        return model(**options)


def decoder_arguments(
    model: Any,
    options: dict[str, Any],
    encoded: torch.Tensor,
    encoder_mask: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return arguments of a decoder's forward, by the names that its encoder-decoder has for them.

    Args:
        encoded: the encoder's outputs, [batch, length, hidden].
        encoder_mask: [batch, length]; None: all of them are attended to.
    """
    options = options | {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
    if not model.config.is_encoder_decoder:
        return options
    renamed = {name: f"decoder_{name}" for name in ("input_ids", "inputs_embeds", "attention_mask")}
    return {renamed.get(name, name): value for name, value in options.items()} | {
        "attention_mask": encoder_mask
    }


@torch.no_grad()
def encode(
    model: Any, encoded: torch.Tensor, encoder_mask: torch.Tensor | None = None
) -> tuple[list[Encoded], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return K and V of an encoder's outputs, as the model's own layers compute them in a forward
    of one token.

    The arguments are those of :func:`decoder_arguments`.

    Returns:
        Those of each row without what its mask leaves out, and by layer those of all rows,
        [batch, num_heads, length, dim].
    """
    cache = EncodedCache()
    zeros = torch.zeros(len(encoded), 1, dtype=torch.int64, device=encoded.device)
    mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=encoded.device)
    options = dict(
        input_ids=zeros, attention_mask=mask, use_cache=True, return_dict=True
    ) | cache_option(cache, model)
    with active_forward(model, cache):
        model(**decoder_arguments(model, options, encoded, encoder_mask))
    rows: list[Encoded] = []
    for row in range(len(encoded)):
        allowed = None if cache.allowed is None else cache.allowed[min(row, len(cache.allowed) - 1)]
        columns = slice(None) if allowed is None or bool(allowed.all()) else allowed
        by_layer = cache.encoded.items()
        rows.append(
            {
                i: (k[row][:, columns].contiguous(), v[row][:, columns].contiguous())
                for i, (k, v) in by_layer
            }
        )
    return rows, cache.encoded
