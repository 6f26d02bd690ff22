"""DFlash heads, which predict all tokens of a block in one forward."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from hf_slospec.drafters.head import Head
from hf_slospec.drafters.level import Scores
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.block_drafter import BlockDrafter, SequentialBlockDrafter
from hf_slospec.model.properties import cache_option

# Entries of dflash_config that are read here, or that do not change the forward.
KNOWN = {
    "block_size", "mask_token_id", "target_layer_ids", "causal", "is_causal", "causal_head",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "use_swa",
    "swa_window_size", "sample_from_anchor", "query_zero_predicts_next", "projector_type",
    "num_anchors",
}  # fmt: skip


class DFlashHead(Head):
    """Network that predicts blocks of tokens from hidden states of the target (features).

    All tokens but the last are the context: every layer caches their K and V, computed from their
    combined features alone. A block is the last token, whose features are not known yet, then mask
    tokens. Block tokens attend to the context and to each other, and each mask token predicts the
    token at its position. In some heads, each token of the block predicts the token behind it
    instead.

    A forward of ``inputs_embeds`` only caches the K and V of context tokens, without queries and
    MLPs. A forward of ``input_ids`` computes logits of block tokens. Both are packed forwards:
    context tokens are a prompt of embeddings, and a block is staged like a draft tree and never
    committed."""

    config_class: Any = Qwen3Config
    kind = "DFlash"
    drafter_class: ClassVar[Any] = BlockDrafter
    caches_context = True  # a forward of context tokens caches K and V, and attends to none
    known: ClassVar[set[str]] = KNOWN
    layer_class: ClassVar[Any] = Qwen3DecoderLayer
    norm_class: ClassVar[Any] = Qwen3RMSNorm
    rotary_class: ClassVar[Any] = Qwen3RotaryEmbedding
    # None: the factor of the embeddings themselves
    default_embedding_scale: ClassVar[float | None] = 1.0

    def __init__(
        self,
        config: Qwen3Config,
        embed_tokens: nn.Module | None = None,
        lm_head: nn.Module | None = None,
    ):
        """Make a head with random weights.

        Args:
            config: a Qwen3 config with ``block_size``, ``mask_token_id`` and ``target_layer_ids``
                (numbers of layers) or ``aux_hidden_state_layer_ids`` (of hidden states), at its top
                level or in ``dflash_config``.
            embed_tokens: the target's embeddings; None: the head has its own.
            lm_head: the target's output layer, [hidden] -> [vocab]; None: the head has its own.

        Raises:
            UnsupportedModelError: the config has settings that are not supported.
        """
        super().__init__(config)
        self.block_size = int(self._setting("block_size", 16))
        self.min_nodes = self.block_size
        self.mask_token_id = self._setting("mask_token_id")
        if self._setting("use_swa"):
            config.sliding_window = self._setting("swa_window_size")
            config.layer_types = ["sliding_attention"] * config.num_hidden_layers
        # Numbered as in the target's output_hidden_states.
        outputs_of = self._setting("target_layer_ids") or ()
        self.feature_layers = tuple(
            self._setting("aux_hidden_state_layer_ids") or (layer + 1 for layer in outputs_of)
        )
        self._refuse_unsupported()
        # Token of the block that makes the first prediction: the root, or else the first mask
        # token.
        predicts_next = self._setting(
            "query_zero_predicts_next", self._setting("sample_from_anchor")
        )
        self.first_slot = 0 if predicts_next else 1
        # sees_later: a block's tokens attend to later ones, in layers without and with a sliding
        # window.
        self.is_windowed = "sliding_attention" in (config.layer_types or ())
        is_causal = self._setting(
            "causal", self._setting("is_causal", self._setting("causal_head"))
        )
        self.sees_later = not is_causal
        is_causal = (
            not self._setting("sliding_window_non_causal") if is_causal is None else is_causal
        )
        self.sees_later_in_window = not is_causal
        default_scale = None if self._setting("causal_head") else self.default_embedding_scale
        scale = self._setting("input_embedding_scale", default_scale)
        self.embedding_scale = None if scale is None else float(scale)
        self.logit_scale = float(self._setting("output_multiplier", 1.0))
        self.softcap = float(self._setting("final_logit_softcapping", 0.0))

        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.target_hidden_size = int(getattr(config, "target_hidden_size", hidden))
        self.fc = nn.Linear(len(self.feature_layers) * self.target_hidden_size, hidden, bias=False)
        self.hidden_norm = self.norm_class(hidden, eps=eps)
        self.layers = nn.ModuleList(
            [self.layer_class(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = self.norm_class(hidden, eps=eps)
        self.rotary_emb = self.rotary_class(config)
        self.embed_tokens: Any = self._own_embeddings() if embed_tokens is None else None
        self.draft_vocab_size = int(self._setting("draft_vocab_size", config.vocab_size))
        self.lm_head: Any = (
            nn.Linear(hidden, self.draft_vocab_size, bias=False) if lm_head is None else None
        )
        self._add_modules()
        self.post_init()  # type: ignore[no-untyped-call]
        # Set after the initialisation, which would overwrite the target's weights.
        self.embed_tokens = self.embed_tokens if embed_tokens is None else embed_tokens
        self.lm_head = self.lm_head if lm_head is None else lm_head

    def _add_modules(self) -> None:
        """Add the modules of a variant, before weights are initialised."""

    @property
    def first_read_slot(self) -> int:
        """First token of a block whose outputs are read: the first that predicts, or the one before
        it.
        """
        return self.first_slot

    @property
    def num_proposals(self) -> int:
        """Number of positions that a block predicts."""
        return self.block_size - self.first_slot

    @property
    def output_size(self) -> int:
        """Number of outputs of a block token."""
        return self.draft_vocab_size

    def _setting(self, name: str, default: Any = None) -> Any:
        """Return an entry of ``dflash_config``, or else of the config; ``default`` if it is missing
        or None.
        """
        value = (getattr(self.config, "dflash_config", None) or {}).get(name)
        value = getattr(self.config, name, None) if value is None else value
        return default if value is None else value

    def _refuse_unsupported(self) -> None:
        unknown = {
            name
            for name, value in (getattr(self.config, "dflash_config", None) or {}).items()
            if value
        } - self.known
        if unknown:
            raise UnsupportedModelError(
                f"the {self.kind} head has settings that are not supported: {sorted(unknown)}"
            )
        if self.mask_token_id is None or not self.feature_layers:
            raise UnsupportedModelError(
                f"the {self.kind} head's config lacks mask_token_id or target_layer_ids"
            )
        if not 0 <= self.mask_token_id < self.config.vocab_size:
            raise UnsupportedModelError(
                f"the {self.kind} head's mask_token_id {self.mask_token_id} is outside its vocabulary of "
                f"{self.config.vocab_size} tokens"
            )
        window = self.config.sliding_window
        if self._setting("use_swa") and window is None:
            raise UnsupportedModelError(
                f"the {self.kind} head's config has use_swa, but lacks swa_window_size"
            )
        if window is not None and window < self.block_size:
            raise UnsupportedModelError(
                f"the {self.kind} head has a sliding window of {window} tokens, fewer than its blocks of "
                f"{self.block_size}"
            )

    @property
    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.layers]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the inputs of context tokens' K and V, [num_tokens, hidden]."""
        combined: torch.Tensor = self.hidden_norm(self.fc(features))
        return combined

    def cache_context(self, combined: torch.Tensor, position_ids: torch.Tensor, cache: Any) -> None:
        """Cache every layer's K and V of context tokens.

        Args:
            combined: [1, num_tokens, hidden], from :meth:`combine`.
            position_ids: [1, num_tokens] int64.
            cache: cache to update.
        """
        # [1, 1, num_tokens, head_dim] each
        cos, sin = (part[:, None] for part in self.rotary_emb(combined, position_ids))
        for index, attention in enumerate(self._attentions):
            keys, values = (
                part.transpose(1, 2) for part in self.keys_and_values(attention, combined)
            )
            cache.update(keys * cos + rotate_half(keys) * sin, values, index)

    def keys_and_values(
        self, attention: Any, combined: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's K, before rotation, and V of context tokens.

        [1, num_tokens, hidden] -> [1, num_tokens, num_kv_heads, head_dim] each
        """
        keys, values = (
            projection(combined).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.k_proj, attention.v_proj)
        )
        return attention.k_norm(keys), values

    def layer_options(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Return further arguments of the layers, by the ids of block tokens, [batch, num_tokens]
        int64.
        """
        del input_ids
        return {}

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of block tokens, scaled by the head's factor.

        [1, num_tokens] int64 -> [1, num_tokens, hidden]
        """
        module = self.get_input_embeddings()
        embeds: torch.Tensor = module(input_ids)
        if self.embedding_scale is None:
            return embeds
        scale = self.embedding_scale / getattr(
            module, "embed_scale", 1.0
        )  # some targets' embeddings apply a factor
        return embeds if isinstance(scale, float) and scale == 1.0 else embeds * scale

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of normed states.  [1, num_rows, hidden] -> [1, num_rows, draft_vocab]"""
        logits: torch.Tensor = self.lm_head(states)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap > 0.0 else logits

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return what a forward returns of block tokens' normed states.  -> [1, num_rows,
        output_size]
        """
        return self.logits(states)

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
        """Forward block tokens, or cache context tokens.

        Without a mask, attention is causal, as the trial of packed forwards expects of a plain
        forward.

        Args:
            input_ids: [batch, num_tokens] int64, block tokens.
            attention_mask: additive or boolean mask for all layers; packed attention does not read
                it.
            position_ids: [1, num_tokens] int64; None: counted from 0.
            cache: cache that the layers update.
            inputs_embeds: [1, num_tokens, hidden], combined features of context tokens, which have
                no logits.
            logits_to_keep: [num_rows] int64, the block tokens whose logits to return; 0: all. For
                context tokens, its length is the number of rows of zeros to return.

        Returns:
            ``logits`` [batch, num_rows, output_size]; zeros for context tokens.
        """
        if inputs_embeds is not None:
            assert isinstance(logits_to_keep, torch.Tensor) and position_ids is not None
            self.cache_context(inputs_embeds, position_ids, cache)
            return CausalLMOutput(
                logits=inputs_embeds.new_zeros(1, len(logits_to_keep), self.output_size)
            )
        assert input_ids is not None
        states = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(states.shape[1], device=states.device)[None]
        position_embeddings = self.rotary_emb(states, position_ids)
        options = self.layer_options(input_ids)
        for layer, attention in zip(self.layers, self._attentions, strict=True):
            mask = (
                _causal_mask(states, attention.sliding_window)
                if attention_mask is None
                else attention_mask
            )
            states = layer(
                states,
                attention_mask=mask,
                position_ids=position_ids,
                **cache_option(cache),
                position_embeddings=position_embeddings,
                **options,
            )
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.outputs(self.norm(states[:, rows])))


class SequentialHead(DFlashHead):
    """Base of block heads whose predictions also depend on the token before.

    One forward returns the logits and states of all positions of a block. What follows, position by
    position, depends on the token before, so that siblings of a tree have children with
    probabilities of their own."""

    drafter_class = SequentialBlockDrafter
    is_recurrent: bool = False  # nodes have states

    @property
    def output_size(self) -> int:
        return int(self.draft_vocab_size + self.config.hidden_size)

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits and states, concatenated."""
        return torch.cat((self.logits(states), states), dim=-1)

    def initial_states(self, num_rows: int) -> torch.Tensor:
        """Return the states of roots.  -> [num_rows, 1, rank]"""
        raise NotImplementedError

    def by_node(self, outputs: torch.Tensor, beam: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states of a block token for each node: [num_rows, output_size]
        -> [.., beam, ..].
        """
        logits, hidden = outputs.tensor_split((self.draft_vocab_size,), dim=-1)
        return logits[:, None].expand(-1, beam, -1), hidden[:, None].expand(-1, beam, -1)

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        """Return the scores of nodes' children; ``log_acceptance`` is None if the head does not
        predict it.

        Args:
            tokens: [num_rows, beam] int64, ids of the target.
            outputs: [num_rows, output_size], of the block token that predicts the children.
            states: [num_rows, beam, rank]; None unless nodes have states.
            depth: depth of the nodes; 0: roots.
        """
        raise NotImplementedError


def _causal_mask(states: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the additive causal mask of consecutive tokens, with a sliding window if there is one.

    [batch, num_tokens, hidden] -> [1, 1, num_tokens, num_tokens]
    """
    positions = torch.arange(states.shape[1], device=states.device)
    distances = positions[:, None] - positions  # query position minus key position
    is_seen = distances >= 0
    if window is not None:
        is_seen &= distances < window
    return torch.zeros_like(is_seen, dtype=states.dtype).masked_fill_(~is_seen, -torch.inf)[
        None, None
    ]
