"""The hook that a model's layers call in the forward of a packed batch, in place of their cache and
attention.

While a hook is active in the current thread, attention layers call its ``attend``, transformers'
mask builders its ``build_mask``, and the functions named in its ``mixers`` its ``mix``. Otherwise,
and in other threads, they run the code that the model was loaded with.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_slospec.model.batch import AttentionRules
from hf_slospec.model.linear_overrides import Attribute, ReplacedAttributes
from hf_slospec.model.properties import cache_option, given_position_ids

# Attention of a layer by the implementation that the model was loaded with, or by its eager one if
# that reads no 4D mask: (query, key, value), each [1, heads, tokens, dim], and optionally a mask
# [1, 1, num_queries, num_keys] that is added to scores -> [1, num_queries, num_heads, value_dim]
PlainAttention = Callable[..., torch.Tensor]
# What attention functions of transformers return: output, and attention weights or None.
Attended = tuple[torch.Tensor, torch.Tensor | None]

# Shape of a mask that is passed to the model so that it builds none: transformers' mask builders
# return a 4D mask unchanged, and packed attention does not read it.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)
KEY_BIASES = ("alibi", "position_bias")  # arguments of attention modules that hold a bias per key
ATTENTION = "_attn_implementation_internal"  # config attribute that names the attention to use
# Mask builders registered in this dict take precedence over transformers' own.
MASK_BUILDERS: Attribute = (ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping")
MASKING = ("eager", "sdpa")  # names of attention implementations that read a mask


class Positions(NamedTuple):
    """Positions of the tokens and keys of a packed forward."""

    of_tokens: torch.Tensor  # [1, num_tokens] int64
    # [num_keys] int64, positions of cached keys; set for layers that compute attention themselves
    of_keys: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        """Positions of the tokens minus their indices in the batch.  -> [num_tokens] int64

        A layer that asks the cache for its length adds a token's index in the batch to it, which
        gives the position.
        """
        positions = self.of_tokens[0]
        return positions - torch.arange(len(positions), device=positions.device)


class AttentionHook:
    """Base of the objects that a model is given as its cache in a packed forward, and that its
    layers call for attention.
    """

    # Attributes that transformers reads of a cache when it builds masks.
    is_compileable = False
    is_initialized = True

    # Read by learned position embeddings and by biases of keys (ALiBi).
    positions: Positions | None = None
    # T5's relative position bias, [num_heads, num_distances], set by the model's first layer.
    bias: torch.Tensor | None = None
    # Names of functions in the layers' modules that are replaced by calls of :meth:`mix`.
    mixers: tuple[str, ...] = ()
    # Only mask builders are replaced; layers compute attention themselves.
    only_masks = False

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Return the number of cached tokens that transformers asks a cache for.

        It is 0 when masks are built. A layer that passes its index, as Llama 4's layers do, gets
        :attr:`Positions.offsets`.
        """
        return 0 if layer_idx is None or self.positions is None else self.positions.offsets

    def attend(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Compute a layer's attention.  -> [1, num_tokens, num_heads, value_dim]"""
        raise NotImplementedError

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> Any:
        """Build the mask for the attention implementation ``name``; ``plain`` is transformers' own
        builder.
        """
        return plain(**options)

    def mix(self, name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the function ``name`` of :attr:`mixers` would return for each sequence
        alone; ``plain`` is the function itself.
        """
        return plain(*args, **kwargs)

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward, with a mask added that keeps it from
        building one.
        """
        if options.get("attention_mask") is not None or self.positions is None:
            return options
        device = self.positions.of_tokens.device
        return options | {
            "attention_mask": torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=device)
        }

    def check_attended(self) -> None:
        """Raise UnsupportedModelError if a layer cached K and V and then did not call attend."""


_active: ContextVar[AttentionHook | None] = ContextVar("hf_slospec_active_hook", default=None)
_replaced = ReplacedAttributes()
_attributes: weakref.WeakKeyDictionary[nn.Module, dict[Any, list[Attribute]]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def active_hook(model: nn.Module, hook: AttentionHook) -> Iterator[None]:
    """Context manager in which the model's layers call the hook, in this thread only."""
    attributes = _attributes_of(model, hook)
    _replaced.replace(attributes, _hooked)
    token = _active.set(hook)
    try:
        yield
    finally:
        _active.reset(token)
        _replaced.restore(attributes)


def run_model(
    model: Any,
    hook: AttentionHook,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Run the model on a packed batch, with the hook as its cache and attention.

    Args:
        model: a causal LM.
        hook: becomes active during the forward.
        position_ids: [1, num_tokens] int64.
        attention_mask: passed to the model, which builds masks from it; None: the hook keeps the
            model from building masks.
        inputs: further arguments of the model's forward.

    Returns:
        The model's output.
    """
    options = dict(inputs, use_cache=True, return_dict=True)
    options |= given_position_ids(model, position_ids) | cache_option(hook, model)
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    with active_hook(model, hook):
        return model(**hook.arguments(model, options))


def forget_attributes(model: nn.Module) -> None:
    """Forget which attributes of the model are replaced, after its modules have changed; the next
    forward finds them anew.
    """
    _attributes.pop(model, None)


def _attributes_of(model: nn.Module, hook: AttentionHook) -> list[Attribute]:
    """Return the attributes that a hook replaces: names of attention implementations in configs,
    mixer functions, and forwards of modules that read positions or key biases.
    """
    by_kind = _attributes.setdefault(model, {})
    kind = hook.only_masks, hook.mixers
    if kind not in by_kind:
        parts: list[Any] = list(model.modules())
        counting = dict.fromkeys(type(part) for part in parts if _counts_tokens(part))
        attributes: list[Attribute] = [(counts, "forward") for counts in counting]
        if hook.only_masks:
            attributes.append(MASK_BUILDERS)
        else:
            configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
            modules = dict.fromkeys(sys.modules.get(type(part).__module__) for part in parts)
            attributes += [
                (each, ATTENTION) for each in configs.values() if hasattr(each, ATTENTION)
            ]
            attributes += [
                (module, name)
                for module in modules
                for name in hook.mixers
                if hasattr(module, name)
            ]
        by_kind[kind] = attributes
    return by_kind[kind]


def _hooked(original: Any, attribute: Attribute) -> Any:
    """Return the value that an attribute has while a hook is active in some thread."""
    owner, name = attribute
    if name == ATTENTION:
        return _registered_name(original)
    if owner is ALL_MASK_ATTENTION_FUNCTIONS:
        # Under the original names, as layers compare the name of their attention with known ones.
        plain = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping | original
        return original | {each: _masked_or(each, plain[each]) for each in MASKING}
    if name == "forward":
        return _positioned(owner, original)
    return _mixed_or(name, original)


def _mixed_or(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        hook = _active.get()
        return (
            original(*args, **kwargs) if hook is None else hook.mix(name, original, *args, **kwargs)
        )

    return mixer


@functools.cache
def _masked_or(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a mask builder that calls the active hook's ``build_mask``, or ``original`` if no hook
    is active in this thread.

    Args:
        name: attention implementation that the mask is for.
        original: None: the builder that transformers has registered under ``name`` at the time of a
            call.
    """

    def build(**options: Any) -> Any:
        plain = ALL_MASK_ATTENTION_FUNCTIONS[name] if original is None else original
        hook = _active.get()
        return plain(**options) if hook is None else hook.build_mask(name, plain, **options)

    # functools.wraps lets ownership.py see which function this one wraps.
    return build if original is None else functools.wraps(original)(build)


def _registered_name(original: str | None) -> str:
    """Register an attention implementation that calls the active hook, or ``original`` if no hook
    is active in this thread, and return its name.
    """
    original = original or "eager"
    name = f"hf_slospec:{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _masked_or(original, None))
        ALL_ATTENTION_FUNCTIONS.register(name, _attention_or(original))
    return name


def _attention_or(original: str) -> Callable[..., Attended]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Attended:
        hook = _active.get()
        if hook is None:
            plain = _loaded_with(original, module)
            stock: Attended = plain(module, query, key, value, attention_mask, **kwargs)
            return stock
        scaling = kwargs.get("scaling")
        rules = AttentionRules(
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            kwargs.get("sliding_window"),
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
            bias=_bias(hook, module),
        )
        mask = attention_mask
        if kwargs.get("position_bias") is not None and not _is_t5(module):
            mask = kwargs["position_bias"]

        def attend_plain(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None = None,
        ) -> torch.Tensor:
            name = original if mask is None or original in MASKING else "eager"
            attended: torch.Tensor
            attended, *_ = _loaded_with(name, module)(module, query, key, value, mask, **kwargs)
            return attended

        return hook.attend(query, key, value, rules, mask, attend_plain), None

    return attention


def _loaded_with(original: str, module: nn.Module) -> Callable[..., Any]:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
    return plain


def _is_t5(module: Any) -> bool:
    """Return whether a layer adds T5's relative position bias, which depends only on the distance
    of query and key.
    """
    return hasattr(module, "relative_attention_max_distance")


def _bias(hook: AttentionHook, module: Any) -> torch.Tensor | None:
    """Return T5's relative position bias, [num_heads, num_distances]; None if the layer adds none.

    The model's first layer computes the bias for all layers. It does so by indices in the batch,
    which are wrong for a packed batch, so it is computed here by distance.
    """
    if not _is_t5(module):
        return None
    if module.has_relative_attention_bias:
        length = module.relative_attention_max_distance + 1  # keys farther away share the last bias
        # [1, num_heads, 1, length]
        by_index = module.compute_bias(1, length, past_seen_tokens=length - 1)
        hook.bias = by_index[0, :, 0].flip(-1)
    return hook.bias  # None if a cross-attention layer runs before the first layer with a bias


def _counts_tokens(module: nn.Module) -> bool:
    """Return whether a module's forward takes positions or key biases that are wrong for a packed
    batch.
    """
    kind: Any = type(module)  # Any, as mypy takes classes of modules for unhashable
    if isinstance(module, nn.Embedding):
        return "position_ids" in _arguments(kind)
    # Outer modules may only pass the bias on; the innermost one reads it.
    parts = list(module.modules())[1:]
    return _has_bias(module) and not any(map(_has_bias, parts))


@functools.cache
def _arguments(kind: Any) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)


def _has_bias(module: nn.Module) -> bool:
    kind: Any = type(module)
    return any(name in KEY_BIASES for name in _arguments(kind))


@functools.cache
def _positioned(kind: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    is_table = issubclass(kind, nn.Embedding)

    @functools.wraps(plain)
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        hook = _active.get()
        if hook is not None and hook.positions is not None:
            of_tokens, of_keys = hook.positions
            # Positions that the model did not pass get no batch dimension, as some position
            # embeddings add it themselves. Results with and without it can both be added to the
            # token embeddings.
            if is_table:
                if options.get("position_ids") is not of_tokens:
                    options["position_ids"] = of_tokens[0]
            elif of_keys is not None:
                for name in KEY_BIASES:
                    bias = options.get(name)
                    # A bias of [..., 1, num_keys] is the same for all queries.
                    if bias is not None and bias.shape[-2] == 1:
                        options[name] = bias_by_position(bias, of_keys)
        return plain(self, *arguments, **options)

    return forward


def bias_by_position(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the bias of keys at these positions, up to a constant, which softmax ignores.

    The constant makes the bias 0 at the last position; otherwise a bias table that ends with 0
    would lose precision.

    Args:
        bias: [..., num_positions], for keys at positions 0, 1, 2 ... of one sequence.
        positions: [num_keys] int64.

    Returns:
        [..., num_keys].
    """
    # Positions beyond the bias table belong to draft nodes that are never committed.
    clamped = positions.clamp(max=bias.shape[-1] - 1)
    return bias[..., clamped] - bias[..., clamped.max()].unsqueeze(-1)
