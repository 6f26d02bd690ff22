"""Hooks for decoders with cross-attention: in packed forwards, each token attends to the encoder
outputs of its sequence.

``encoder.py`` holds the encoder outputs of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_slospec.model.attention.hook import (
    UNREAD_MASK_SHAPE,
    AttentionHook,
    PlainAttention,
    active_hook,
)
from hf_slospec.model.attention.sdpa import dense_attention
from hf_slospec.model.batch import AttentionRules, Encoded, Span
from hf_slospec.model.properties import cache_option


class _Placeholders(dict[int, Any]):
    """Stand-in for the layers of a cross-attention cache.

    A layer reads a placeholder as its K and V and passes it to attention, where the hook recognises
    it and uses each sequence's K and V instead.
    """

    def __missing__(self, layer_idx: int) -> Any:
        self[layer_idx] = SimpleNamespace(
            keys=torch.empty(1, 1, 1, 1, device="cpu"), values=torch.empty(1, 1, 1, 1, device="cpu")
        )
        return self[layer_idx]

    def layer_of(self, key: torch.Tensor) -> int | None:
        """Return the index of the layer whose placeholder ``key`` is; None for other tensors."""
        return next((layer for layer, held in self.items() if held.keys is key), None)


class _Updated(dict[int, bool]):
    """Stand-in for ``EncoderDecoderCache.is_updated``: True for every layer, so that all read
    cached cross-attention K and V instead of computing them.
    """

    def get(self, *_: Any) -> bool:
        return True


class _TwoCaches(AttentionHook, EncoderDecoderCache):  # type: ignore[misc]  # lengths are tensors, too
    """Base of hooks that layers take for an ``EncoderDecoderCache``."""

    is_sliding = is_linear = is_dummy = ()  # transformers reads these to build masks

    def __bool__(self) -> bool:
        return True


class DecoderForward(_TwoCaches):
    """Hook of a decoder with cross-attention, which passes self-attention on to an inner hook."""

    def __init__(self, inner: AttentionHook, spans: Sequence[Span] = ()):
        """Begin a forward.

        Args:
            inner: hook for self-attention.
            spans: sequences of the packed batch, whose ``encoded`` cross-attention reads; empty:
                cross-attention returns zeros.
        """
        self.self_attention_cache: Any = inner
        self.positions = inner.positions
        self._spans = spans
        self._placeholders = _Placeholders()
        self.cross_attention_cache: Any = SimpleNamespace(layers=self._placeholders)
        self.is_updated = _Updated()

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return self.self_attention_cache.get_seq_length(layer_idx)

    def get_mask_sizes(self, *arguments: Any, **options: Any) -> Any:
        return self.self_attention_cache.get_mask_sizes(*arguments, **options)

    def get_query_offset(self, *arguments: Any, **options: Any) -> Any:
        return self.self_attention_cache.get_query_offset(*arguments, **options)

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> Any:
        return self.self_attention_cache.build_mask(name, plain, **options)

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        options = super().arguments(model, options)
        # Layers do not read the encoder outputs, as the hook provides K and V: zeros will do.
        mask = options["attention_mask"]
        return decoder_arguments(model, options, torch.zeros(1, 1, 1, device=mask.device), mask)

    def check_attended(self) -> None:
        self.self_attention_cache.check_attended()

    def attend(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Compute cross-attention if ``key`` is a placeholder, else self-attention by the inner
        hook.
        """
        layer_idx = self._placeholders.layer_of(key)
        if layer_idx is None:
            inner: AttentionHook = self.self_attention_cache
            return inner.attend(query, key, value, rules, mask, plain)
        out = torch.zeros_like(query.transpose(1, 2))
        for span in self._spans:
            assert span.sequence.encoded is not None, (
                "all sequences of a batch have an encoder, or none"
            )
            keys, values = span.sequence.encoded[layer_idx]
            tokens = slice(span.begin, span.end)
            if rules.softcap is None and rules.sinks is None:
                is_grouped = keys.shape[0] != query.shape[1]
                attended = F.scaled_dot_product_attention(
                    query[:, :, tokens],
                    keys[None],
                    values[None],
                    scale=rules.scaling,
                    enable_gqa=is_grouped,
                )[0]
            else:
                attended = dense_attention(query[0, :, tokens], keys, values, None, rules)
            out[0, tokens] = attended.transpose(0, 1)
        return out


