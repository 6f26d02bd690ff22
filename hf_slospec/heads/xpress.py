"""XPress network: DFlash with a refiner, which corrects each position's logits by all tokens drafted
before it and by a summary of the block (arXiv 2608.02438).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import silu

from hf_slospec.drafters.level import Scores
from hf_slospec.heads.dflash import KNOWN, SequentialHead


class Refiner(nn.Module):
    """Computes a bias for a position's logits from the token before it, its hidden state, the mean
    hidden state of the block, and the same of all earlier positions of the block.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        block_size: int,
        rank: int,
        mlp_size: int,
    ):
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        # Weight of each position for each later one, by channel; what is above the diagonal is not
        # read.
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, mlp_size, bias=False)
        self.mlp_up = nn.Linear(rank, mlp_size, bias=False)
        self.mlp_down = nn.Linear(mlp_size, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the bias for the logits of the nodes' children.

        Args:
            tokens: [num_rows, beam] int64, the nodes' tokens, as ids of the target.
            hidden: [num_rows, beam, hidden], hidden states of the block token in ``slot``, which
                predicts the children.
            states: [num_rows, beam, (1 + slot) * rank], the block's projected mean hidden state,
                and the inputs of the mixer at the earlier positions.
            slot: index in the block.

        Returns:
            The bias [num_rows, beam, draft_vocab], and the states with this position's input.
        """
        rank = self.down_h.out_features
        sources = self.down_h(hidden), states[..., :rank], self.token_embed(tokens)
        states = torch.cat((states, self.in_proj(torch.cat(sources, dim=-1))), dim=-1)
        inputs = states[..., rank:].unflatten(-1, (-1, rank))  # [num_rows, beam, 1 + slot, rank]
        mixed = inputs[..., -1, :] + (inputs * self.mix_l[:, slot, : slot + 1].T).sum(-2)
        mixed = mixed + self.mlp_down(silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
        return self.readout(mixed), states


class XPressHead(SequentialHead):
    """DFlash network with a :class:`Refiner`.

    The config has ``xpress_rank``, and ``xpress_mlp_hidden`` or ``xpress_mlp_ratio``, besides the
    settings of DFlash. Where other engines repeat passes over a block until its tokens settle, the
    beam search here computes what they settle on.
    """

    kind = "XPress"
    known = KNOWN | {"xpress_rank", "xpress_mlp_hidden", "xpress_mlp_ratio", "xpress_block_size"}
    reads_whole_block = True
    is_recurrent = True

    def _add_modules(self) -> None:
        rank = int(self._setting("xpress_rank", 256))
        mlp_size = int(
            self._setting("xpress_mlp_hidden", rank * int(self._setting("xpress_mlp_ratio", 2)))
        )
        self.refiner = Refiner(
            self.config.vocab_size,
            self.draft_vocab_size,
            self.config.hidden_size,
            self.block_size,
            rank,
            mlp_size,
        )

    @property
    def first_read_slot(self) -> int:
        return 0  # later positions read the root's block token, even if it makes no prediction

    def initial_states(self, outputs: torch.Tensor) -> torch.Tensor:
        hidden = outputs[..., self.draft_vocab_size :].mean(1, keepdim=True)
        states: torch.Tensor = self.refiner.down_g(hidden)
        return states

    def token_before(self, token_ids: Sequence[int]) -> int:
        return token_ids[-2:][0]  # the token before the root, as in training

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        assert states is not None, "nodes have states"
        logits, hidden = self.by_node(outputs, tokens.shape[1])
        bias, states = self.refiner(tokens, hidden, states, self.first_slot + depth)
        return Scores(logits + bias, states)
