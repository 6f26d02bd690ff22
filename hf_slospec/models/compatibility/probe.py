"""Properties of a model that packed forwards depend on, and refusal of models that lack them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.attention import (
    AttentionLayer,
    MaskSource,
    Positions,
    active_forward,
    given_positions,
    own_attention,
)
from hf_slospec.models.compatibility.hooks import is_compiled
from hf_slospec.models.compatibility.reach import Reach, reach_of
from hf_slospec.models.kv_cache.pool import LayerShape, Stored
from hf_slospec.models.memory import DEVICE_ERRORS, is_out_of_memory
from hf_slospec.models.recurrent.calls import CONVOLUTION, Key, Mixer, StateCache
from hf_slospec.models.recurrent.stock_cache import StateLayer

NO_MIXING = {"mlp", "moe"}  # layers that treat every token alone, and so keep nothing
# Layers whose attention can be replaced, or that keep a state, or both; the probe sees which of them can be packed.
INTERFACE_KINDS = NO_MIXING | {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "mamba2",
    "hybrid",
    "hybrid_sliding",
}
OWN_KINDS = {"indexed_attention"}  # whose own masks are right for gathered keys

# Mask builders return a 4D mask unchanged, and packed attention does not read it.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)
FORWARD_ERRORS = (
    TypeError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    LookupError,
    AssertionError,
)


def vocab_size(model: Any) -> int:
    """Return the size of the vocabulary in the model's config."""
    return int(model.config.get_text_config().vocab_size)


def trained_len(model: Any) -> int | None:
    """Return the length of the longest text that the model was trained for; None if its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def input_device(model: Any) -> torch.device:
    """Return the device of the input embeddings; if they are offloaded, the device on which they are executed."""
    embeddings = model.get_input_embeddings()
    own: torch.device = embeddings.weight.device
    if own.type != "meta":
        return own
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device("meta" if device is None else device)


def run_model(
    model: Any, forward: Any, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
) -> Any:
    """Return what the model returns for a packed batch, with ``forward`` as its cache and attention.

    Without ``attention_mask``, models that give masks to the attention interface get one that keeps them from building
    others.
    """
    options = dict(inputs, use_cache=True, return_dict=True) | given_position_ids(model, position_ids)
    if "cache_params" in signature(model.forward).parameters:  # all layers keep a state
        with active_forward(model, forward):
            return model(**options, cache_params=forward)
    if isinstance(forward, MaskSource):
        if any(name.endswith("token_type_ids") for name, _ in model.named_buffers()):
            options["token_type_ids"] = torch.zeros_like(position_ids)  # the buffer may be shorter than a packed batch
        with own_attention(forward), given_positions(model, forward.positions):
            return model(**options, past_key_values=forward)
    if attention_mask is None:
        attention_mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=position_ids.device)
    with active_forward(model, forward), given_positions(model, Positions(position_ids)):
        return model(**options, past_key_values=forward, attention_mask=attention_mask)


def given_position_ids(model: Any, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the positions as an argument of the model's forward; nothing if it takes none and counts by itself."""
    return {"position_ids": position_ids} if takes_position_ids(model) else {}


def takes_position_ids(model: Any) -> bool:
    """Return whether the model's forward names ``position_ids``, which stock ``generate`` then gives to it."""
    return "position_ids" in signature(model.forward).parameters


def hidden_states(found: Any, layers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return hidden states that a model was asked for, side by side.  -> [num_tokens, num_layers * hidden]"""
    return torch.cat([found.hidden_states[layer][0].to(device) for layer in layers], dim=-1)


@contextlib.contextmanager
def refused_if_it_fails(model: Any) -> Iterator[None]:
    """Raise UnsupportedModelError if the model's forward fails inside this context; device errors pass through."""
    try:
        yield
    except DEVICE_ERRORS:
        raise
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise cannot_be_packed(model, f"its forward failed on a packed batch with {error!r}") from error


def cannot_be_packed(model: Any, why: str) -> UnsupportedModelError:
    """Return the error that refuses a model by its class name."""
    return UnsupportedModelError(f"{type(model).__name__} cannot be packed: {why}")


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode inside this context: dropout would also draw from the global generator."""
    training: list[Any] = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def refuse_by_declaration(model: Any) -> None:
    """Raise UnsupportedModelError if the model's config or class rules out packed forwards."""
    name = type(model).__name__
    if is_compiled(model):
        raise UnsupportedModelError(
            f"{name} was compiled with compile(), and tree attention cannot be used in compiled layers; pass the model "
            "as it was loaded"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models can be speculated")
    # is_decoder=False makes an encoder of some families; others have it and are causal all the same.
    is_encoder = getattr(model.config, "is_decoder", None) is False
    if is_encoder and any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UnsupportedModelError(f"{name} was loaded as an encoder; load it with is_decoder=True in its config")
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} attends to blocks of keys by their place; load it with attention_type='original_full' in its "
            "config"
        )
    if unknown := _layer_types(model) - INTERFACE_KINDS - OWN_KINDS:
        raise UnsupportedModelError(f"{name} has layers of type {sorted(unknown)}, which cannot hold a tree of tokens")


