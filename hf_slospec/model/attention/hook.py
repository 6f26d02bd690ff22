"""Registration of packed attention in transformers' attention interface.

While a :class:`PackedForward` is active in the current thread, the model's attention layers attend
within the packed batch. At all other times and in all other threads they run the implementation
that the model was loaded with. The same holds for the functions by which layers with a state mix
tokens (:mod:`hf_slospec.families.states`)."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_slospec.families.states import MIXERS, Mixer
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.batch import AttentionRules, PackedBatch, Span
from hf_slospec.model.overrides import Attribute, ReplacedAttributes

Attention = Callable[
    ..., tuple[torch.Tensor, torch.Tensor | None]
]  # -> the layer's output and attention weights

_active: ContextVar[Any] = ContextVar("hf_slospec_active_forward", default=None)


@contextlib.contextmanager
def active_forward(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Make the model's layers call ``forward.attend`` and ``forward.mix`` inside this context, in
    this thread only.
    """
    attributes = _attributes_of(model)
    _replaced.replace(attributes, _packed)
    token = _active.set(forward)
    try:
        yield
    finally:
        _active.reset(token)
        _replaced.restore(attributes)


ATTENTION = (
    "_attn_implementation_internal"  # attribute of a config: name of the attention implementation
)

_replaced = ReplacedAttributes()
_attributes: weakref.WeakKeyDictionary[torch.nn.Module, list[Attribute]] = (
    weakref.WeakKeyDictionary()
)


def forget_attributes(model: torch.nn.Module) -> None:
    """Read the model's modules anew in its next forward, as some were replaced: copies have configs
    of their own.
    """
    _attributes.pop(model, None)


def _attributes_of(model: torch.nn.Module) -> list[Attribute]:
    """Return the attributes that name a model's attention implementation, and the mixers of its
    layers.
    """
    if model not in _attributes:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        modules = dict.fromkeys(sys.modules.get(type(part).__module__) for part in model.modules())
        _attributes[model] = [
            *((config, ATTENTION) for config in configs if hasattr(config, ATTENTION)),
            *((module, name) for module in modules for name in MIXERS if hasattr(module, name)),
        ]
    return _attributes[model]


def _packed(original: Any, attribute: Attribute) -> Any:
    """Return the value of an attribute while a forward is active in some thread."""
    _, name = attribute
    return _registered_name(original) if name == ATTENTION else _mixed_or(name, original)


def _mixed_or(name: str, original: Mixer) -> Mixer:
    @functools.wraps(original)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        forward = _active.get()
        return (
            original(*args, **kwargs)
            if forward is None
            else forward.mix(name, original, *args, **kwargs)
        )

    return mixer


def _registered_name(original: str | None) -> str:
    """Return the name of an implementation that calls the active forward, or ``original`` without
    one.
    """
    original = original or "eager"
    name = f"hf_slospec:{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _watched_or(original))
        ALL_ATTENTION_FUNCTIONS.register(name, _packed_or(original))
    return name


def _watched_or(original: str) -> Callable[..., Any]:
    """Return a mask builder that calls the active forward's ``build_mask``, or ``original``'s
    without one.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        plain = ALL_MASK_ATTENTION_FUNCTIONS[original]  # which may be registered anew
        return getattr(_active.get(), "build_mask", plain)(*args, **kwargs)

    return build


def _plain(original: str, module: torch.nn.Module) -> Attention:
    """Return the attention of a module by the implementation that its model was loaded with."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    plain: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
    return plain


def _packed_or(original: str) -> Attention:
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
            return _plain(original, module)(module, query, key, value, attention_mask, **kwargs)
        if isinstance(forward, AloneForward):
            plain = _plain(original, module)
            # Without a mask, as the token sees all keys.
            return forward.attend_alone(
                lambda *one: plain(module, *one, None, **kwargs)[0], query, key, value
            ), None
        scaling = kwargs.get("scaling")
        rules = AttentionRules(
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            kwargs.get("sliding_window"),
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
            bias=_bias(forward, module),
        )
        mask = (
            attention_mask
            if kwargs.get("position_bias") is None or _is_t5(module)
            else kwargs["position_bias"]
        )
        out: torch.Tensor = forward.attend(query, key, value, rules, mask)
        return out, None

    return attention


