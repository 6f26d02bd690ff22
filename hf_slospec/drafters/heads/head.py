"""Base of heads that draft one token after another from hidden states of the target."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput

from hf_slospec.models.inspection.cache_names import cache_option


class DraftHead(PreTrainedModel):
    """Network that drafts from hidden states of the target (features), one token after another.

    Entry i takes the feature of token i and the embedding of token i + 1, and predicts token i + 2. For draft nodes,
    whose features are not known, the hidden state that the parent's entry returns replaces the feature. Entries attend
    to each other through transformers' attention interface, so that forwards can be packed.
    """

    _supports_sdpa = True
    _supports_attention_backend = True
    kind: ClassVar[str]  # name in errors and descriptions

    feature_layers: tuple[int, ...]  # hidden states of the target, numbered as in its output_hidden_states
    embed_tokens: nn.Module  # the target's or the head's own
    target_ids: torch.Tensor | None  # [draft_vocab] int64, the target's ids of a reduced vocabulary; None: the same ids

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the target's tokens."""
        return self.embed_tokens

    @property
    def hidden_size(self) -> int:
        """Size of the hidden state that entries take and return."""
        return int(self.config.hidden_size)

    @property
    def target_hidden_size(self) -> int:
        """Size of one hidden state of the target."""
        return self.hidden_size

    @property
    def packed_input_size(self) -> int:
        """Size of an entry's inputs, which packed forwards take in place of ids: an embedding and a hidden state."""
        weight: Any = self.embed_tokens.weight
        return int(weight.shape[-1]) + self.hidden_size

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that entries take, computed from features of the target.

        Args:
            features: [num_tokens, len(feature_layers) * target_hidden], the layers' states concatenated.

        Returns:
            [num_tokens, hidden].
        """
        raise NotImplementedError

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        attention_mask: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the logits and the children's hidden states, [1, num_tokens, hidden] each.

        Args:
            embeds: [1, num_tokens, embedding].
            hidden: [1, num_tokens, hidden], combined features, or hidden states that the parents' entries returned.
            position_ids: [1, num_tokens] int64.
            cache: cache that the layers update; None: entries attend to each other only.
            attention_mask: from :meth:`mask`.
        """
        raise NotImplementedError

    def mask(self, **arguments: Any) -> Any:
        """Return the layers' masks in the form of the attention implementation; None: causal, if that is its default.

        ``arguments`` are those of transformers' functions that make masks.
        """
        return create_causal_mask(**arguments)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the head's vocabulary.  [num_rows, hidden] -> [num_rows, draft_vocab]"""
        logits: torch.Tensor = self.lm_head(states)
        return logits

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """Forward entries.

        Args:
            input_ids: [1, num_tokens] int64, for trials and measurements: their embeddings replace hidden states.
            attention_mask: padding mask, or a whole mask [1, 1, num_tokens, num_keys]; None: causal.
            inputs_embeds: [1, num_tokens, embedding + hidden], embeddings and hidden states, concatenated.
            logits_to_keep: [num_rows] int64, the entries whose outputs to return; 0: all.

        Returns:
            ``logits`` [1, num_rows, draft_vocab + hidden]: logits and the children's hidden states, concatenated.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            embeds = self.embed_tokens(input_ids)
            hidden = embeds[..., torch.arange(self.hidden_size, device=embeds.device) % embeds.shape[-1]]
        else:
            embeds, hidden = inputs_embeds[..., : -self.hidden_size], inputs_embeds[..., -self.hidden_size :]
        assert position_ids is not None
        mask = self.mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            **cache_option(cache),
            position_ids=position_ids,
        )
        states, next_hidden = self.run(embeds, hidden, position_ids, cache, mask)
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=torch.cat((self.logits(states[:, rows]), next_hidden[:, rows]), dim=-1))


def own_modules(head: nn.Module, target: PreTrainedModel) -> nn.ModuleDict:
    """Return a head's direct submodules by name, without those of the target."""
    shared = {id(module) for module in target.modules()}
    return nn.ModuleDict({name: module for name, module in head.named_children() if id(module) not in shared})
