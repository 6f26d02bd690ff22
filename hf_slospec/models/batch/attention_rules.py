"""Rules by which an attention layer weighs the keys that a token may see."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionRules(NamedTuple):
    """Arguments of a layer's attention beside query, key and value, the same for all tokens of a forward."""

    scaling: float  # scores are multiplied by it
    window: int | None = None  # a token sees itself and the window - 1 positions before it
    softcap: float | None = None  # scores are squeezed into (-softcap, softcap)
    sinks: torch.Tensor | None = None  # [num_heads] logits that take probability but contribute no value
    chunk: int | None = None  # positions per chunk; no token sees beyond its own chunk
    bias: torch.Tensor | None = None  # [num_heads, num_distances] added to scores; the last one is for all farther keys

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores after the softcap, if there is one.  -> shape of ``scores``"""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
