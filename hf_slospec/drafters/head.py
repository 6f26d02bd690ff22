"""Base class of drafting heads, which are networks that read hidden states of the target, and the
method that drafts with a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.level import Vocabulary
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.interfaces import Drafter
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import vocab_size


class Head(PreTrainedModel):
    """Network that drafts from hidden states of the target (features).

    It calls attention through transformers' attention interface, so that forwards can be packed.
    The ``vocab_size`` of its config is the target's."""

    _supports_sdpa = True
    _supports_attention_backend = True
    kind: ClassVar[str]  # name in errors and descriptions
    drafter_class: ClassVar[type[FeatureDrafter]]
    # Minimum number of nodes per request for which K/V slots are reserved: a forward stages as many
    # even if trees are small
    min_nodes = 0
    # Hidden states of the target, numbered as in its output_hidden_states
    feature_layers: tuple[int, ...]
    target_hidden_size: int  # size of one hidden state of the target
    draft_vocab_size: int
    embed_tokens: nn.Module
    # [draft_vocab] int64, the target's token id for each id of the head; None: the ids are the same
    target_ids: torch.Tensor | None

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_buffer("target_ids", None, persistent=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the input embeddings: the target's, or the head's if it has some."""
        return self.embed_tokens

    def _own_embeddings(self) -> nn.Module:
        return nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def set_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Set the target's token ids for the ids of a reduced vocabulary, [draft_vocab] int64."""
        assert target_ids.shape == (self.draft_vocab_size,), "one target id per draft id"
        self.target_ids = target_ids

    def vocabulary(self, vocab_size: int) -> Vocabulary | None:
        """Return the head's reduced vocabulary; None: its token ids are the target's."""
        return None if self.target_ids is None else Vocabulary(self.target_ids, vocab_size)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the network, computed from features, the hidden states of the
        target.

        Args:
            features: [num_tokens, len(feature_layers) * target_hidden], the layers' states
                concatenated.

        Returns:
            [num_tokens, hidden].
        """
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class HeadMethod(DraftMethod):
    """Method that drafts with a trained head, which reads hidden states of the target."""

    head: Head

    @property
    def kind(self) -> str:
        return self.head.kind

    @property
    def model(self) -> Any:
        return self.head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    def check(self, target: Any) -> None:
        config = target.config.get_text_config(decoder=True)
        here = next(target.parameters())
        sizes = self.head.config.vocab_size, self.head.target_hidden_size
        targets = vocab_size(target), config.hidden_size
        if sizes != targets:
            raise IncompatibleDraftError(
                f"the {self.kind} is for a target with a vocabulary of {sizes[0]} tokens and a hidden size of "
                f"{sizes[1]}; this one has {targets[0]} and {targets[1]}; use a head that was trained with this target"
            )
        # all parameters, as some are shared with the target and move with it
        for parameter in self.head.parameters():
            if (parameter.device, parameter.dtype) != (here.device, here.dtype):
                raise IncompatibleDraftError(
                    f"the {self.kind} is in {parameter.dtype} on {parameter.device} and the target in {here.dtype} on "
                    f"{here.device}; load it again after the target was moved or cast"
                )

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        return self.head.drafter_class(draft, room)
