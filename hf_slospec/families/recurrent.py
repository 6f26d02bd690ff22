"""Model family with recurrent states: the probe that finds their layers, and the exchange of states
with transformers caches.

``mixers.py`` computes the forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch

from hf_slospec.families.mixers import RecurrentForward
from hf_slospec.families.states import (
    CONVOLUTION,
    STATE_SPACE,
    Key,
    Mixer,
    RecurrentStates,
    StateHook,
)
from hf_slospec.model.batch import AttentionLayer
from hf_slospec.model.family import DECODER, ModelFamily
from hf_slospec.model.probe import InterfaceProbe, probed
from hf_slospec.model.properties import Reach, attends_to_encoder, cannot_be_packed, layer_types

# values of layer_types in transformers' configs for layers that keep a recurrent state
STATE_KINDS = ("linear_attention", "conv", "mamba", "mamba2", "hybrid", "hybrid_sliding")


class StateLayer(NamedTuple):
    """Layer that keeps states, as recorded by the probe."""

    layer_idx: int  # index of the layer in the model
    keys: tuple[Key, ...]  # one per state, in the order in which the layer calls its mixers
    # shape of recurrent_states in the layer's transformers cache, without the batch dimension; ()
    # if the layer has convolutions only
    shape: tuple[int, ...]
    num_bytes: int  # bytes of all its states, per sequence

    @property
    def convolutions(self) -> list[Key]:
        """Keys of the layer's convolution states."""
        return [key for key in self.keys if key[2] == CONVOLUTION]

    @property
    def recurrences(self) -> list[Key]:
        """Keys of the layer's recurrent states."""
        return [key for key in self.keys if key[2] != CONVOLUTION]


class StateProbe(StateHook, InterfaceProbe):
    """Probe that records the layers that keep a state, besides the attention layers."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        super().__init__(position_ids)
        self._state_bytes: dict[Key, int] = {}
        self._state_shapes: dict[int, tuple[int, ...]] = {}  # see StateLayer.shape; by layer index

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        super().get_conv_state(layer_idx, state_idx)
        self.stateful.add(layer_idx)

    get_recurrent_state = get_conv_state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        self._state_shapes[layer_idx] = tuple(recurrent_states.shape[1:])
        return recurrent_states

    def mix_with(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        if key[2] == CONVOLUTION:
            weight = signature(plain).bind(*args, **kwargs).arguments["weight"]
            self._state_bytes[key] = outputs.nbytes * (weight.shape[-1] - 1)
        else:
            self._state_bytes[key] = outputs[1].nbytes
        return outputs

    def layers(self, model: Any, reaches: Mapping[int, Reach | None]) -> list[AttentionLayer]:
        if unknown := self.stateful - {layer for layer, *_ in self._state_bytes}:
            raise cannot_be_packed(
                model,
                f"{len(unknown)} layers keep a state that no known function updates, so that it cannot be undone",
            )
        return super().layers(model, reaches)

    def state_layers(self) -> tuple[StateLayer, ...]:
        """Return the layers that keep a state, in ascending order of their indices."""
        layers = []
        for layer in sorted(self.stateful):
            keys = tuple(sorted(key for key in self._state_bytes if key[0] == layer))
            num_bytes = sum(self._state_bytes[key] for key in keys)
            layers.append(StateLayer(layer, keys, self._state_shapes.get(layer, ()), num_bytes))
        return tuple(layers)


@dataclass(frozen=True)
class Recurrent(ModelFamily):
    """Models of which some layers keep a recurrent state, in place of or besides K and V.

    It also claims models without such layers; the probe then returns ``DECODER`` for them.
    """

    kinds = (*DECODER.kinds, *STATE_KINDS)
    layers: tuple[StateLayer, ...] = ()

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        return sum(layer.num_bytes for layer in self.layers)

    def claims(self, model: Any) -> bool:
        return not attends_to_encoder(model) and set(layer_types(model)) <= set(self.kinds)

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        attending, probe = probed(model, ids, StateProbe)
        return Recurrent(probe.state_layers()) if probe.stateful else DECODER, attending

    def new_hook(self, *arguments: Any) -> RecurrentForward:
        return RecurrentForward(*arguments)

    def new_states(self, length: int) -> RecurrentStates:
        return RecurrentStates(length)

    def read_states(self, cache: Any, row: int, length: int) -> RecurrentStates:
        states = dict[Key, torch.Tensor]()
        for layer in self.layers:
            cached = cache.layers[layer.layer_idx]
            for state_idx, key in enumerate(layer.convolutions):
                # transformers caches kernel_size columns, of which the next token does not read
                # the first.
                states[key] = cached.conv_states[state_idx][row, :, 1:].T.clone()
            if layer.recurrences:
                num_states = len(layer.recurrences)
                # Zamba calls one mixer per head, and caches the states of all heads in one tensor.
                shape = layer.shape[-3:] if num_states == 1 else layer.shape[1:]
                parts = cached.recurrent_states[0][row].float().reshape(num_states, *shape)
                for part, key in zip(parts, layer.recurrences, strict=True):
                    states[key] = _transposed(key, part).clone()
        return RecurrentStates(length, states)

    def write_states(self, cache: Any, rows: Sequence[Any]) -> None:
        for layer in self.layers:
            for state_idx, key in enumerate(layer.convolutions):
                columns = torch.stack([row.states[key].T for row in rows])
                cache.update_conv_state(
                    torch.nn.functional.pad(columns, (1, 0)), layer.layer_idx, state_idx=state_idx
                )
            if layer.recurrences:
                parts = [
                    torch.stack([_transposed(key, row.states[key]) for key in layer.recurrences])
                    for row in rows
                ]
                cache.update_recurrent_state(
                    torch.stack(parts).reshape(len(rows), *layer.shape), layer.layer_idx
                )


def _transposed(key: Key, state: torch.Tensor) -> torch.Tensor:
    """Return a state of this package in transformers' layout, or the reverse: transformers has the
    value dimension first for Mamba 2.
    """
    return state.transpose(-1, -2) if key[2] == STATE_SPACE else state
