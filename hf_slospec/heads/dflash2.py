"""DFlash2 network: DFlash with convolutions along the block, and a selector that rescores the most
probable candidates of each position given the token drafted before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_slospec.drafters.level import Scores
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.dflash import KNOWN, SequentialHead


class BlockConvolution(nn.Module):
    """Two causal convolutions along a block, one before and one after a sublayer.

    Their kernels are a learned base plus a projection of each token's hidden state.
    """

    def __init__(self, hidden_size: int, num_taps: int, group_size: int):
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, hidden_size))
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * num_taps * (hidden_size // group_size), bias=False
        )

    def kernels(self, states: torch.Tensor) -> torch.Tensor:
        """Return each token's kernels for the convolutions before and after the sublayer.

        [1, num_tokens, hidden] -> [1, num_tokens, 2, num_taps, hidden]
        """
        projected = self.kernel_projection(states).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        delta: torch.Tensor = projected.repeat_interleave(self.group_size, dim=-1)
        return self.base_kernel + delta

    @staticmethod
    def convolve(
        states: torch.Tensor, kernel: torch.Tensor, is_behind: torch.Tensor
    ) -> torch.Tensor:
        """Return the causal convolution of each block; tap i reads the token i positions before.

        Args:
            states: [1, num_tokens, hidden], one or several blocks.
            kernel: [1, num_tokens, num_taps, hidden].
            is_behind: [1, num_tokens] bool, True where the token before is in the same block.

        Returns:
            [1, num_tokens, hidden].
        """
        output = states * kernel[..., 0, :]
        is_seen = torch.ones_like(is_behind)
        for tap in range(1, kernel.shape[-2]):
            is_seen = is_seen & pad(is_behind, (tap - 1, 0))[:, : is_behind.shape[1]]
            shifted = pad(states, (0, 0, tap, 0))[:, : states.shape[1]]
            output = output + shifted * kernel[..., tap, :] * is_seen[..., None]
        return output


class DFlash2Layer(Qwen3DecoderLayer):
    """Qwen3 layer with convolutions around its attention and its MLP."""

    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = BlockConvolution(*sizes)
        self.mlp_conv = BlockConvolution(*sizes)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **attention: Any) -> torch.Tensor:
        """Return the layer's output, [1, num_tokens, hidden].

        ``is_behind`` is a keyword argument; see :meth:`BlockConvolution.convolve`.
        """
        is_behind = attention.pop("is_behind")
        sublayers: list[tuple[Any, BlockConvolution, Any]] = [
            (
                self.input_layernorm,
                self.attention_conv,
                lambda states: self.self_attn(states, *args, **attention)[0],
            ),
            (self.post_attention_layernorm, self.mlp_conv, self.mlp),
        ]
        for norm, convolution, sublayer in sublayers:
            states = norm(hidden_states)
            kernel_before, kernel_after = convolution.kernels(states).unbind(2)
            states = sublayer(convolution.convolve(states, kernel_before, is_behind))
            hidden_states = hidden_states + convolution.convolve(states, kernel_after, is_behind)
        return hidden_states


class CandidateSelector(nn.Module):
    """Computes corrections to the logits of a position's most probable candidates, given the token
    before.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Return the terms to add to the candidates' logits, [num_rows, beam, num_candidates].

        Args:
            tokens: [num_rows, beam] int64, tokens before the position, as ids of the target.
            hidden: [num_rows, hidden], hidden states of the position's block token.
            candidates: [num_rows, num_candidates] int64, ids in the head's vocabulary.
        """
        projected: torch.Tensor = self.hidden_projection(hidden)
        context = self.predecessor_codebook[tokens] * projected[:, None]
        return context @ self.successor_codebook[candidates].transpose(1, 2)


def scattered(scores: torch.Tensor, candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return logits over a vocabulary that are -inf but for the candidates.

    Args:
        scores: [num_rows, beam, num_candidates].
        candidates: [num_rows, num_candidates] int64, token ids.
        vocab_size: size of the last dimension of the result, [num_rows, beam, vocab].
    """
    whole = scores.new_full((*scores.shape[:-1], vocab_size), -torch.inf)
    return whole.scatter_(-1, candidates[:, None].expand_as(scores), scores)


class ConvolvedHead(SequentialHead):
    """Base of heads whose layers are :class:`DFlash2Layer`.

    The config has ``conv_kernel_size`` and ``conv_group_size`` besides the settings of DFlash.
    """

    layer_class = DFlash2Layer

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        for name in ("conv_kernel_size", "conv_group_size"):
            if not isinstance(value := getattr(self.config, name, None), int) or value < 1:
                raise UnsupportedModelError(
                    f"the {self.kind} head's config has {name} {value!r}; it must be a positive integer"
                )
        if self.config.hidden_size % self.config.conv_group_size:
            raise UnsupportedModelError(
                f"the {self.kind} head has a hidden size of {self.config.hidden_size} and convolutions in groups of "
                f"{self.config.conv_group_size} channels; groups must divide it"
            )
        if self.block_size < 3:
            raise UnsupportedModelError(
                f"the {self.kind} head has blocks of {self.block_size} tokens; it needs 3"
            )

    def layer_options(self, input_ids: torch.Tensor) -> dict[str, Any]:
        # A token and the token before it are in the same block if the token is a mask token with a
        # mask token next to it. (Trials of forwards run tokens that form no block; there, a mask
        # token does not have another one next to it.)
        is_mask = input_ids == self.mask_token_id
        return {"is_behind": is_mask & (pad(is_mask, (1, 0))[:, :-1] | pad(is_mask, (0, 1))[:, 1:])}


class DFlash2Head(ConvolvedHead):
    """DFlash network with convolutions and a selector, which proposes only the ``selector_top_k``
    most probable candidates of each position.

    The config has ``selector_rank`` and ``selector_top_k`` besides the settings of its base.
    """

    kind = "DFlash2"
    known = KNOWN | {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}

    def _add_modules(self) -> None:
        config = self.config
        sizes = (
            config.vocab_size,
            self.draft_vocab_size,
            config.hidden_size,
            int(config.selector_rank),
        )
        self.candidate_selector = CandidateSelector(*sizes)
        self.num_candidates = min(int(config.selector_top_k), self.draft_vocab_size)

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        logits, hidden = outputs.tensor_split((self.draft_vocab_size,), dim=-1)
        best = logits.topk(self.num_candidates, dim=-1)
        scores = best.values[:, None] + self.candidate_selector(tokens, hidden, best.indices)
        return Scores(scattered(scores, best.indices, self.draft_vocab_size))
