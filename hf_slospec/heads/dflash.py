"""DFlash network, which predicts all tokens of a block in one forward; base of DFlash2 and DSpark.

``block_drafter.py`` builds draft trees from the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# Supported entries of dflash_config: the code below reads them, or they do not change the forward.
# A head whose config sets any other entry is refused.
KNOWN = {
    "block_size", "mask_token_id", "target_layer_ids", "causal", "is_causal", "causal_head",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "use_swa",
    "swa_window_size", "sample_from_anchor", "query_zero_predicts_next", "projector_type",
    "num_anchors",
}  # fmt: skip


class DFlashHead(Head):
    """Network that predicts a block of tokens from the target's hidden states (features).

    All tokens of a request but the last are context tokens. Each layer computes their K and V from
    their combined features alone and caches them. A block consists of the request's last token,
    which has no features yet, followed by mask tokens. Block tokens attend to the context tokens
    and to each other. Each mask token predicts the token at its position; in some heads, each block
    token predicts the token at the next position instead.

    A forward with ``inputs_embeds`` only caches K and V of context tokens; it computes no queries
    and no MLPs. A forward with ``input_ids`` returns the logits of block tokens. Both run as packed
    forwards: context tokens are packed like a prompt given as embeddings, and block tokens like a
    draft tree of which nothing is committed."""

    config_class: Any = Qwen3Config
    kind = "DFlash"
    drafter_class: ClassVar[Any] = BlockDrafter
    reads_whole_block: ClassVar[bool] = (
        False  # trees need the outputs of more levels than they have
    )
    caches_context = True  # a forward of context tokens only caches K and V, without attention
    known: ClassVar[set[str]] = KNOWN
    layer_class: ClassVar[Any] = Qwen3DecoderLayer
    norm_class: ClassVar[Any] = Qwen3RMSNorm
    rotary_class: ClassVar[Any] = Qwen3RotaryEmbedding
    # Factor for the embeddings if the config sets none; None: leave the embedding module's output
    # as it is, including a factor that the module applies.
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
                (indices of target layers) or ``aux_hidden_state_layer_ids`` (indices in the
                target's output_hidden_states), at its top level or in ``dflash_config``.
            embed_tokens: the target's embeddings to share; None: create embeddings for the head.
            lm_head: the target's lm_head to share; None: create one for the head.

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
        # Entry 0 of the target's output_hidden_states is the embeddings, so layer i is entry i + 1.
        outputs_of = self._setting("target_layer_ids") or ()
        self.feature_layers = tuple(
            self._setting("aux_hidden_state_layer_ids") or (layer + 1 for layer in outputs_of)
        )
        self._refuse_unsupported()
        # first_slot: index of the block token that makes the first prediction: 0 is the request's
        # last token (the root of the draft tree), 1 the first mask token.
        predicts_next = self._setting(
            "query_zero_predicts_next", self._setting("sample_from_anchor")
        )
        self.first_slot = 0 if predicts_next else 1
        # sees_later: block tokens attend to later block tokens in full-attention layers;
        # sees_later_in_window: they do so in sliding-window layers.
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
        # post_init() would overwrite the target's weights, so its modules are attached after it.
        self.embed_tokens = self.embed_tokens if embed_tokens is None else embed_tokens
        self.lm_head = self.lm_head if lm_head is None else lm_head

    def _add_modules(self) -> None:
        """Add the modules of a subclass; called before post_init() initialises weights."""

    @property
    def first_read_slot(self) -> int:
        """Index of the first block token whose outputs are read: ``first_slot``, or the index
        before it if a subclass needs that token's outputs too.
        """
        return self.first_slot

    @property
    def num_proposals(self) -> int:
        """Number of positions that one block predicts, which bounds the depth of draft trees."""
        return self.block_size - self.first_slot

    @property
    def output_size(self) -> int:
        """Size of the last dimension of :meth:`outputs`, which subclasses may append states to."""
        return self.draft_vocab_size

    def _setting(self, name: str, default: Any = None) -> Any:
        """Return a setting from ``dflash_config`` or, failing that, from the config's top level;
        ``default`` if neither has a value that is not None.
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
        if self._setting("is_neox_style") is False:
            raise UnsupportedModelError(
                f"the {self.kind} head's config has is_neox_style False; rotating neighbouring channels is "
                "not implemented"
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
        """Return projected and normalised features, the input for K and V of context tokens.

        [num_tokens, len(feature_layers) * target_hidden] -> [num_tokens, hidden]
        """
        combined: torch.Tensor = self.hidden_norm(self.fc(features))
        return combined

    def cache_context(self, combined: torch.Tensor, position_ids: torch.Tensor, cache: Any) -> None:
        """Compute K and V of context tokens in every layer, and append them to the cache.

        Args:
            combined: [1, num_tokens, hidden], from :meth:`combine`.
            position_ids: [1, num_tokens] int64.
            cache: transformers cache, or the hook of a packed forward.
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
        """Return K, before the rotary embedding, and V of context tokens in one layer.

        [1, num_tokens, hidden] -> [1, num_tokens, num_kv_heads, head_dim] each
        """
        keys, values = (
            projection(combined).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.k_proj, attention.v_proj)
        )
        return attention.k_norm(keys), values

    def layer_options(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Return extra keyword arguments for every layer's forward.

        Args:
            input_ids: [batch, num_tokens] int64, block tokens.
        """
        del input_ids
        return {}

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of block tokens, multiplied by ``embedding_scale`` if it is set.

        [1, num_tokens] int64 -> [1, num_tokens, hidden]
        """
        module = self.get_input_embeddings()
        embeds: torch.Tensor = module(input_ids)
        if self.embedding_scale is None:
            return embeds
        # The embedding module of some targets (Gemma) already multiplies by embed_scale.
        scale = self.embedding_scale / getattr(module, "embed_scale", 1.0)
        return embeds if isinstance(scale, float) and scale == 1.0 else embeds * scale

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states after the final norm, with logit scale and softcap.

        [1, num_rows, hidden] -> [1, num_rows, draft_vocab]
        """
        logits: torch.Tensor = self.lm_head(states)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap > 0.0 else logits

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return the forward's outputs for block tokens: their logits, to which subclasses append
        what drafting a tree needs.

        [1, num_rows, hidden], after the final norm -> [1, num_rows, output_size]
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
        """Compute the outputs of block tokens, or cache K and V of context tokens.

        Without a mask, attention is causal, as the trial that compares packed with plain forwards
        expects.

        Args:
            input_ids: [batch, num_tokens] int64, block tokens.
            attention_mask: additive or boolean mask for all layers; packed attention ignores it.
            position_ids: [1, num_tokens] int64; None: 0, 1, 2, ...; required with
                ``inputs_embeds``.
            cache: cache that the layers update.
            inputs_embeds: [1, num_tokens, hidden], combined features of context tokens, which have
                no logits.
            logits_to_keep: [num_rows] int64, indices of the block tokens whose outputs to return;
                0: all. For context tokens, its length is the number of rows of zeros to return.

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
    """Base of block heads that correct each prediction by the token drafted before it.

    One forward returns logits and hidden states for all positions of a block. :meth:`after` then
    corrects them level by level for each node of the draft tree, so that the probabilities of a
    node's children depend on the node."""

    drafter_class = SequentialBlockDrafter
    is_recurrent: bool = False  # draft nodes have states, computed from the state of the parent

    @property
    def output_size(self) -> int:
        return int(self.draft_vocab_size + self.config.hidden_size)

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits and hidden states, concatenated in the last dimension."""
        return torch.cat((self.logits(states), states), dim=-1)

    def initial_states(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the recurrent states of the roots of draft trees.

        [num_rows, num_read_slots, output_size], outputs of the blocks -> [num_rows, 1, state_size]
        """
        raise NotImplementedError

    def token_before(self, token_ids: Sequence[int]) -> int:
        """Return the token that ``after`` reads for the block token before the first prediction,
        given all tokens of a request: the root, which the first prediction reads again.
        """
        return token_ids[-1]

    def by_node(self, outputs: torch.Tensor, beam: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a block token's outputs into logits and hidden states, both repeated for the beam.

        [num_rows, output_size] -> [num_rows, beam, draft_vocab], [num_rows, beam, hidden]
        """
        logits, hidden = outputs.tensor_split((self.draft_vocab_size,), dim=-1)
        return logits[:, None].expand(-1, beam, -1), hidden[:, None].expand(-1, beam, -1)

    def after(
        self, tokens: torch.Tensor, outputs: torch.Tensor, states: torch.Tensor | None, depth: int
    ) -> Scores:
        """Return the logits of the nodes' children, and their recurrent states if there are any.

        ``log_acceptance`` of the scores is None if the head does not predict it.

        Args:
            tokens: [num_rows, beam] int64, the nodes' tokens, as ids of the target.
            outputs: [num_rows, output_size], outputs of the block token that predicts the children.
            states: [num_rows, beam, state_size], the nodes' recurrent states; None if the head is
                not recurrent.
            depth: depth of the nodes in the draft tree; 0: roots; -1: the token before the first
                prediction, of which only the states are used.
        """
        raise NotImplementedError


def _causal_mask(states: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return an additive causal mask, in which a token sees at most ``window`` tokens if it is set.

    states [batch, num_tokens, hidden] -> [1, 1, num_tokens, num_tokens]
    """
    positions = torch.arange(states.shape[1], device=states.device)
    distances = positions[:, None] - positions  # query position minus key position
    is_seen = distances >= 0
    if window is not None:
        is_seen &= distances < window
    return torch.zeros_like(is_seen, dtype=states.dtype).masked_fill_(~is_seen, -torch.inf)[
        None, None
    ]
