"""Tree attention behind transformers' attention interface.

While a :class:`PackedForward` is active in the current thread, the model's attention layers attend to the packed row's
sequences; at all other times, in all other threads, they behave as the implementation the model was loaded with.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_slospec.models.kv_pool import CachedSequence, KVPool, LayerShape


class AttentionLayer(NamedTuple):
    """What is known of a layer that caches K and V."""

    shape: LayerShape
    window: int | None = None  # sliding: a token attends to itself and window - 1 positions before it
    is_latent: bool = False  # what it caches is expanded into K and V after caching (multi-head latent attention)


@dataclass(eq=False)
class Span:
    """The part of a packed row that belongs to one sequence."""

    sequence: CachedSequence
    begin: int  # its tokens are row[begin:end]
    end: int
    fresh_mask: torch.Tensor  # [end - begin, num_fresh] bool; fresh: staged earlier in this step, then own
    fresh_positions: torch.Tensor  # [num_fresh] int64
    _masks: dict[tuple[int | None, int, torch.dtype, torch.device], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_visible(self) -> int:
        return self.sequence.length + len(self.fresh_positions)

    @property
    def visible(self) -> slice:
        """The slots this forward may attend to: committed tokens, then all fresh ones, its own last."""
        return slice(self.sequence.start, self.sequence.start + self.num_visible)

    def mask(self, window: int | None, like: torch.Tensor, repeats: int = 1) -> torch.Tensor | None:
        """Additive mask over the visible slots, or None if everything is visible.

        A sliding window counts positions, not slots: a node's position is its root's plus its depth.

        Returns:
            [repeats * (end - begin), num_visible], the mask ``repeats`` times, of ``like``'s dtype and device; built
            once per forward.
        """
        key = window, repeats, like.dtype, like.device
        if key not in self._masks:
            mask = self._build(window, like.dtype)
            self._masks[key] = mask if mask is None else mask.repeat(repeats, 1).to(like.device)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        num_tokens, length = self.end - self.begin, self.sequence.length
        device = self.fresh_mask.device
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, self.fresh_mask), dim=1)
        if window is not None:
            key_positions = torch.cat((torch.arange(length, device=device), self.fresh_positions))
            query_positions = self.fresh_positions[-num_tokens:]
            allowed = allowed & (query_positions[:, None] - key_positions[None, :] < window)
        if num_tokens == 1 and bool(allowed.all()):
            return None
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


# query [num_heads, num_tokens, head_dim], keys and values [num_slots, num_kv_heads, dim], spans, the slots each of them
# sees, scaling, window, softcap, sinks -> [num_tokens, num_heads, value_dim]
Backend = Callable[..., torch.Tensor]


def dense_attention(
    query: torch.Tensor,  # [num_heads, num_queries, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,  # [num_kv_heads, num_keys, value_dim]
    mask: torch.Tensor | None,  # [num_queries, num_keys] additive
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [num_heads]
) -> torch.Tensor:
    """Attention written out, softmax in fp32.  -> [num_heads, num_queries, value_dim]"""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # a learned logit per head that takes probability and gives no value
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[1]] @ value


def sdpa_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: list[Span],
    visible: list[slice],
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One ``scaled_dot_product_attention`` per sequence over its own slots, in place: nothing is padded or gathered."""
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, groups = keys.shape[1], num_heads // keys.shape[1]
    out = query.new_empty(num_tokens, num_heads, values.shape[-1])
    for span, slots in zip(spans, visible, strict=True):
        own_query = query[:, span.begin : span.end]
        key, value = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)
        if softcap is None and sinks is None:
            # The query heads that share a KV head become more queries of it: faster than enable_gqa on CPU.
            mask = span.mask(window, query, groups)
            grouped = own_query.reshape(1, num_kv_heads, -1, head_dim)
            own = F.scaled_dot_product_attention(grouped, key[None], value[None], attn_mask=mask, scale=scaling)
            own = own.view(num_heads, -1, values.shape[-1])
        else:
            own = dense_attention(own_query, key, value, span.mask(window, query), scaling, softcap, sinks)
        out[span.begin : span.end] = own.transpose(0, 1)
    return out


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: list[Span],
    visible: list[slice],
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The reference the other backends are tested against: the whole row against the whole pool under one mask."""
    mask = torch.full((query.shape[1], keys.shape[0]), float("-inf"), dtype=query.dtype, device=query.device)
    for span, slots in zip(spans, visible, strict=True):
        own = span.mask(window, query)
        mask[span.begin : span.end, slots] = 0.0 if own is None else own
    key, value = keys.transpose(0, 1), values.transpose(0, 1)
    return dense_attention(query, key, value, mask, scaling, softcap, sinks).transpose(0, 1)


BACKENDS: dict[str, Backend] = {"auto": sdpa_attention, "sdpa": sdpa_attention, "4d_mask": masked_attention}


class PackedForward:
    """One forward over a packed row: the cache its model is given, and what its attention layers attend with."""

    def __init__(self, pool: KVPool, spans: list[Span], backend: Backend, layers: Sequence[AttentionLayer]):
        self.pool, self.spans, self.backend, self.layers = pool, spans, backend, layers
        self.visible = [span.visible for span in spans]
        own = [slice(s.visible.stop - (s.end - s.begin), s.visible.stop) for s in spans]
        self._own_slots = _Slots(own)  # where this row's K/V goes
        self._visible_slots = _Slots(self.visible)
        ends = list(itertools.accumulate(span.num_visible for span in spans))
        self._gathered = [slice(end - span.num_visible, end) for span, end in zip(spans, ends, strict=True)]
        self._layer_of: dict[tuple[int, int], int] = {}  # ids of a layer's fresh K and V -> it; others may share them
        self._fresh: list[torch.Tensor] = []  # keeps those ids from being given to other tensors
        self._latent: int | None = None  # the latent layer that cached last and has not attended yet

    # What a forward asks of a transformers cache; sequence lengths matter to mask building only, which is bypassed.
    is_initialized = True

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's fresh K/V, each [1, num_kv_heads, num_tokens, dim]."""
        keys, values = self.pool.keys[layer_idx], self.pool.values[layer_idx]
        own = self._own_slots.on(keys.device)
        keys.index_copy_(0, own, key[0].transpose(0, 1))
        values.index_copy_(0, own, value[0].transpose(0, 1))
        if self.layers[layer_idx].is_latent:  # the layer expands what it gets back: it needs all that is visible
            self._latent = layer_idx
            visible = self._visible_slots.on(keys.device)
            return keys[visible].transpose(0, 1)[None], values[visible].transpose(0, 1)[None]
        self._layer_of[id(key), id(value)] = layer_idx
        self._fresh += key, value
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        mask: torch.Tensor | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a layer: K and V say which. Mask and window are known here.  -> [1, num_tokens, heads, dim]"""
        layer, visible = self._layer_of.get((id(key), id(value))), self.visible
        if layer is not None:
            keys, values = self.pool.keys[layer], self.pool.values[layer]
        elif self._latent is not None:
            layer, self._latent, visible = self._latent, None, self._gathered
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        else:
            raise RuntimeError("an attention layer attends to keys that it did not cache")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = self.layers[layer].window
        return self.backend(query[0], keys, values, self.spans, visible, scaling, window, softcap, sinks)[None]


class _Slots:
    """Slots of several ranges in a row, on whichever devices ask for them."""

    def __init__(self, ranges: Sequence[slice]):
        self._ranges = ranges
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """-> [num_slots] int64"""
        if device not in self._on:
            self._on[device] = torch.cat([torch.arange(r.start, r.stop) for r in self._ranges]).to(device)
        return self._on[device]


_active: ContextVar[Any] = ContextVar("hf_slospec_active_forward", default=None)


@contextlib.contextmanager
def active_forward(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Within, the model's attention layers call ``forward.attend`` (in this thread only)."""
    configs = _configs_of(model)
    _point_to_packed(configs)
    token = _active.set(forward)
    try:
        yield
    finally:
        _active.reset(token)
        _point_back(configs)


