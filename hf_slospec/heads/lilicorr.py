"""LiLiCorr network: DFlash with a transformer over the most probable candidates of all positions of
a block, which scores every step from a candidate to one of the next position (arXiv 2608.20530).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.drafters.level import Scores
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.block_drafter import LatticeBlockDrafter
from hf_slospec.heads.dflash import KNOWN, SequentialHead
from hf_slospec.heads.dflash2 import ConvolvedHead, scattered

# Settings of the correlator that the config must have, as publishers have no defaults for them.
SETTINGS = (
    "candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim",
    "vector_eps", "logit_scale",
)  # fmt: skip
FRACTIONS = ("mlp_ratio", "vector_eps", "logit_scale")
NUM_FEATURES = 5  # numbers that describe a candidate, besides its token and its position


class UngatedMLP(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, size: int, inner_size: int, output_size: int):
        super().__init__()
        self.up_proj = nn.Linear(size, inner_size)
        self.down_proj = nn.Linear(inner_size, output_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layers' output. [..., size] -> [..., output_size]"""
        output: torch.Tensor = self.down_proj(F.silu(self.up_proj(states)))
        return output


class LatticeAttention(nn.Module):
    """Self-attention with a bias for every pair of positions."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the attention's output.

        Args:
            states: [num_rows, lattice, size].
            bias: [num_heads, lattice, lattice], added to the scores.
        """
        projected = F.linear(states, self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        output: torch.Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output


class LatticeLayer(nn.Module):
    """Transformer layer with RMS norms before its sublayers."""

    def __init__(self, size: int, num_heads: int, mlp_ratio: float, eps: float):
        super().__init__()
        self.attn_norm = nn.RMSNorm(size, eps=eps)
        self.attn = LatticeAttention(size, num_heads)
        self.mlp_norm = nn.RMSNorm(size, eps=eps)
        self.mlp = UngatedMLP(size, int(size * mlp_ratio), size)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [num_rows, lattice, size]; see :class:`LatticeAttention`."""
        states = states + self.attn(self.attn_norm(states), bias)
        output: torch.Tensor = states + self.mlp(self.mlp_norm(states))
        return output


class Correlator(nn.Module):
    """Scores the steps between candidates of neighbouring positions of a block."""

    def __init__(self, hidden_size: int, block_size: int, eps: float, settings: dict[str, Any]):
        """Make a module with random weights.

        Args:
            hidden_size: size of the block tokens' hidden states and of token embeddings.
            block_size: tokens of a block; all but the first have candidates.
            eps: added to the variance in RMS norms.
            settings: values of :data:`SETTINGS`; a ``hidden_size`` of 0 stands for the network's.
        """
        super().__init__()
        size = settings["hidden_size"] or hidden_size
        num_heads = settings["num_heads"]
        factor_dim = settings["factor_dim"]
        self.num_candidates: int = settings["candidate_topk"]
        self.vector_eps = float(settings["vector_eps"])
        self.logit_scale = float(settings["logit_scale"])
        self.token_proj = nn.Identity() if size == hidden_size else nn.Linear(hidden_size, size)
        self.pass_hidden_proj = nn.Linear(hidden_size, size)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = UngatedMLP(NUM_FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block_size - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, self.num_candidates, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(num_heads))
        self.context_proj = nn.Linear(hidden_size, size)
        self.layers = nn.ModuleList(
            [
                LatticeLayer(size, num_heads, settings["mlp_ratio"], eps)
                for _ in range(settings["num_layers"])
            ]
        )
        self.output_norm = nn.RMSNorm(size, eps=eps)
        self.anchor_norm = nn.RMSNorm(size, eps=eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head = nn.Linear(size, factor_dim)
        self.in_head = nn.Linear(size, factor_dim)
        self.anchor_out_head = nn.Linear(size, factor_dim)

    def attention_bias(self, num_slots: int) -> torch.Tensor:
        """Return what attention adds for the distance of two candidates' positions.

        -> [num_heads, lattice, lattice], lattice = num_slots * num_candidates
        """
        slots = torch.arange(num_slots, device=self.same_slot_bias.device)
        slots = slots.repeat_interleave(self.num_candidates)
        distances = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distances + self.relative_slot_bias.shape[1] // 2]
        return bias + self.same_slot_bias[:, None, None] * (distances == 0)

    def features(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return numbers that describe candidates by their probabilities and ranks.

        [num_rows, num_slots, num_candidates] f32, best first -> [..., NUM_FEATURES]
        """
        ranks = torch.arange(self.num_candidates, device=logprobs.device)
        ranks = ranks.expand_as(logprobs).to(logprobs.dtype)
        parts = (
            logprobs,
            logprobs.exp(),
            logprobs - logprobs[..., :1],
            ranks / max(self.num_candidates - 1, 1),
            (ranks == 0).to(logprobs.dtype),
        )
        return torch.stack(parts, dim=-1)

    def forward(
        self,
        embeds: torch.Tensor,
        logprobs: torch.Tensor,
        hidden: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits of each position's candidates after each of the position before.

        Args:
            embeds: [num_rows, num_slots, num_candidates, hidden], embeddings of the candidates,
                best first.
            logprobs: [num_rows, num_slots, num_candidates] f32, their log probabilities.
            hidden: [num_rows, num_slots, hidden], hidden states of the block tokens.
            context: [num_rows, hidden], combined features of the last context token.

        Returns:
            [num_rows, num_slots, num_candidates before, num_candidates] f32; at the first position
            all rows of a block are those after the root.
        """
        num_slots = hidden.shape[1]
        dtype = self.slot_embedding.dtype
        states = self.token_proj(embeds) + self.pass_hidden_proj(hidden)[..., None, :]
        states = states + self.feature_mlp(self.feature_norm(self.features(logprobs).to(dtype)))
        states = states + self.slot_embedding[0, :, :num_slots] + self.rank_embedding[0]
        states = states.flatten(1, 2)
        bias = self.attention_bias(num_slots)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states).unflatten(1, (num_slots, -1))
        anchor = self.anchor_norm(self.context_proj(context))
        anchors = anchor[:, None, None].expand_as(states)
        factors = F.silu(self.factor_input_proj(torch.cat((states, anchors, states * anchors), -1)))
        of_root, leaving, entering = (
            F.normalize(vectors, dim=-1, eps=self.vector_eps)
            for vectors in (
                self.anchor_out_head(anchor), self.out_head(factors), self.in_head(factors)
            )
        )  # fmt: skip
        first = of_root[:, None, None].expand(-1, -1, self.num_candidates, -1)
        before = torch.cat((first, leaving[:, :-1]), dim=1)
        return self.logit_scale * (before @ entering.transpose(-1, -2)).float()


class LiLiCorrHead(SequentialHead):
    """DFlash network with a :class:`Correlator`, which proposes only the ``lilicorr_candidate_topk``
    most probable candidates of each position.

    The config has the ``lilicorr_`` settings named in :data:`SETTINGS` besides those of DFlash.
    """

    kind = "LiLiCorr"
    known = KNOWN | {"lilicorr_enabled", *(f"lilicorr_{name}" for name in SETTINGS)}
    drafter_class = LatticeBlockDrafter
    reads_whole_block = True

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        settings = self._correlator_settings()
        for name, value in settings.items():
            kinds = (int, float) if name in FRACTIONS else int
            # A hidden_size of 0 stands for the network's.
            if not isinstance(value, kinds) or value < 0 or (value == 0 and name != "hidden_size"):
                raise UnsupportedModelError(
                    f"the {self.kind} head's config has lilicorr_{name} {value!r}; it must be a positive number"
                )
        width = settings["hidden_size"] or self.config.hidden_size
        if width % settings["num_heads"]:
            raise UnsupportedModelError(
                f"the {self.kind} head has a width of {width}, which its {settings['num_heads']} attention heads do "
                "not divide"
            )
        if self._setting("sample_from_anchor") or self._setting("query_zero_predicts_next"):
            raise UnsupportedModelError(
                f"the {self.kind} head's config has sample_from_anchor; candidates of the root's block token are not "
                "implemented"
            )
        if self._setting("draft_vocab_size", self.config.vocab_size) != self.config.vocab_size:
            raise UnsupportedModelError(
                f"the {self.kind} head has a reduced vocabulary; only the target's is implemented"
            )

    def _add_modules(self) -> None:
        config = self.config
        self.lilicorr = Correlator(
            config.hidden_size, self.block_size, config.rms_norm_eps, self._correlator_settings()
        )

    def _correlator_settings(self) -> dict[str, Any]:
        return {name: self._setting(f"lilicorr_{name}") for name in SETTINGS}

    def lattice(self, outputs: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        """Return every position's candidates and their scores.

        Args:
            outputs: [num_rows, num_slots, output_size], of all mask tokens of the blocks.
            contexts: [num_rows, hidden], from :meth:`combine`, of the last context tokens.

        Returns:
            [num_rows, num_slots, 2 * num_candidates + num_candidates**2] f32: the ids of the
            position's candidates, those of the position before, and the logits of the former after
            each of the latter.
        """
        logits, hidden = outputs.tensor_split((self.draft_vocab_size,), dim=-1)
        best = logits.float().log_softmax(-1).topk(self.lilicorr.num_candidates, dim=-1)
        # without the factor that the embedding modules of some targets apply
        weight: Any = self.get_input_embeddings().weight
        embeds = F.embedding(best.indices, weight)
        scores = self.lilicorr(embeds, best.values, hidden, contexts)
        ids = best.indices.float()  # exact below 2**24
        before = F.pad(ids[:, :-1], (0, 0, 1, 0), value=-1.0)
        return torch.cat((ids, before, scores.flatten(2)), dim=-1)

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        # outputs are rows of the lattice here
        num = self.lilicorr.num_candidates
        ids, before, scores = outputs.tensor_split((num, 2 * num), dim=-1)
        # 0 for the root, and for tokens of a grammar that are not among the candidates
        index = (tokens[..., None] == before[:, None]).int().argmax(-1)
        rows = scores.unflatten(-1, (num, num)).gather(1, index[..., None].expand(-1, -1, num))
        return Scores(scattered(rows, ids.long(), self.draft_vocab_size))


class ConvolvedLiLiCorrHead(LiLiCorrHead, ConvolvedHead):
    """LiLiCorr network over the layers of DFlash2."""

    known = LiLiCorrHead.known | {"conv_kernel_size", "conv_group_size"}
