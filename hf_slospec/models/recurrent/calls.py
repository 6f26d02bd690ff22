"""Calls of transformers' layers with a state: to their cache, and to the functions that mix tokens.

The layers of all families call a few functions of their own module by the same names; each is the torch form of a
kernel (causal-conv1d, flash-linear-attention, mamba-ssm). While a packed forward is active, :mod:`..attention.hook`
passes these calls to it. Everything else of a layer treats tokens one by one, and runs as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# Functions that mix the tokens of a sequence, by their names in the modules of transformers.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
STATE_SPACE = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
MIXERS = (CONVOLUTION, *DELTA_RULES, STATE_SPACE, SELECTIVE_SCAN)

Mixer = Callable[..., Any]
Key = tuple[int, int, str]  # key of a state: index of the layer, mixers it called before, name of the mixer


class StateCache(ABC):
    """Cache object of a forward that shows layers no states, so that they call their mixers on all of its tokens."""

    def __init__(self) -> None:
        self._layer = -1  # that asked for its state last
        self._asked = set[int]()  # layers that did
        self._num_mixed = Counter[int]()  # calls of mixers, by layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: layers without a state run the form for many tokens."""
        del state_idx
        self._layer = layer_idx
        self._asked.add(layer_idx)

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False, as :meth:`get_conv_state` returns None."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: inputs of a convolution are kept."""
        del layer_idx
        return True

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        """Return the inputs of a convolution as they are; the convolution adds those before them."""
        self._layer = layer_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the state after all tokens, which nothing reads."""
        del layer_idx
        return recurrent_states

    def mix(self, name: str, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer's mixer would return for each sequence of the forward, with its state, alone."""
        key = self._layer, self._num_mixed[self._layer], name
        self._num_mixed[self._layer] += 1
        return self._mix(key, plain, *args, **kwargs)

    @abstractmethod
    def _mix(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any: ...
