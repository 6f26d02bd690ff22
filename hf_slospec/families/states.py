"""Recurrent states of a sequence, and the hook through which layers ask for them.

``recurrences.py`` has the updates that staged nodes add, ``mixers.py`` the packed forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicCache

from hf_slospec.families.recurrences import Staged
from hf_slospec.model.attention.hook import AttentionHook
from hf_slospec.model.batch import SequenceStates
from hf_slospec.model.properties import argument_names

# Mixers: functions in transformers' modeling files through which the tokens of a sequence affect
# each other in layers that keep a state. The hook replaces them by these names.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
STATE_SPACE = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
MIXERS = (CONVOLUTION, *DELTA_RULES, STATE_SPACE, SELECTIVE_SCAN)

Mixer = Callable[..., Any]
# Key of a state: layer index, number of mixers that the layer called before in this forward, name
# of the mixer.
Key = tuple[int, int, str]


class StateHook(AttentionHook):
    """Base of hooks that handle recurrent states in :meth:`mix_with`.

    To the layers it acts as a cache without states, so that each takes its prefill path, which
    calls its mixers once for all tokens of the forward.
    """

    mixers = MIXERS

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._layer = -1  # index of the layer that called the cache last: mixers do not get it
        self._num_mixed = Counter[int]()  # number of mixer calls so far, by layer index

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        if not has_states_only(model):
            return super().arguments(model, options)
        return {name: value for name, value in options.items() if name != "attention_mask"}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Report no cached conv state so that the layer takes its prefill path."""
        del state_idx
        self._layer = layer_idx

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
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
        """Return a convolution's inputs unchanged; the mixer prepends earlier tokens' inputs."""
        self._layer = layer_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the layer's final state unchanged; it is not used."""
        del layer_idx
        return recurrent_states

    def mix(self, name: str, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        key = self._layer, self._num_mixed[self._layer], name
        self._num_mixed[self._layer] += 1
        return self.mix_with(key, plain, *args, **kwargs)

    def mix_with(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of the mixer ``plain`` for all tokens of the forward.

        Args:
            key: the state that the mixer reads and updates.
            plain: the mixer, as transformers defines it.
            args: arguments that the layer passes to the mixer.
            kwargs: keyword arguments that the layer passes to the mixer.
        """
        raise NotImplementedError


def has_states_only(model: Any) -> bool:
    """Return whether all layers of the model keep a state, so that it takes no attention mask."""
    if model not in _has_states_only:
        is_linear = DynamicCache(config=model.config.get_text_config(decoder=True)).is_linear
        _has_states_only[model] = "cache_params" in argument_names(model) or (
            bool(is_linear) and all(is_linear)
        )
    return _has_states_only[model]


_has_states_only = WeakKeyDictionary[Any, bool]()


@dataclass(eq=False)
class RecurrentStates(SequenceStates):
    """States after the first ``length`` tokens of a sequence, and the updates of later tokens.

    The tokens that a step stages are stored as updates. After a commit, :meth:`take_in` applies
    the updates of the committed tokens. State tensors are never written in place, so that
    sequences may share them."""

    length: int = 0
    states: dict[Key, torch.Tensor] = field(default_factory=dict)
    staged: dict[Key, Staged] = field(default_factory=dict)
    # Indices of the staged nodes that were committed; None: the first ones.
    kept: Sequence[int] | None = None

    def take_in(self, length: int, num_earlier: int = 0) -> None:
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
        return RecurrentStates(self.length, dict(self.states))
