"""Positions of packed tokens, for modules that count tokens by their index in the input.

While a packed forward runs, the ``forward`` of such classes is wrapped. The wrapped method differs from the plain one
in the thread of the packed forward only. Modules do not change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_slospec.models.inspection.replaced_attributes import Attribute, ReplacedAttributes

KEY_BIASES = ("alibi", "position_bias")  # names of attention modules' arguments that hold a bias per key


class Positions(NamedTuple):
    """Positions in a packed forward."""

    of_tokens: torch.Tensor  # [1, num_tokens] int64
    of_keys: torch.Tensor | None = None  # [num_keys] int64, where layers compute attention in their own code

    @property
    def offsets(self) -> torch.Tensor:
        """Differences between the tokens' positions and their indices in the batch.  [num_tokens] int64

        A layer that asks the cache for its length adds indices in the batch to it, to get positions.
        """
        positions = self.of_tokens[0]
        return positions - torch.arange(len(positions), device=positions.device)


Change = Callable[[Positions, dict[str, Any]], None]  # changes the keyword arguments of a module's forward
_positions: ContextVar[Positions | None] = ContextVar("hf_slospec_positions", default=None)
_replaced = ReplacedAttributes()
_changes: weakref.WeakKeyDictionary[nn.Module, dict[Attribute, Change]] = weakref.WeakKeyDictionary()  # by model


@contextlib.contextmanager
def given_positions(model: nn.Module, positions: Positions) -> Iterator[None]:
    """Let position tables and key biases of the model use these positions inside this context, in this thread."""
    if model not in _changes:
        found = ((type(module), _change_of(module)) for module in model.modules())
        _changes[model] = {(kind, "forward"): change for kind, change in found if change is not None}
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
    if _has_bias(module) and not any(_has_bias(part) for part in module.modules() if part is not module):
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
    # Some tables add the batch dimension themselves, so positions that the caller did not pass have none; embeddings of
    # either shape can be added to those of the tokens.
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

    The constant makes the bias 0 at the last position, as otherwise a table that ends with 0 would lose precision.

    Args:
        bias: [..., num_positions], for keys at the positions 0, 1, 2 ... of one sequence.
        positions: [num_keys] int64.

    Returns:
        [..., num_keys].
    """
    clamped = positions.clamp(max=bias.shape[-1] - 1)  # only tokens that are never committed are beyond it
    return bias[..., clamped] - bias[..., clamped.max()].unsqueeze(-1)