def _is_t5(module: Any) -> bool:
    """Return whether a layer adds T5's bias, which depends on the distance of query and key only."""
    return hasattr(module, "relative_attention_max_distance")


def _bias(forward: Any, module: Any) -> torch.Tensor | None:
    """Return the bias by distance, [num_heads, num_distances]; None if the layer adds none.

    The first layer computes the bias for all, by places in the batch, which are wrong for a packed
    one."""
    if not _is_t5(module):
        return None
    if module.has_relative_attention_bias:
        length = module.relative_attention_max_distance + 1  # all farther keys have the same bias
        by_place = module.compute_bias(
            1, length, past_seen_tokens=length - 1
        )  # [1, num_heads, 1, length]
        forward.bias = by_place[0, :, 0].flip(-1)
    bias: torch.Tensor | None = getattr(
        forward, "bias", None
    )  # None in a cross-attention before any other
    return bias


# Attention of one token, as stock computes it: (query, key, value), each [1, heads, tokens, dim] ->
# [1, 1, heads, dim]
PlainAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Path(NamedTuple):
    """Staged tokens from the first one to a leaf, and tokens of the batch that see the first ones
    of them.
    """

    slots: torch.Tensor  # [length] int64, behind the committed tokens
    tokens: list[
        tuple[int, int]
    ]  # (index in the span, number of staged tokens that it sees, itself the last)


class AloneForward(PackedForward):
    """Forward of a packed batch in which a token's attention does not depend on the other tokens,
    bit for bit.
    """

    batch: PackedBatch

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._paths = [_paths(span) for span in self.batch.spans]

    def attend_alone(
        self, plain: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return attention of the layer that cached these K and V.  -> [1, num_tokens, num_heads,
        value_dim]
        """
        layer_idx = self.layer_of(key, value)
        assert layer_idx is not None, "an attention layer attends to keys that were not cached"
        self._unattended.discard(layer_idx)
        pool_idx, layer = self._layers[layer_idx]
        keys = self.pool.keys[pool_idx]
        values = self.pool.values[pool_idx]
        attended: list[Any] = [None] * query.shape[2]
        for span, paths in zip(self.batch.spans, self._paths, strict=True):
            length = span.sequence.length
            longest = max(len(path.slots) for path in paths)
            committed = slice(span.sequence.start, span.sequence.start + length)
            path_keys, path_values = (
                stored.new_empty(1, stored.shape[1], length + longest, stored.shape[2])
                for stored in (keys, values)
            )
            path_keys[0, :, :length] = keys[committed].transpose(0, 1)
            path_values[0, :, :length] = values[committed].transpose(0, 1)
            for path in paths:
                slots = path.slots + committed.stop
                end = length + len(path.slots)
                path_keys[0, :, length:end] = keys[slots].transpose(0, 1)
                path_values[0, :, length:end] = values[slots].transpose(0, 1)
                for index, num_staged in path.tokens:
                    row = span.begin + index
                    end = length + num_staged
                    seen = slice(0 if layer.window is None else max(end - layer.window, 0), end)
                    own = query[:, :, row : row + 1], path_keys[:, :, seen], path_values[:, :, seen]
                    attended[row] = plain(*own)
        return torch.cat(attended, dim=1)


def _paths(span: Span) -> list[Path]:
    """Return paths of a span's staged tokens that together have all of its tokens, each token on
    one of them.
    """
    mask = span.staged_mask
    offset = span.num_staged - span.num_tokens
    seen = [row.nonzero()[:, 0] for row in mask]
    paths = []
    is_done = set[int]()
    for leaf in (mask[:, offset:].sum(0) == 1).nonzero()[:, 0].tolist():
        places = [
            (token - offset, place + 1)
            for place, token in enumerate(seen[leaf].tolist())
            if token >= offset
        ]
        assert all(len(seen[index]) == num_staged for index, num_staged in places), (
            "staged tokens do not form a tree"
        )
        paths.append(
            Path(seen[leaf], [(index, length) for index, length in places if index not in is_done])
        )
        is_done |= {index for index, _ in places}
    return paths
