"""Registration of packed attention in transformers' attention interface.

While a :class:`PackedForward` is active in the current thread, the model's attention layers attend within the packed
batch. At all other times and in all other threads they run the implementation that the model was loaded with. The same
holds for the functions by which layers with a state mix tokens (:mod:`hf_slospec.models.recurrent.calls`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_slospec.models.attention.alone import AloneForward
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.inspection.replaced_attributes import Attribute, ReplacedAttributes
from hf_slospec.models.recurrent.calls import MIXERS, Mixer

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # -> the layer's output and attention weights

_active: ContextVar[Any] = ContextVar("hf_slospec_active_forward", default=None)


@contextlib.contextmanager
def active_forward(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Make the model's layers call ``forward.attend`` and ``forward.mix`` inside this context, in this thread only."""
    attributes = _attributes_of(model)
    _replaced.replace(attributes, _packed)
    token = _active.set(forward)
    try:
        yield
    finally:
        _active.reset(token)
        _replaced.restore(attributes)


ATTENTION = "_attn_implementation_internal"  # attribute of a config: name of the attention implementation

_replaced = ReplacedAttributes()
_attributes: weakref.WeakKeyDictionary[torch.nn.Module, list[Attribute]] = weakref.WeakKeyDictionary()


def forget_attributes(model: torch.nn.Module) -> None:
    """Read the model's modules anew in its next forward, as some were replaced: copies have configs of their own."""
    _attributes.pop(model, None)


def _attributes_of(model: torch.nn.Module) -> list[Attribute]:
    """Return the attributes that name a model's attention implementation, and the mixers of its layers."""
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
        return original(*args, **kwargs) if forward is None else forward.mix(name, original, *args, **kwargs)

    return mixer


def _registered_name(original: str | None) -> str:
    """Return the name of an implementation that calls the active forward, or ``original`` without one."""
    original = original or "eager"
    name = f"hf_slospec:{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _watched_or(original))
        ALL_ATTENTION_FUNCTIONS.register(name, _packed_or(original))
    return name


def _watched_or(original: str) -> Callable[..., Any]:
    """Return a mask builder that calls the active forward's ``build_mask``, or ``original``'s without one."""

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
            return forward.attend_alone(lambda *one: plain(module, *one, None, **kwargs)[0], query, key, value), None
        scaling = kwargs.get("scaling")
        rules = AttentionRules(
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            kwargs.get("sliding_window"),
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
            bias=_bias(forward, module),
        )
        mask = attention_mask if kwargs.get("position_bias") is None or _is_t5(module) else kwargs["position_bias"]
        out: torch.Tensor = forward.attend(query, key, value, rules, mask)
        return out, None

    return attention


def _is_t5(module: Any) -> bool:
    """Return whether a layer adds T5's bias, which depends on the distance of query and key only."""
    return hasattr(module, "relative_attention_max_distance")


def _bias(forward: Any, module: Any) -> torch.Tensor | None:
    """Return the bias by distance, [num_heads, num_distances]; None if the layer adds none.

    The first layer computes the bias for all, by places in the batch, which are wrong for a packed one.
    """
    if not _is_t5(module):
        return None
    if module.has_relative_attention_bias:
        length = module.relative_attention_max_distance + 1  # all farther keys have the same bias
        by_place = module.compute_bias(1, length, past_seen_tokens=length - 1)  # [1, num_heads, 1, length]
        forward.bias = by_place[0, :, 0].flip(-1)
    bias: torch.Tensor | None = getattr(forward, "bias", None)  # None in a cross-attention before any other
    return bias
