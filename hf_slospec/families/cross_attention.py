"""Cross-attention of a packed batch: every token attends to the encoder's outputs for its own
sequence.
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
    """Stands for K and V of the encoder in each layer, which differ by sequence; layers pass them
    to attention.
    """

    def __missing__(self, layer_idx: int) -> Any:
        self[layer_idx] = SimpleNamespace(
            keys=torch.empty(1, 1, 1, 1, device="cpu"), values=torch.empty(1, 1, 1, 1, device="cpu")
        )
        return self[layer_idx]

    def layer_of(self, key: torch.Tensor) -> int | None:
        """Return the layer whose placeholder this is; None if it is none."""
        return next((layer for layer, held in self.items() if held.keys is key), None)


class _Updated(dict[int, bool]):
    """Says that K and V of the encoder's outputs are cached in every layer, so that none computes
    them.
    """

    def get(self, *_: Any) -> bool:
        return True


class _TwoCaches(AttentionHook, EncoderDecoderCache):  # type: ignore[misc]  # lengths are tensors, too
    """Cache of a decoder's own tokens, and one of its encoder's outputs; transformers reads these
    to build masks.
    """

    is_sliding = is_linear = is_dummy = ()

    def __bool__(self) -> bool:
        return True


class DecoderForward(_TwoCaches):
    """Hook of a decoder with cross-attention, around that of its own tokens."""

    def __init__(self, inner: AttentionHook, spans: Sequence[Span] = ()):
        """Begin a forward.

        Args:
            inner: hook of the decoder's own tokens.
            spans: the sequences of the packed batch, with what they attend to; none:
                cross-attention is zero.
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
        """Return what the hook of the decoder's own tokens does."""
        return self.self_attention_cache.get_mask_sizes(*arguments, **options)

    def get_query_offset(self, *arguments: Any, **options: Any) -> Any:
        """Return what the hook of the decoder's own tokens does."""
        return self.self_attention_cache.get_query_offset(*arguments, **options)

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> Any:
        return self.self_attention_cache.build_mask(name, plain, **options)

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        options = super().arguments(model, options)
        mask = options["attention_mask"]  # the hook has what layers need of the outputs
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
        """Return attention to the tokens of the batch, or to the encoder's outputs."""
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
    """Hook of a plain forward of one token per row, which keeps its K and V of the encoder's outputs.

    These depend on no token of the decoder, so attention returns zeros.
    """

    def __init__(self) -> None:
        self.encoded: Encoded = {}  # K and V by layer, [batch, num_heads, length, dim]
        self.allowed: torch.Tensor | None = None  # [batch, length] bool; None: all
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
        """Keep the mask of a layer's cross-attention; return zeros, [batch, 1, num_heads,
        head_dim].
        """
        if mask is not None and any(cached is key for cached, _ in self.encoded.values()):
            by_row = (
                mask.flatten(1, -2)[:, 0] if mask.ndim > 2 else mask
            )  # the same for all heads and queries
            self.allowed = by_row if by_row.dtype == torch.bool else by_row == 0
        return torch.zeros_like(query.transpose(1, 2))


def decoder_arguments(
    model: Any,
    options: dict[str, Any],
    outputs: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return arguments of a decoder's forward, by the names that its encoder-decoder has for them.

    Args:
        outputs: the encoder's outputs, [batch, length, hidden].
        mask: [batch, length]; None: all of them are attended to.
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
    """Return K and V of an encoder's outputs, as the model's own layers compute them in a forward
    of one token.

    The arguments are those of :func:`decoder_arguments`.

    Returns:
        Those of each row without what its mask leaves out, and by layer those of all rows,
        [batch, num_heads, length, dim].
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
