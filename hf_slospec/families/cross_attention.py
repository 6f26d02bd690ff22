"""Cross-attention of a packed batch: every token attends to the encoder's outputs for its own
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import EncoderDecoderCache

from hf_slospec.model.attention.sdpa import dense_attention
from hf_slospec.model.batch import AttentionRules, Span


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


class _TwoCaches(EncoderDecoderCache):
    """Cache of a decoder's own tokens, and one of its encoder's outputs; transformers reads these
    to build masks.
    """

    is_initialized = True
    is_sliding = is_linear = is_dummy = ()

    def __bool__(self) -> bool:
        return True


class DecoderForward(_TwoCaches):
    """Cache and attention of a decoder with cross-attention, around those of its own tokens."""

    def __init__(self, own: Any, spans: Sequence[Span] = ()):
        """Begin a forward.

        Args:
            own: cache and attention of the decoder's own tokens.
            spans: the sequences of the packed batch, with what they attend to; none:
                cross-attention is zero.
        """
        self.self_attention_cache: Any = own
        self._spans = spans
        self._placeholders = _Placeholders()
        self.cross_attention_cache: Any = SimpleNamespace(layers=self._placeholders)
        self.is_updated = _Updated()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["self_attention_cache"], name)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return what the cache of the decoder's own tokens does."""
        return self.self_attention_cache.get_seq_length(layer_idx)

    def attend(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention to the tokens of the batch, or to the encoder's outputs.

        Returns:
            [1, num_tokens, num_heads, value_dim].
        """
        layer_idx = self._placeholders.layer_of(key)
        if layer_idx is None:
            own: torch.Tensor = self.self_attention_cache.attend(query, key, value, rules, mask)
            return own
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
    """Cache and attention of a plain forward of one token per row, which keep its K and V of the
    encoder's outputs.

    These depend on no token of the decoder, so attention returns zeros.
    """

    def __init__(self) -> None:
        self.encoded: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # K and V, [batch, num_heads, length, dim]
        self.allowed: torch.Tensor | None = None  # [batch, length] bool; None: all
        self.self_attention_cache: Any = SimpleNamespace(
            update=lambda key, value, *_, **__: (key, value),
            get_seq_length=lambda *_: 0,
            is_initialized=True,
        )
        self.cross_attention_cache: Any = SimpleNamespace(update=self._keep)
        self.is_updated: dict[int, bool] = {}

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return 0."""
        del layer_idx
        return 0

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
    ) -> torch.Tensor:
        """Keep the mask of a layer's cross-attention; return zeros, [batch, 1, num_heads,
        head_dim].
        """
        del value, rules
        if mask is not None and any(kept is key for kept, _ in self.encoded.values()):
            by_row = (
                mask.flatten(1, -2)[:, 0] if mask.ndim > 2 else mask
            )  # the same for all heads and queries
            self.allowed = by_row if by_row.dtype == torch.bool else by_row == 0
        return torch.zeros_like(query.transpose(1, 2))
