"""Cache object that a model receives in the forward of a packed batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.families.mixers import RecurrentForward
from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.sdpa import isolated_attention, sdpa_attention
from hf_slospec.model.batch import (
    AttentionLayer,
    AttentionRules,
    OverVisible,
    Plans,
    Span,
    plan_own,
    plan_visible,
)
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.overrides import Attribute, ReplacedAttributes

KEY_BIASES = (
    "alibi",
    "position_bias",
)  # names of attention modules' arguments that hold a bias per key


class Positions(NamedTuple):
    """Positions in a packed forward."""

    of_tokens: torch.Tensor  # [1, num_tokens] int64
    of_keys: torch.Tensor | None = (
        None  # [num_keys] int64, where layers compute attention in their own code
    )

    @property
    def offsets(self) -> torch.Tensor:
        """Differences between the tokens' positions and their indices in the batch.  [num_tokens]
        int64

        A layer that asks the cache for its length adds indices in the batch to it, to get
        positions."""
        positions = self.of_tokens[0]
        return positions - torch.arange(len(positions), device=positions.device)


Change = Callable[
    [Positions, dict[str, Any]], None
]  # changes the keyword arguments of a module's forward
_positions: ContextVar[Positions | None] = ContextVar("hf_slospec_positions", default=None)
_replaced = ReplacedAttributes()
_changes: weakref.WeakKeyDictionary[nn.Module, dict[Attribute, Change]] = (
    weakref.WeakKeyDictionary()
)  # by model


@contextlib.contextmanager
def given_positions(model: nn.Module, positions: Positions) -> Iterator[None]:
    """Let position tables and key biases of the model use these positions inside this context, in
    this thread.
    """
    if model not in _changes:
        found = ((type(module), _change_of(module)) for module in model.modules())
        _changes[model] = {
            (kind, "forward"): change for kind, change in found if change is not None
        }
    changes = _changes[model]
    _replaced.replace(list(changes), lambda plain, attribute: _changed(plain, changes[attribute]))
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)
        _replaced.restore(list(changes))


def _change_of(module: nn.Module) -> Change | None:
    """Return how the arguments of a module change; None: they do not."""
    kind: Any = type(module)  # mypy takes classes of modules for unhashable
    if isinstance(module, nn.Embedding) and "position_ids" in _arguments(kind):
        return _set_position_ids
    # Blocks may pass the bias on; only the innermost one reads it.
    if _has_bias(module) and not any(
        _has_bias(part) for part in module.modules() if part is not module
    ):
        return _take_biases
    return None


@functools.cache
def _arguments(kind: Any) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)


def _has_bias(module: nn.Module) -> bool:
    kind: Any = type(module)
    return any(name in KEY_BIASES for name in _arguments(kind))


@functools.cache
def _changed(plain: Callable[..., Any], change: Change) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if (positions := _positions.get()) is not None:
            change(positions, options)
        return plain(self, *arguments, **options)

    return forward


def _set_position_ids(positions: Positions, options: dict[str, Any]) -> None:
    # Some tables add the batch dimension themselves, so positions that the caller did not pass have
    # none; embeddings of either shape can be added to those of the tokens.
    if options.get("position_ids") is not positions.of_tokens:
        options["position_ids"] = positions.of_tokens[0]


def _take_biases(positions: Positions, options: dict[str, Any]) -> None:
    for name in KEY_BIASES:
        bias = options.get(name)
        # A bias of [..., 1, num_keys] is the same for all queries.
        if positions.of_keys is not None and bias is not None and bias.shape[-2] == 1:
            options[name] = bias_by_position(bias, positions.of_keys)


def bias_by_position(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the bias of keys at these positions, up to a constant, which softmax ignores.

    The constant makes the bias 0 at the last position, as otherwise a table that ends with 0 would
    lose precision.

    Args:
        bias: [..., num_positions], for keys at the positions 0, 1, 2 ... of one sequence.
        positions: [num_keys] int64.

    Returns:
        [..., num_keys].
    """
    clamped = positions.clamp(
        max=bias.shape[-1] - 1
    )  # only tokens that are never committed are beyond it
    return bias[..., clamped] - bias[..., clamped.max()].unsqueeze(-1)


