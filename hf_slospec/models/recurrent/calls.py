"""Calls that transformers' layers with a state make: to their cache, and to the functions that mix tokens (mixers).

The layers of all families call a few functions of their module by the same names; each is the torch form of a kernel
(causal-conv1d, flash-linear-attention, mamba-ssm). While a packed forward is active, :mod:`..attention.hook` passes
these calls to it. The rest of a layer computes token by token, and runs unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# Names, in transformers' modules, of the functions that mix the tokens of a sequence.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
STATE_SPACE = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
MIXERS = (CONVOLUTION, *DELTA_RULES, STATE_SPACE, SELECTIVE_SCAN)

Mixer = Callable[..., Any]
Key = tuple[int, int, str]  # key of a state: layer index, number of mixers it called before in this forward, name


class StateCache(ABC):
    """Cache object that returns no states to layers, so that they call their mixers on all tokens of the forward."""

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
        """Return True, so that the layer passes the inputs of its convolution to :meth:`update_conv_state`."""
        del layer_idx
        return True

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
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
        """Return what a layer's mixer would return for each sequence of the forward alone, given its state."""
        key = self._layer, self._num_mixed[self._layer], name
        self._num_mixed[self._layer] += 1
        return self._mix(key, plain, *args, **kwargs)

    @abstractmethod
    def _mix(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any: ...
