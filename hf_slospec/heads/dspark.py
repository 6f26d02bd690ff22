"""DSpark and Domino networks: DFlash with a module that corrects each position's logits by the
tokens drafted before the position, and in DSpark also one that predicts acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from hf_slospec.drafters.level import Scores
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.dflash import KNOWN, SequentialHead

# Settings of Domino heads, and the least value of each.
SETTINGS = {"gru_hidden_dim": 1, "emb_dim": 1, "pure_draft_prefix_len": 0}


class DominoHead(SequentialHead):
    """DFlash network with a GRU that reads the tokens from the root to a node, by which the logits
    of the node's children are corrected.

    The config has ``gru_hidden_dim``, ``emb_dim`` and ``pure_draft_prefix_len`` (number of
    leading positions that are not corrected) besides the settings of DFlash.
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

    def initial_states(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.new_zeros(len(outputs), 1, self.prefix_gru.hidden_size)

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


# Kind of a Markov head, by the module that only this kind has; a head with neither is "vanilla".
MARKOV_KINDS = {
    "gate_proj": "gated",
    "joint_proj": "rnn",
}


class MarkovHead(nn.Module):
    """Computes a low-rank bias for a position's logits from the token before the position."""

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int, kind: str
    ):
        """Make a module with random weights.

        Args:
            vocab_size: number of tokens in the target's vocabulary.
            draft_vocab_size: number of tokens in the head's vocabulary.
            hidden_size: size of the block tokens' hidden states.
            rank: size of the token embeddings and, for ``"rnn"``, of the recurrent states.
            kind: ``"vanilla"``, ``"gated"`` (the hidden state gates the embedding) or ``"rnn"``
                (the bias also depends on a recurrent state).
        """
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
        """Compute the bias for the logits of the nodes' children.

        Args:
            embeds: [..., rank], embeddings of the nodes' tokens.
            hidden: [..., hidden], hidden states of the block token that predicts the children.
            states: [..., rank], the nodes' recurrent states; None unless the kind is ``"rnn"``.

        Returns:
            The bias [..., draft_vocab], and the children's recurrent states, [..., rank] or None.
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
    """Predicts the probability that the target accepts a position's proposal."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the log probability of acceptance.  [..., size] -> [...] f32"""
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
        # A recurrent head computes its first states from the outputs of the root's block token,
        # even if that token makes no prediction.
        return 0 if self.is_recurrent else self.first_slot

    def initial_states(self, outputs: torch.Tensor) -> torch.Tensor:
        assert self.markov_head is not None
        return outputs.new_zeros(len(outputs), 1, self.markov_head.markov_w1.embedding_dim)

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