def _refuse_if_cache_keeps_less(model: Any, reaches: Mapping[int, Reach]) -> None:
    """Raise UnsupportedModelError if the cache of stock decoding drops K/V that the masks of its prefill let see."""
    config = model.config.get_text_config()
    cached = DynamicCache(config=config).layers
    for layer, reach in reaches.items():
        kept = getattr(cached[layer], "sliding_window", None) if layer < len(cached) else None
        if kept is None or kept >= getattr(config, "max_position_embeddings", math.inf):
            continue
        if (seen := reach.window or reach.chunk) is None or seen > kept:
            raise cannot_be_packed(
                model,
                f"the cache of layer {layer} keeps the last {kept} positions while decoding, but the prompt's tokens "
                "see more of them",
            )


def _is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    return tensor.data_ptr() == of.data_ptr()  # masks have one element


class _Probe(StateCache):
    """Cache and attention for one forward of one token, which record what each layer caches and attends to."""

    def __init__(self) -> None:
        super().__init__()
        self._mixed: dict[Key, int] = {}  # bytes of each state
        self._state_shapes: dict[int, tuple[int, ...]] = {}  # of the state that a layer passes to its cache
        self._shapes: dict[int, LayerShape] = {}
        self._windows: dict[int, int | None] = {}  # by layer that attends, as passed to the attention function
        self._latent: set[int] = set()
        self._has_own_mask = self._attends_again = False
        self._counting: set[int] = set()  # layers that ask for their place
        self._cached: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._built: list[tuple[torch.Tensor, Reach | None]] = []  # masks that the model had built
        self.reaches: dict[int, Reach | None] = {}  # by layer that attends with one of them; None: of another kind

    is_initialized = False

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def build_mask(
        self,
        mask_function: Callable[..., torch.Tensor],
        local_size: int | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return a mask that tells which of the model's masks a layer attends with; its values are not read."""
        mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=device)
        self._built.append((mask, reach_of(mask_function, local_size)))
        return mask

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value))
        self._cached.append((layer_idx, key, value))
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
        layer = next((layer for layer, k, v in self._cached if k is key and v is value), None)
        if layer is None and self._cached:
            layer = self._cached[-1][0]
            self._attends_again |= layer in self._windows
            self._latent.add(layer)  # these K and V were made from what the layer has just cached
        if layer is not None:  # layers that share K and V have the same window
            self._windows.setdefault(layer, window)
        if layer is not None and mask is not None:
            for built, reach in self._built:
                if _is_view(mask, built):
                    self.reaches.setdefault(layer, reach)
        self._has_own_mask |= mask is not None and (mask.dtype != torch.bool or mask.shape != UNREAD_MASK_SHAPE)
        # A single token attends to itself only, so its attention is its value, repeated for the query heads of a group.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        self._state_shapes[layer_idx] = tuple(recurrent_states.shape[1:])
        return recurrent_states

    def _mix(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if key[2] == CONVOLUTION:
            weight = signature(plain).bind(*args, **kwargs).arguments["weight"]
            self._mixed[key] = found.nbytes * (weight.shape[-1] - 1)
        else:
            self._mixed[key] = found[1].nbytes
        return found

    def layers(self, model: Any, reaches: Mapping[int, Reach | None]) -> tuple[list[AttentionLayer], list[StateLayer]]:
        """Return the layers that attend and those that keep a state, by index; some do both.

        ``reaches`` are those of the layers that attend with masks of transformers; the windows of others are read from
        their calls and the config.

        Raises:
            UnsupportedModelError: recorded calls cannot be packed.
        """
        indices, num_layers = sorted(self._shapes), max([*self._shapes, *self._asked], default=-1) + 1
        if unknown := self._asked - {layer for layer, *_ in self._mixed}:
            raise cannot_be_packed(
                model, f"{len(unknown)} layers keep a state that no known function updates, so that it cannot be undone"
            )
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        keeps_nothing = {layer for layer, kind in enumerate(kinds) if kind in NO_MIXING}
        if not num_layers and getattr(model, "_is_stateful", False):
            raise cannot_be_packed(model, "it keeps states in a way of its own, which cannot be undone")
        is_complete = {*indices, *self._asked, *keeps_nothing} >= set(range(num_layers))
        if not num_layers or not is_complete or self._windows.keys() != self._shapes.keys():
            raise cannot_be_packed(
                model,
                f"{len(indices)} of {num_layers} layers cache keys, {len(self._windows)} attend through the interface "
                f"and {len(self._asked)} keep a state",
            )
        if self._attends_again:
            raise cannot_be_packed(model, "a layer attends more than once to keys and values that it did not cache")
        if self._has_own_mask:
            raise cannot_be_packed(model, "its layers add values of their own to the attention mask")
        found = {layer: reaches.get(layer) or self._declared_reach(model, layer) for layer in indices}
        _refuse_if_cache_keeps_less(model, found)
        attending = [
            AttentionLayer(
                self._shapes[layer],
                window,
                layer in self._latent,
                chunk,
                layer,
                counts_tokens=layer in self._counting,
            )
            for layer, (window, chunk) in found.items()
        ]
        return attending, [self._state_layer(layer) for layer in sorted(self._asked)]

    def _state_layer(self, layer: int) -> StateLayer:
        keys = tuple(sorted(key for key in self._mixed if key[0] == layer))
        return StateLayer(layer, keys, self._state_shapes.get(layer, ()), sum(self._mixed[key] for key in keys))

    def _declared_reach(self, model: Any, layer: int) -> Reach:
        """Return the layer's sliding window: the one passed to its attention function, or else the config's."""
        config = model.config.get_text_config()
        kinds, declared = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if kinds and kinds[layer] == "chunked_attention":
            raise cannot_be_packed(model, f"layer {layer} has chunked attention by a mask of its own")
        if kinds and "sliding" not in kinds[layer]:
            return Reach()
        passed = self._windows[layer]
        if _is_reached(declared, config) and passed is None and not kinds:
            raise cannot_be_packed(
                model, f"layer {layer} may have a sliding window, but does not pass it to its attention function"
            )
        return Reach(declared if passed is None else passed)


class _OwnProbe(MaskSource):
    """Cache and masks for one forward of one token in which the model's layers attend by themselves."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.positions = Positions(position_ids, position_ids[0])
        self._shapes: dict[int, LayerShape] = {}
        self._windows: set[int | None] = set()  # of the masks that were built
        self._counting: set[int] = set()  # layers that ask for their place

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return super().get_seq_length(layer_idx)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index_key = self._shapes[layer_idx].index_key if layer_idx in self._shapes else None
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value), index_key)
        return key, value

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self._shapes[layer_idx] = self._shapes[layer_idx]._replace(index_key=Stored.like(index_keys[:, None]))
        return index_keys

    def allowed(self, mask_function: Any, window: int | None) -> torch.Tensor:
        self._windows.add(window)
        return torch.ones(1, 1, dtype=torch.bool, device=self.positions.of_tokens.device)

    def layers(self, model: Any) -> list[AttentionLayer]:
        """Return the layers by index, or raise UnsupportedModelError if they cannot attend to gathered keys."""
        indices = sorted(self._shapes)
        if not indices or indices != list(range(len(indices))):
            raise cannot_be_packed(model, f"{len(indices)} of its layers keep K and V in a cache of transformers'")
        if not self._windows:
            raise cannot_be_packed(model, "it builds masks of its own, not by transformers.masking_utils")
        config, kinds = model.config.get_text_config(), _layer_types(model)
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        expects = kinds & {"sliding_attention", "chunked_attention"} if kinds else True
        if self._windows == {None} and expects and any(_is_reached(window, config) for window in windows):
            raise cannot_be_packed(model, "it may have a sliding window, which is not in its masks")
        if place := next((name for name, buffer in model.named_buffers() if _is_mask_by_place(buffer)), None):
            raise cannot_be_packed(model, f"its buffer {place} masks keys by their place, not by their position")
        window = min(filter(None, self._windows), default=None)
        return [
            AttentionLayer(
                self._shapes[layer],
                window,
                layer_idx=layer,
                is_own=True,
                counts_tokens=layer in self._counting,
            )
            for layer in indices
        ]


def _is_reached(window: int | None, config: Any) -> bool:
    return bool(window and window < getattr(config, "max_position_embeddings", math.inf))


def _is_mask_by_place(buffer: torch.Tensor) -> bool:
    is_mask = buffer.dtype in (torch.bool, torch.uint8) and buffer.dim() > 1
    return is_mask and buffer.shape[-2] == buffer.shape[-1] > 1


def _layer_types(model: Any) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


@torch.no_grad()
def probe_layers(model: Any) -> tuple[list[AttentionLayer], list[StateLayer]]:
    """Return the model's layers that attend and those that keep a state.

    They are seen in two forwards of one token, without masks and with those of transformers.

    Raises:
        UnsupportedModelError: the forward failed, or its layers can neither have their attention replaced nor attend
            by themselves.
    """
    zero = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    with evaluating(model):
        if _layer_types(model) <= INTERFACE_KINDS:
            try:
                return _probed_interface(model, zero)
            except UnsupportedModelError:
                if getattr(model, "_is_stateful", False):
                    raise  # its states need the interface
        with refused_if_it_fails(model):
            probe = _OwnProbe(zero)
            run_model(model, probe, input_ids=zero, position_ids=zero)
            return probe.layers(model), []


def _probed_interface(model: Any, zero: torch.Tensor) -> tuple[list[AttentionLayer], list[StateLayer]]:
    with refused_if_it_fails(model):
        probe, watch = _Probe(), _Probe()
        run_model(model, probe, input_ids=zero, position_ids=zero)
        run_model(model, watch, input_ids=zero, position_ids=zero, attention_mask=torch.ones_like(zero))
        return probe.layers(model, watch.reaches)
