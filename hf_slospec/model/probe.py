"""Probe of a model: forwards of one token that find out what each layer caches and attends to;
refuses models that packed forwards cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicCache

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.attention.hook import (
    UNREAD_MASK_SHAPE,
    AttentionHook,
    PlainAttention,
    Positions,
    run_model,
)
from hf_slospec.model.batch import AttentionLayer, AttentionRules, LayerShape, Stored
from hf_slospec.model.ownership import check_mask_function
from hf_slospec.model.properties import (
    Reach,
    cannot_be_packed,
    is_reached,
    layer_types,
    reach_of,
    refused_if_it_fails,
)
from hf_slospec.model.whose_code import is_compiled

NO_MIXING = {"mlp", "moe"}  # types of layers that process each token alone, and cache nothing


def _refuse_if_cache_keeps_less(model: Any, reaches: Mapping[int, Reach]) -> None:
    """Raise UnsupportedModelError if the cache of stock decoding drops K/V that its prefill attends
    to.
    """
    cached = DynamicCache(config=model.config.get_text_config()).layers
    for layer, reach in reaches.items():
        num_kept = getattr(cached[layer], "sliding_window", None) if layer < len(cached) else None
        if num_kept is None or not is_reached(num_kept, model):
            continue
        if (num_seen := reach.window or reach.chunk) is None or num_seen > num_kept:
            raise cannot_be_packed(
                model,
                f"the cache of layer {layer} keeps the last {num_kept} positions while decoding, but the prompt's "
                "tokens see more of them",
            )


class InterfaceProbe(AttentionHook):
    """Hook for one forward of one token that records what each layer caches and attends to."""

    is_initialized = False

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.positions = Positions(position_ids)
        self.stateful = set[int]()  # indices of layers that ask for a recurrent state
        self._shapes: dict[int, LayerShape] = {}  # by layer index
        # Layer index -> sliding window that was passed to the attention function.
        self._windows: dict[int, int | None] = {}
        # Indices of layers with latent attention, which expand what they cached into K and V.
        self._latent: set[int] = set()
        # A layer attends with a mask that was neither passed to the model nor built by build_mask.
        self._has_own_mask = False
        # A layer with latent attention attends twice to tensors that it has cached once.
        self._attends_again = False
        self._counting: set[int] = set()  # indices of layers that ask for the cache's length
        self._cached: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (layer index, K, V)
        # Masks returned by build_mask, with their windows and chunks.
        self._built: list[tuple[torch.Tensor, Reach | None]] = []
        # Layer index -> window or chunk of its mask; None: the mask is of another kind.
        self.reaches: dict[int, Reach | None] = {}

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys and the index of the first key, which transformers asks for to
        build masks.
        """
        return query_length, 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Return the number of cached tokens before the forward, 0."""
        return 0

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> torch.Tensor:
        """Return a new mask with a distinct address, by which ``attend`` recognises it. Its values
        are not read.
        """
        mask_function = options["mask_function"]
        check_mask_function(mask_function)
        mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=options.get("device"))
        self._built.append((mask, reach_of(mask_function, options.get("local_size"))))
        return mask

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Record that the layer asks for the number of cached tokens, and return 0."""
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes of a layer's K and V, and return them unchanged.

        Args:
            key: [1, num_kv_heads, 1, dim].
            value: [1, num_kv_heads, 1, value_dim].
            layer_idx: index of the layer in the model.
        """
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value))
        self._cached.append((layer_idx, key, value))
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Record a layer's window and mask, and return its attention.  -> [1, 1, num_heads,
        value_dim]
        """
        layer = next((layer for layer, k, v in self._cached if k is key and v is value), None)
        if layer is None and self._cached:
            layer = self._cached[-1][0]
            self._attends_again |= layer in self._windows
            self._latent.add(layer)  # K and V were computed from the tensors it has just cached
        if layer is not None:  # if layers share K and V, the first one's window counts
            self._windows.setdefault(layer, rules.window)
        if layer is not None and mask is not None:
            for built, reach in self._built:
                if mask.data_ptr() == built.data_ptr():  # equal addresses: it is this mask
                    self.reaches.setdefault(layer, reach)
        self._has_own_mask |= mask is not None and (
            mask.dtype != torch.bool or mask.shape != UNREAD_MASK_SHAPE
        )
        # The single token attends to itself only, so the output is its V, repeated for the query
        # heads that share a KV head.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def layers(self, model: Any, reaches: Mapping[int, Reach | None]) -> list[AttentionLayer]:
        """Return the attention layers in the order of their indices, including layers that also
        keep a recurrent state.

        Args:
            model: the probed model.
            reaches: by layer, window or chunk of layers whose masks transformers builds; for other
                layers, they are taken from the recorded calls and the config.

        Raises:
            UnsupportedModelError: the model attends or caches in a form that cannot be packed.
        """
        indices = sorted(self._shapes)
        num_layers = max([*self._shapes, *self.stateful], default=-1) + 1
        kinds = layer_types(model)
        keeps_nothing = {layer for layer, kind in enumerate(kinds) if kind in NO_MIXING}
        if not num_layers and getattr(model, "_is_stateful", False):
            raise cannot_be_packed(
                model, "it keeps states in a way of its own, which cannot be undone"
            )
        is_complete = {*indices, *self.stateful, *keeps_nothing} >= set(range(num_layers))
        if not num_layers or not is_complete or self._windows.keys() != self._shapes.keys():
            raise cannot_be_packed(
                model,
                f"{len(indices)} of {num_layers} layers cache keys, {len(self._windows)} attend through the interface "
                f"and {len(self.stateful)} keep a state",
            )
        if self._attends_again:
            raise cannot_be_packed(
                model, "a layer attends more than once to keys and values that it did not cache"
            )
        if self._has_own_mask:
            raise cannot_be_packed(
                model, "its layers add values of their own to the attention mask"
            )
        complete = {
            layer: reaches.get(layer) or self._declared_reach(model, layer) for layer in indices
        }
        _refuse_if_cache_keeps_less(model, complete)
        return [
            AttentionLayer(
                self._shapes[i],
                window,
                i in self._latent,
                chunk,
                i,
                counts_tokens=i in self._counting,
            )
            for i, (window, chunk) in complete.items()
        ]

    def _declared_reach(self, model: Any, layer: int) -> Reach:
        """Return the sliding window of a layer whose mask does not show it: the window passed to
        the attention function or, if there is none, the config's.
        """
        kinds = layer_types(model)
        declared = getattr(model.config.get_text_config(), "sliding_window", None)
        if kinds and kinds[layer] == "chunked_attention":
            raise cannot_be_packed(
                model, f"layer {layer} has chunked attention by a mask of its own"
            )
        if kinds and "sliding" not in kinds[layer]:
            return Reach()
        passed = self._windows[layer]
        if is_reached(declared, model) and passed is None and not kinds:
            raise cannot_be_packed(
                model,
                f"layer {layer} may have a sliding window, but does not pass it to its attention function",
            )
        return Reach(declared if passed is None else passed)