class PackedForward(RecurrentForward):
    """One forward of a packed batch: the model's cache, and the attention of its layers."""

    def __init__(
        self,
        pool: KVPool,
        batch: Plans,
        backend: Backend,
        layers: Sequence[AttentionLayer],  # in the order in which the pool stores them
        position_ids: torch.Tensor,  # [1, num_tokens] int64, as passed to the model
        spans: Sequence[
            Span
        ] = (),  # sequences whose states layers read and stage; none if no layer keeps a state
    ):
        super().__init__(spans)
        self.pool = pool
        self.batch = batch
        self.backend = backend
        self._layers = {layer.layer_idx: (pool_idx, layer) for pool_idx, layer in enumerate(layers)}
        self._positions = Positions(position_ids)
        # (id(K), id(V)) -> both and layer_idx; layers may share K and V. They are not kept alive:
        # prompts are long.
        self._cached: dict[tuple[int, int], tuple[ref[torch.Tensor], ref[torch.Tensor], int]] = {}
        self._unattended = set[int]()  # layers that have cached K and V and not attended yet
        self._latent: int | None = None  # layer_idx of a latent layer between update and attend

    # transformers reads it to build masks, which packed forwards do not use.
    is_initialized = True

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Return 0; to a layer that asks for its own length, as Llama 4's do,
        :attr:`Positions.offsets`.
        """
        return 0 if layer_idx is None else self._positions.offsets

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's K and V of the batch, each [1, num_kv_heads, num_tokens, dim]."""
        if layer_idx not in self._layers:
            raise UnsupportedModelError(
                f"the model had {len(self._layers)} attention layers and now has one of index {layer_idx}; call "
                "disable and enable, or make a new generator, after its layers have changed"
            )
        pool_idx, layer = self._layers[layer_idx]
        self._unattended.add(layer_idx)
        keys = self.pool.keys[pool_idx]
        values = self.pool.values[pool_idx]
        slots = self.batch.plan(plan_own, keys.device).slots
        keys.index_copy_(0, slots, key[0].transpose(0, 1))
        values.index_copy_(0, slots, value[0].transpose(0, 1))
        if layer.is_latent:  # the layer expands the returned tensors, so it needs all visible slots
            self._latent = layer_idx
            visible = self.batch.plan(plan_visible, keys.device).slots
            return keys[visible].transpose(0, 1)[None], values[visible].transpose(0, 1)[None]
        self._cached[id(key), id(value)] = ref(key), ref(value), layer_idx
        return key, value

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Return the index of the layer that cached these K and V; None if none did."""
        cached = self._cached.get((id(key), id(value)))
        if (
            cached is None or cached[0]() is not key or cached[1]() is not value
        ):  # ids are used again
            return None
        return cached[2]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of the layer that cached these K and V; ``mask`` is not read, as the
        batch has it.

        Returns:
            [1, num_tokens, num_heads, value_dim].
        """
        layer_idx = self.layer_of(key, value)
        batch = self.batch
        if layer_idx is not None:
            pool_idx, _ = self._layers[layer_idx]
            keys = self.pool.keys[pool_idx]
            values = self.pool.values[pool_idx]
        elif self._latent is not None:
            layer_idx, self._latent, batch = self._latent, None, OverVisible(self.batch)
            keys = key[0].transpose(0, 1)
            values = value[0].transpose(0, 1)
        else:
            raise RuntimeError("an attention layer attends to keys that were not cached")
        self._unattended.discard(layer_idx)
        _, layer = self._layers[layer_idx]
        backend = self.backend
        if rules.bias is not None and backend is not isolated_attention:
            backend = sdpa_attention  # the others take no bias
        return backend(
            query[0], keys, values, batch, rules._replace(window=layer.window, chunk=layer.chunk)
        )[None]

    def check_attended(self) -> None:
        """Raise UnsupportedModelError if a layer has cached K and V, but attended to its own tokens
        only.
        """
        if self._unattended:
            raise UnsupportedModelError(
                f"the layers {sorted(self._unattended)} no longer attend through transformers' attention interface; "
                "call disable and enable, or make a new generator, after they were replaced"
            )
