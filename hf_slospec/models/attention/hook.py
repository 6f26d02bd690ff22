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

from hf_slospec.models.inspection.replaced_attributes import Place, ReplacedAttributes
from hf_slospec.models.recurrent.calls import MIXERS, Mixer

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # of a layer: its output and attention weights

_active: ContextVar[Any] = ContextVar("hf_slospec_active_forward", default=None)


@contextlib.contextmanager
def active_forward(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Make the model's layers call ``forward.attend`` and ``forward.mix`` inside this context, in this thread only."""
    places = _places_of(model)
    _replaced.replace(places, _packed)
    token = _active.set(forward)
    try:
        yield
    finally:
        _active.reset(token)
        _replaced.restore(places)


ATTENTION = "_attn_implementation_internal"  # attribute of a config: the name of an attention implementation

_replaced = ReplacedAttributes()
_places: weakref.WeakKeyDictionary[torch.nn.Module, list[Place]] = weakref.WeakKeyDictionary()


def _places_of(model: torch.nn.Module) -> list[Place]:
    """Return where a model's layers read how to attend, and the functions by which they mix tokens."""
    if model not in _places:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        modules = dict.fromkeys(sys.modules.get(type(part).__module__) for part in model.modules())
        _places[model] = [
            *((config, ATTENTION) for config in configs if hasattr(config, ATTENTION)),
            *((module, name) for module in modules for name in MIXERS if hasattr(module, name)),
        ]
    return _places[model]


def _packed(original: Any, place: Place) -> Any:
    """Return what stands at a place while a forward is active in some thread."""
    _, name = place
    return _registered_name(original) if name == ATTENTION else _mixed_or(name, original)


def _mixed_or(name: str, original: Mixer) -> Mixer:
    @functools.wraps(original)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        forward = _active.get()
        return original(*args, **kwargs) if forward is None else forward.mix(name, original, *args, **kwargs)

    return mixer


def _registered_name(original: str | None) -> str:
    """Return the name of the implementation that is packed while a forward is active, and ``original`` otherwise."""
    original = original or "eager"
    name = f"hf_slospec:{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _watched_or(ALL_MASK_ATTENTION_FUNCTIONS[original]))
        ALL_ATTENTION_FUNCTIONS.register(name, _packed_or(original))
    return name


def _watched_or(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builder of masks that asks the active forward, if it builds masks, and ``plain`` otherwise."""

    def build(*args: Any, **kwargs: Any) -> Any:
        own = getattr(_active.get(), "build_mask", plain)
        return own(*args, **kwargs)

    return build


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
            eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            plain: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
            return plain(module, query, key, value, attention_mask, **kwargs)
        out: torch.Tensor = forward.attend(
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