class EncodedCache(_TwoCaches):
    """Hook that records each layer's K and V of the encoder outputs, in a forward of one token per
    row.

    They do not depend on the decoder's tokens, so attention just returns zeros.
    """

    def __init__(self) -> None:
        self.encoded: Encoded = {}  # K and V by layer, [batch, num_heads, length, dim]
        # [batch, length] bool, True = may be attended to; None: all
        self.allowed: torch.Tensor | None = None
        self.self_attention_cache: Any = SimpleNamespace(
            update=lambda key, value, *_, **__: (key, value),
            get_seq_length=lambda *_: 0,
            is_initialized=True,
        )
        self.cross_attention_cache: Any = SimpleNamespace(update=self._keep)
        self.is_updated: dict[int, bool] = {}

    def _keep(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded[layer_idx] = key, value
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Record the mask of cross-attention, and return zeros, [batch, 1, num_heads, head_dim]."""
        if mask is not None and any(cached is key for cached, _ in self.encoded.values()):
            # A mask with head and query dimensions is the same for all heads and queries.
            by_row = mask.flatten(1, -2)[:, 0] if mask.ndim > 2 else mask
            self.allowed = by_row if by_row.dtype == torch.bool else by_row == 0
        return torch.zeros_like(query.transpose(1, 2))


def decoder_arguments(
    model: Any,
    options: dict[str, Any],
    outputs: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return a decoder's arguments under the names that the whole encoder-decoder's forward uses
    (``decoder_input_ids`` and so on), together with the encoder outputs.

    Args:
        model: an encoder-decoder, or a decoder whose names need no change.
        options: the decoder's arguments by name.
        outputs: [batch, length, hidden], the encoder outputs.
        mask: [batch, length], attention mask over the encoder outputs; None: all are attended to.
    """
    options = options | {"encoder_outputs": BaseModelOutput(last_hidden_state=outputs)}
    if not model.config.is_encoder_decoder:
        return options
    decoder_names = {
        name: f"decoder_{name}" for name in ("input_ids", "inputs_embeds", "attention_mask")
    }
    return {decoder_names.get(name, name): value for name, value in options.items()} | {
        "attention_mask": mask
    }


@torch.no_grad()
def encode(
    model: Any, outputs: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[list[Encoded], Encoded]:
    """Compute the cross-attention K and V of encoder outputs, in a forward of one decoder token.

    Args:
        model: the model whose decoder layers compute K and V.
        outputs: [batch, length, hidden], the encoder outputs.
        mask: [batch, length], attention mask over the encoder outputs; None: all are attended to.

    Returns:
        For each row, K and V by layer without masked outputs, [num_heads, row_length, dim]; and K
        and V by layer for all rows, masked outputs included, [batch, num_heads, length, dim].
    """
    cache = EncodedCache()
    zeros = torch.zeros(len(outputs), 1, dtype=torch.int64, device=outputs.device)
    unread = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=outputs.device)
    options = dict(
        input_ids=zeros, attention_mask=unread, use_cache=True, return_dict=True
    ) | cache_option(cache, model)
    with active_hook(model, cache):
        model(**decoder_arguments(model, options, outputs, mask))
    rows: list[Encoded] = []
    for row in range(len(outputs)):
        allowed = None if cache.allowed is None else cache.allowed[min(row, len(cache.allowed) - 1)]
        visible = slice(None) if allowed is None or bool(allowed.all()) else allowed
        by_layer = cache.encoded.items()
        rows.append(
            {
                i: (k[row][:, visible].contiguous(), v[row][:, visible].contiguous())
                for i, (k, v) in by_layer
            }
        )
    return rows, cache.encoded
