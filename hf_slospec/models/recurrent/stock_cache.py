"""Recurrent states in transformers' caches, which calls are given and return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hf_slospec.models.recurrent.calls import CONVOLUTION, STATE_SPACE, Key
from hf_slospec.models.recurrent.states import RecurrentStates


class StateLayer(NamedTuple):
    """A layer with states, as recorded by the probe."""

    layer_idx: int  # index of the layer in the model
    keys: tuple[Key, ...]  # one per state, in the order of the calls
    shape: tuple[int, ...]  # shape of the recurrent state in its cache, without the batch; empty without one
    num_bytes: int  # bytes of all its states, per sequence

    @property
    def convolutions(self) -> list[Key]:
        """Keys of the states of its convolutions."""
        return [key for key in self.keys if key[2] == CONVOLUTION]

    @property
    def recurrences(self) -> list[Key]:
        """Keys of its other states."""
        return [key for key in self.keys if key[2] != CONVOLUTION]


def read_states(cache: Any, layers: Sequence[StateLayer], row: int, length: int) -> RecurrentStates | None:
    """Return the states of one row of a cache after ``length`` tokens; None if no layer keeps one."""
    if not layers:
        return None
    states = dict[Key, torch.Tensor]()
    for layer in layers:
        cached = cache.layers[layer.layer_idx]
        for state_idx, key in enumerate(layer.convolutions):
            states[key] = cached.conv_states[state_idx][row, :, 1:].T.clone()  # the first column is never read
        if layer.recurrences:
            shape = layer.shape[-3:] if len(layer.recurrences) == 1 else layer.shape[1:]  # Zamba scans heads one by one
            parts = cached.recurrent_states[0][row].float().reshape(len(layer.recurrences), *shape)
            for part, key in zip(parts, layer.recurrences, strict=True):
                states[key] = _transposed(key, part).clone()
    return RecurrentStates(length, states)


def write_states(cache: Any, layers: Iterable[StateLayer], rows: Sequence[Mapping[Key, torch.Tensor]]) -> None:
    """Replace the states of a cache by those of the rows, one mapping per row of the batch."""
    for layer in layers:
        for state_idx, key in enumerate(layer.convolutions):
            columns = torch.stack([states[key].T for states in rows])
            cache.update_conv_state(torch.nn.functional.pad(columns, (1, 0)), layer.layer_idx, state_idx=state_idx)
        if layer.recurrences:
            parts = [torch.stack([_transposed(key, states[key]) for key in layer.recurrences]) for states in rows]
            cache.update_recurrent_state(torch.stack(parts).reshape(len(rows), *layer.shape), layer.layer_idx)


def _transposed(key: Key, state: torch.Tensor) -> torch.Tensor:
    """Return a state in transformers' layout, or back: Mamba 2 has the value dimension first."""
    return state.transpose(-1, -2) if key[2] == STATE_SPACE else state