Probe = TypeVar("Probe", bound=InterfaceProbe)


def probed(
    model: Any,
    ids: torch.Tensor,
    new_probe: Callable[[torch.Tensor], Probe],
    hook_of: Callable[[Probe], AttentionHook] = lambda probe: probe,
) -> tuple[list[AttentionLayer], Probe]:
    """Probe a model by two forwards of one token; return its attention layers and the first
    forward's probe.

    The first forward runs without masks, the second with the masks that transformers builds.

    Args:
        model: the model to probe.
        ids: the token, [1, 1] int64; it is also used as its position.
        new_probe: makes the probe of a forward.
        hook_of: returns the hook of a forward for its probe.

    Raises:
        UnsupportedModelError: the forward failed, or the model attends or caches in a form that
            cannot be packed.
    """
    with refused_if_it_fails(model):
        probe = new_probe(ids)
        watch = new_probe(ids)
        inputs = dict(input_ids=ids, position_ids=ids)
        run_model(model, hook_of(probe), **inputs)
        run_model(model, hook_of(watch), **inputs, attention_mask=torch.ones_like(ids))
        return probe.layers(model, watch.reaches), probe


def refuse_by_declaration(model: Any) -> None:
    """Raise UnsupportedModelError if the model's config or class rules out packed forwards."""
    name = type(model).__name__
    if is_compiled(model):
        raise UnsupportedModelError(
            f"{name} was compiled with compile() or torch.compile, as a whole, in part, or its forward, and tree "
            "attention cannot be used in compiled layers; pass the model as it was loaded"
        )
    if any(map(_is_activated_lora, model.modules())):
        raise UnsupportedModelError(
            f"{name} has an active aLoRA adapter, which changes layers from its invocation tokens on only; use plain "
            "LoRA, disable the adapter, or use stock generate (fallback=True)"
        )
    # is_decoder=False turns some kinds of models into encoders; others ignore it.
    is_whole = getattr(model.config, "is_encoder_decoder", False)
    is_encoder = not is_whole and getattr(model.config, "is_decoder", None) is False
    if is_encoder and any(
        getattr(module, "is_causal", True) is False for module in model.modules()
    ):
        raise UnsupportedModelError(
            f"{name} was loaded as an encoder; load it with is_decoder=True in its config"
        )
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} attends to blocks of keys by their place; load it with attention_type='original_full' in its "
            "config"
        )


def _is_activated_lora(module: Any) -> bool:
    """Return whether a PEFT layer has an active aLoRA adapter, which changes only tokens after its
    invocation tokens.
    """
    variants = getattr(module, "lora_variant", None) or {}
    names = [] if not variants or module.disable_adapters else module.active_adapters
    return any(
        type(variants[name]).__name__.startswith("ALora") for name in names if name in variants
    )
