"""A transformers causal LM that forwards several sequences' tokens as one packed row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.attention import BACKENDS, PackedForward, Span, active_forward
from hf_slospec.models.kv_pool import CachedSequence, KVPool, LayerShape

# A 4D mask is passed through untouched by every mask builder; nothing reads this one.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)


@dataclass(eq=False)
class Fresh:
    """Tokens of one sequence that a forward adds behind those already in the KV pool."""

    sequence: CachedSequence
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_fresh] int64; fresh: staged by earlier forwards of this step, then these tokens
    mask: torch.Tensor  # [num_tokens, num_fresh] bool, True = may attend


class PackedModel:
    """Packed forwards of ``model``, found by trial to reach every attention layer; otherwise refused by name."""

    def __init__(self, model: Any, attention: str = "auto"):
        self.model = model
        self.backend = BACKENDS[attention]
        _refuse_by_declaration(model)
        self.layout, self.dtype = _probe(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model declares; None if it declares none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def inside(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions that a learned position table can serve, for tokens whose output will not be committed."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def new_pool(self, num_slots: int) -> KVPool:
        return KVPool(self.layout, num_slots, self.dtype, self.device)

    @torch.no_grad()
    def forward(self, pool: KVPool, parts: Sequence[Fresh], logit_rows: torch.Tensor) -> torch.Tensor:
        """Stage the K/V of all parts' tokens and return the logits of some rows.

        Args:
            pool: where the parts' sequences live.
            parts: one per sequence; their tokens form the row in this order.
            logit_rows: [num_logits] int64, tokens of the row whose logits are wanted.

        Returns:
            [num_logits, vocab], in the model's dtype.
        """
        spans, begin = [], 0
        for part in parts:
            assert part.sequence.length + len(part.positions) <= part.sequence.capacity
            end = begin + len(part.input_ids)
            spans.append(Span(part.sequence, begin, end, part.mask, part.positions))
            begin = end
        forward = PackedForward(pool, spans, self.backend)
        input_ids = torch.cat([part.input_ids for part in parts])[None]
        position_ids = torch.cat([part.positions[-len(part.input_ids) :] for part in parts])[None]
        return _run(
            self.model, forward, input_ids, position_ids, logit_rows if self._keeps_logits else None, logit_rows
        )


def _run(
    model: Any,
    forward: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    keep: torch.Tensor | None,
    logit_rows: torch.Tensor,
) -> torch.Tensor:
    unread_mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=input_ids.device)
    optional = {} if keep is None else {"logits_to_keep": keep}
    with active_forward(model, forward):
        logits = model(
            input_ids=input_ids,
            attention_mask=unread_mask,
            position_ids=position_ids,
            past_key_values=forward,
            use_cache=True,
            return_dict=True,
            **optional,
        ).logits[0]
    return logits if keep is not None else logits[logit_rows]


def _refuse_by_declaration(model: Any) -> None:
    """Refuse what a model says of itself: no causal decoder, recurrent state, or attention of its own."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models can be speculated")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state, which cannot hold a tree of tokens (a rejected token cannot be undone); "
            "use a model whose layers are all attention"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not use transformers' attention interface (_supports_attention_backend is not set), so tree "
            "attention cannot be put in; use a model class that does, such as Llama, Qwen, Mistral, Gemma, GPT-2 or OPT"
        )
    if len(devices := {str(p.device) for p in model.parameters()}) > 1:
        raise UnsupportedModelError(f"{name} is spread over {', '.join(sorted(devices))}; load it on one device")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"{name} has layers of type {sorted(unknown)}, which cannot hold a tree of tokens")


class _Probe:
    """Stands in for a packed forward once: attends plainly and notes what each layer caches and asks for."""

    def __init__(self) -> None:
        self.layout: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.layer = -1
        self.key: torch.Tensor | None = None
        self.has_own_mask = False

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layout[layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.layer, self.key = layer_idx, key
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        mask: torch.Tensor | None,
        window: int | None,
        **_: Any,
    ) -> torch.Tensor:
        # One token attends to itself only, so attention is the value, repeated for the query heads of each group.
        if key is self.key:
            self.windows[self.layer] = window
        self.has_own_mask |= mask is not None and (mask.dtype != torch.bool or mask.shape != UNREAD_MASK_SHAPE)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def refusal(self, config: Any) -> str | None:
        """Why the model cannot be packed, going by what its layers did; None if it can."""
        layers = sorted(self.layout)
        if not layers or layers != list(range(len(layers))) or self.windows.keys() != self.layout.keys():
            return f"{len(layers)} layers cache keys and {len(self.windows)} of them attend through the interface"
        if self.has_own_mask:
            return "its layers put something of their own into the attention mask"
        kinds = getattr(config, "layer_types", None)
        for layer in layers:
            has_window = kinds[layer] == "sliding_attention" if kinds else getattr(config, "sliding_window", None)
            if has_window and self.windows[layer] is None:
                return f"layer {layer} has a sliding window that it does not pass to its attention function"
        return None


@torch.no_grad()
def _probe(model: Any) -> tuple[list[LayerShape], torch.dtype]:
    """Forward one token to learn what each layer caches, and that every layer attends through the interface."""
    probe = _Probe()
    device = model.get_input_embeddings().weight.device
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        _run(model, probe, zero, zero, None, zero[0])
        why = probe.refusal(model.config.get_text_config())
    except (TypeError, AttributeError, NotImplementedError) as error:
        why = f"its forward asks for more than a packed row can give ({type(error).__name__}: {error})"
    if why is not None or probe.key is None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be packed: {why}")
    return [probe.layout[layer] for layer in sorted(probe.layout)], probe.key.dtype
