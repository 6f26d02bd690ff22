"""Recurrent states of one sequence, in all layers that keep one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_slospec.families.recurrences import Staged

# Names, in transformers' modules, of the functions that mix the tokens of a sequence.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
STATE_SPACE = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
MIXERS = (CONVOLUTION, *DELTA_RULES, STATE_SPACE, SELECTIVE_SCAN)

Mixer = Callable[..., Any]
Key = tuple[
    int, int, str
]  # key of a state: layer index, number of mixers it called before in this forward, name


class StateCache(ABC):
    """Cache object that returns no states to layers, so that they call their mixers on all tokens
    of the forward.
    """

    def __init__(self) -> None:
        self._layer = -1  # index of the layer that asked for its state last
        self._asked = set[int]()  # indices of all layers that asked for their state
        self._num_mixed = Counter[int]()  # calls of mixers, by layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer runs its form for many tokens."""
        del state_idx
        self._layer = layer_idx
        self._asked.add(layer_idx)

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False, as :meth:`get_conv_state` returns None."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, so that the layer passes the inputs of its convolution to
        :meth:`update_conv_state`.
        """
        del layer_idx
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the inputs of a convolution unchanged; the mixer adds the ones before them."""
        self._layer = layer_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the state after all tokens unchanged; nothing reads it."""
        del layer_idx
        return recurrent_states

    def mix(self, name: str, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer's mixer would return for each sequence of the forward alone, given
        its state.
        """
        key = self._layer, self._num_mixed[self._layer], name
        self._num_mixed[self._layer] += 1
        return self._mix(key, plain, *args, **kwargs)

    @abstractmethod
    def _mix(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(eq=False)
class RecurrentStates:
    """States after a sequence's first ``length`` tokens, and the updates by later tokens, staged or
    committed.

    A state cannot be rolled back, so the updates by a step's nodes are stored beside it until the
    next forward, when it is known which were committed. State tensors are never written to, so that
    sequences may share them."""

    length: int = 0
    states: dict[Key, torch.Tensor] = field(default_factory=dict)
    staged: dict[Key, Staged] = field(default_factory=dict)
    kept: Sequence[int] | None = None  # staged nodes that were committed; None: the first ones

    def take_in(self, length: int, num_earlier: int = 0) -> None:
        """Advance the states over tokens committed since, up to ``length``, and drop those that an
        earlier step staged.

        Args:
            length: number of the sequence's committed tokens, at least ``self.length``.
            num_earlier: number of nodes that earlier forwards of this step staged, which stay
                staged.
        """
        if (num_new := length - self.length) < 0:
            raise RuntimeError(
                f"a state after {self.length} tokens cannot be taken back to {length}"
            )
        if num_new:
            kept = range(num_new) if self.kept is None else self.kept
            if not self.staged or len(kept) != num_new:
                raise RuntimeError(
                    f"{num_new} tokens were committed, and {len(kept) if self.staged else 0} are staged"
                )
            rows = torch.tensor(kept, device="cpu")
            self.states = {
                key: staged.after(self.states[key], rows.to(self.states[key].device))
                for key, staged in self.staged.items()
            }
            self.length = length
        if num_new or not num_earlier:
            self.staged = {}
            self.kept = None

    def copy(self) -> RecurrentStates:
        """Return the states for another sequence with the same first ``length`` tokens."""
        return RecurrentStates(self.length, dict(self.states))


class StateLayer(NamedTuple):
    """A layer with states, as recorded by the probe."""

    layer_idx: int  # index of the layer in the model
    keys: tuple[Key, ...]  # one per state, in the order of the calls
    shape: tuple[
        int, ...
    ]  # shape of the recurrent state in its cache, without the batch; empty without one
    num_bytes: int  # bytes of all its states, per sequence

    @property
    def convolutions(self) -> list[Key]:
        """Keys of the states of its convolutions."""
        return [key for key in self.keys if key[2] == CONVOLUTION]

    @property
    def recurrences(self) -> list[Key]:
        """Keys of its other states."""
        return [key for key in self.keys if key[2] != CONVOLUTION]


def read_states(
    cache: Any, layers: Sequence[StateLayer], row: int, length: int
) -> RecurrentStates | None:
    """Return the states of one row of a cache after ``length`` tokens; None if no layer keeps one."""
    if not layers:
        return None
    states = dict[Key, torch.Tensor]()
    for layer in layers:
        cached = cache.layers[layer.layer_idx]
        for state_idx, key in enumerate(layer.convolutions):
            states[key] = cached.conv_states[state_idx][
                row, :, 1:
            ].T.clone()  # the first column is never read
        if layer.recurrences:
            shape = (
                layer.shape[-3:] if len(layer.recurrences) == 1 else layer.shape[1:]
            )  # Zamba scans heads one by one
            parts = cached.recurrent_states[0][row].float().reshape(len(layer.recurrences), *shape)
            for part, key in zip(parts, layer.recurrences, strict=True):
                states[key] = _transposed(key, part).clone()
    return RecurrentStates(length, states)


def write_states(
    cache: Any, layers: Iterable[StateLayer], rows: Sequence[Mapping[Key, torch.Tensor]]
) -> None:
    """Replace the states of a cache by those of the rows, one mapping per row of the batch."""
    for layer in layers:
        for state_idx, key in enumerate(layer.convolutions):
            columns = torch.stack([states[key].T for states in rows])
            cache.update_conv_state(
                torch.nn.functional.pad(columns, (1, 0)), layer.layer_idx, state_idx=state_idx
            )
        if layer.recurrences:
            parts = [
                torch.stack([_transposed(key, states[key]) for key in layer.recurrences])
                for states in rows
            ]
            cache.update_recurrent_state(
                torch.stack(parts).reshape(len(rows), *layer.shape), layer.layer_idx
            )


def _transposed(key: Key, state: torch.Tensor) -> torch.Tensor:
    """Return a state in transformers' layout, or back: Mamba 2 has the value dimension first."""
    return state.transpose(-1, -2) if key[2] == STATE_SPACE else state