# Threads, and models that share a config, may run packed forwards at the same time: the last one out points back.
_lock = threading.Lock()
_users: dict[int, tuple[str | None, int]] = {}  # id(config) -> its own implementation, number of active forwards
_configs: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _configs_of(model: torch.nn.Module) -> list[Any]:
    """The distinct configs that the model's modules read their attention implementation from."""
    if model not in _configs:
        found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        _configs[model] = [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]
    return _configs[model]


def _point_to_packed(configs: list[Any]) -> None:
    with _lock:
        users = [_users.get(id(config), (config._attn_implementation_internal, 0)) for config in configs]
        names = [_registered_name(original) for original, _ in users]  # may raise; nothing has been changed yet
        for config, (original, count), name in zip(configs, users, names, strict=True):
            _users[id(config)] = original, count + 1
            config._attn_implementation_internal = name


def _point_back(configs: list[Any]) -> None:
    with _lock:
        for config in configs:
            original, count = _users.pop(id(config))
            if count > 1:
                _users[id(config)] = original, count - 1
            else:
                config._attn_implementation_internal = original


def _registered_name(original: str | None) -> str:
    """The registered implementation that packs when a forward is active and is ``original`` otherwise."""
    original = original or "eager"
    name = f"hf_slospec:{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
        ALL_ATTENTION_FUNCTIONS.register(name, _packed_or(original))
    return name


def _packed_or(original: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        forward = _active.get()
        if forward is None:
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            plain = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
            return plain(module, query, key, value, attention_mask, **kwargs)
        out = forward.attend(
            query,
            key,
            value,
            kwargs.get("scaling"),
            mask=attention_mask if kwargs.get("position_bias") is None else kwargs["position_bias"],
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return out, None

    return attention
