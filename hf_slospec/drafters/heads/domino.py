"""Domino heads: DFlash blocks whose logits are corrected by all tokens before, which a GRU reads."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from hf_slospec.drafters.heads.dflash import KNOWN, SequentialHead
from hf_slospec.errors import UnsupportedModelError

SETTINGS = {"gru_hidden_dim": 1, "emb_dim": 1, "pure_draft_prefix_len": 0}  # their least values


class DominoHead(SequentialHead):
    """DFlash network with a GRU over the root and the tokens drafted before a position.

    The config has ``gru_hidden_dim``, ``emb_dim`` and ``pure_draft_prefix_len`` (positions that are not corrected)
    besides the settings of DFlash.
    """

    kind: ClassVar[str] = "Domino"
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
        hidden, (size, rank) = self.config.hidden_size, map(self._setting, ("gru_hidden_dim", "emb_dim"))
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
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        assert states is not None, "nodes have states"
        logits, hidden = self.by_node(outputs, tokens.shape[1])
        embeds = self.embed(tokens)
        states = self.prefix_gru(embeds.flatten(0, 1), states.flatten(0, 1)).view(*tokens.shape, -1)
        if depth >= self.num_uncorrected:
            logits = logits + self.embed_proj(torch.cat((hidden, states), dim=-1))
        return logits, states, None
