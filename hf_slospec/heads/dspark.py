"""DSpark heads: DFlash blocks whose logits are corrected by the token before, which its Markov head
reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from hf_slospec.drafters.level import Scores
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.dflash import KNOWN, SequentialHead

SETTINGS = {"gru_hidden_dim": 1, "emb_dim": 1, "pure_draft_prefix_len": 0}  # their least values


class DominoHead(SequentialHead):
    """DFlash network with a GRU over the root and the tokens drafted before a position.

    The config has ``gru_hidden_dim``, ``emb_dim`` and ``pure_draft_prefix_len`` (positions that are
    not corrected) besides the settings of DFlash.
    """

    kind = "Domino"
    known = KNOWN | {*SETTINGS, "shift_label"}
    is_recurrent = True

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        for name, least in SETTINGS.items():
            value = self._setting(name, None if least else 0)
            if not isinstance(value, int) or value < least:
                raise UnsupportedModelError(
                    f"the {self.kind} head's config has {name} {value!r}; it must be an integer of at least {least}"
                )

    def _add_modules(self) -> None:
        hidden = self.config.hidden_size
        size, rank = map(self._setting, ("gru_hidden_dim", "emb_dim"))
        self.num_uncorrected: int = self._setting("pure_draft_prefix_len", 0)
        self.prefix_gru = nn.GRUCell(hidden, size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, self.draft_vocab_size, bias=False),
        )

    def initial_states(self, num_rows: int) -> torch.Tensor:
        return self.prefix_gru.weight_hh.new_zeros(num_rows, 1, self.prefix_gru.hidden_size)

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        assert states is not None, "nodes have states"
        logits, hidden = self.by_node(outputs, tokens.shape[1])
        embeds = self.embed(tokens)
        states = self.prefix_gru(embeds.flatten(0, 1), states.flatten(0, 1)).view(*tokens.shape, -1)
        if depth >= self.num_uncorrected:
            logits = logits + self.embed_proj(torch.cat((hidden, states), dim=-1))
        return Scores(logits, states)


MARKOV_KINDS = {
    "gate_proj": "gated",
    "joint_proj": "rnn",
}  # by the tensor that only this kind has; others: vanilla


class MarkovHead(nn.Module):
    """Bias of a position's logits by the token before, of low rank."""

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int, kind: str
    ):
        """Make a module with random weights; ``kind`` is vanilla, gated or rnn."""
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the bias [..., draft_vocab], and the states of the nodes' children.

        Args:
            embeds: [..., rank], of the tokens before the position.
            hidden: [..., hidden], normed states of the position's block token.
            states: [..., rank], of the recurrent kind; None: other kinds have none.
        """
        latent = embeds
        next_states = states
        if self.kind == "gated":
            latent = torch.sigmoid(self.gate_proj(torch.cat((hidden, embeds), dim=-1))) * embeds
        elif self.kind == "rnn":
            assert states is not None, "the recurrent kind has states"
            gate, candidate, output = self.joint_proj(
                torch.cat((states, embeds, hidden), dim=-1)
            ).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            next_states = gate * states + (1.0 - gate) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return self.markov_w2(latent), next_states


class ConfidenceHead(nn.Module):
    """Predictor of the probability that a position's proposal is accepted."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return log probabilities.  [..., size] -> [...] f32"""
        return logsigmoid(self.proj(features)[..., 0].float())


class DSparkHead(SequentialHead):
    """DFlash network with a Markov head, a confidence head or both.

    The config has ``markov_rank`` (0: no Markov head), ``markov_head_type``,
    ``enable_confidence_head`` and ``confidence_head_with_markov`` besides the settings of DFlash.
    """

    kind = "DSpark"
    known = KNOWN | {
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    }

    def _add_modules(self) -> None:
        config = self.config
        hidden = config.hidden_size
        rank = int(config.markov_rank)
        kind = config.markov_head_type
        self.markov_head: MarkovHead | None = None
        if rank:
            self.markov_head = MarkovHead(
                config.vocab_size, self.draft_vocab_size, hidden, rank, kind
            )
        self.is_recurrent = kind == "rnn" and rank > 0
        self.confidence_head: ConfidenceHead | None = None
        self.reads_embeds = bool(config.confidence_head_with_markov)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(hidden + rank if self.reads_embeds else hidden)

    @property
    def first_read_slot(self) -> int:
        # The root's own outputs begin the states of recurrent heads that predict from the second
        # token on.
        return 0 if self.is_recurrent else self.first_slot

    def initial_states(self, num_rows: int) -> torch.Tensor:
        assert self.markov_head is not None
        weight = self.markov_head.markov_w1.weight
        return weight.new_zeros(num_rows, 1, weight.shape[1])

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        logits, hidden = self.by_node(outputs, tokens.shape[1])
        features: Any = hidden
        if self.markov_head is not None:
            embeds = self.markov_head.markov_w1(tokens)
            bias, states = self.markov_head(embeds, hidden, states)
            logits = logits + bias
            if self.reads_embeds:
                features = torch.cat((hidden, embeds), dim=-1)
        confidence = None if self.confidence_head is None else self.confidence_head(features)
        return Scores(logits, states, confidence)
