"""Positions of a model's weights within those of a larger one, and the values of the other weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# One hidden channel separates the additional ids from the others. It has this value at every token, which is too small
# to change a norm, and only the output reads it.
DELTA = 2.0**-13
NEVER = -(2.0**32)  # weight of the additional ids for that channel; beyond the range of fp16


@dataclass(frozen=True)
class Placement:
    """Sizes of a Llama, or of a head with Llama's layers, before and after inflation."""

    hidden_size: int
    factor: int  # larger hidden size / hidden size
    num_heads: int
    num_kv_heads: int
    head_dim: int
    larger_num_heads: int
    larger_num_kv_heads: int
    larger_head_dim: int
    vocab_size: int
    larger_vocab_size: int

    @classmethod
    def of(cls, old: Any, larger: Any) -> Placement:
        """Return the placement from one config to another."""
        return cls(
            old.hidden_size,
            larger.hidden_size // old.hidden_size,
            old.num_attention_heads,
            old.num_key_value_heads,
            old.head_dim,
            larger.num_attention_heads,
            larger.num_key_value_heads,
            larger.head_dim,
            old.vocab_size,
            larger.vocab_size,
        )

    def fill(self, name: str, parameter: torch.Tensor, source: torch.Tensor | None, generator: torch.Generator) -> None:
        """Copy the old weights; set weights that write to hidden channels to zero, and unused weights to random values.

        Args:
            name: name of the parameter in its model.
            parameter: the larger weight.
            source: the old one; None for a weight of an additional layer.
            generator: draws the random values, on the parameter's device.
        """
        module = name.rpartition(".")[0].rpartition(".")[2]
        if "norm" in name:
            parameter.fill_(self.factor**-0.5)
        elif module in ("o_proj", "down_proj", "embed_tokens", "fc"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
        if source is not None:
            self._copy(name, parameter, source)
        if self.larger_vocab_size > self.vocab_size:
            self._exclude(name, module, parameter)

    def _copy(self, name: str, parameter: torch.Tensor, source: torch.Tensor) -> None:
        device, scale = parameter.device, 1.0
        rows = torch.arange(len(source), device=device)
        if "norm" in name:
            scale = self.factor**-0.5
        elif ".q_proj." in name:
            rows = self._channels(self.num_heads, self.num_heads // self.num_kv_heads, self._larger_group).to(device)
            # The channels of a larger head between the old ones add nothing to its scores, whose scale is smaller.
            used = rows.view(self.num_heads, -1)[:, 0] // self.larger_head_dim
            parameter.unflatten(0, (self.larger_num_heads, -1))[used] = 0.0
            scale = (self.larger_head_dim // self.head_dim) ** 0.5
        elif ".k_proj." in name or ".v_proj." in name:
            rows = self._channels(self.num_kv_heads, 1, 1).to(device)
        if source.dim() == 1 and "norm" not in name:  # a bias
            parameter[rows] = source * scale
            return
        columns = torch.arange(source.shape[-1], device=device)
        if ".o_proj." in name:
            columns = self._channels(self.num_heads, self.num_heads // self.num_kv_heads, self._larger_group).to(device)
        elif ".down_proj." not in name:  # reads hidden states, one of them, or several concatenated
            block = columns // self.hidden_size
            columns = columns + block * (self.factor - 1) * self.hidden_size
        if source.dim() == 1:
            parameter[columns] = source * scale
        else:
            parameter[rows[:, None], columns] = source * scale

    @property
    def _larger_group(self) -> int:
        return self.larger_num_heads // self.larger_num_kv_heads

    def _channels(self, num_heads: int, group: int, larger_group: int) -> torch.Tensor:
        """Return the indices of all heads' channels among the larger ones.  -> [num_heads * head_dim] int64

        Rotary embeddings turn channel pairs (i, i + head_dim / 2) by the frequency theta ** (-2i / head_dim), so that
        pair i of a small head turns like pair ``ratio`` * i of a head that is ``ratio`` times as large.
        """
        heads = torch.arange(num_heads)
        heads = heads // group * larger_group + heads % group
        channels = torch.arange(self.head_dim)
        half, ratio = self.head_dim // 2, self.larger_head_dim // self.head_dim
        channels = channels // half * (self.larger_head_dim // 2) + channels % half * ratio
        return (heads[:, None] * self.larger_head_dim + channels).flatten()

    def _exclude(self, name: str, module: str, parameter: torch.Tensor) -> None:
        """Give the additional ids very low logits, by the first additional hidden channel."""
        channel = self.hidden_size
        if module in ("embed_tokens", "lm_head"):
            parameter[: self.vocab_size, channel] = DELTA if module == "embed_tokens" else 0.0
            parameter[self.vocab_size :] = 0.0
            parameter[self.vocab_size :, channel] = NEVER
        elif module.endswith("layernorm"):
            parameter[channel] = 0.0
        elif name == "fc.weight" and parameter.shape[1] == 2 * self.hidden_size * self.factor:
            parameter[channel, channel] = 1.0  # an MTP layer: its input begins with the embedding
