"""Recurrent states of one sequence, in all layers that keep one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_slospec.models.recurrent.calls import Key
from hf_slospec.models.recurrent.operators import Staged


@dataclass(eq=False)
class RecurrentStates:
    """States after a sequence's first ``length`` tokens, and the updates by later tokens, staged or committed.

    A state cannot be rolled back, so the updates by a step's nodes are stored beside it until the next forward, when it
    is known which were committed. State tensors are never written to, so that sequences may share them.
    """

    length: int = 0
    states: dict[Key, torch.Tensor] = field(default_factory=dict)
    staged: dict[Key, Staged] = field(default_factory=dict)
    kept: Sequence[int] | None = None  # staged nodes that were committed; None: the first ones

    def take_in(self, length: int, num_earlier: int = 0) -> None:
        """Advance the states over tokens committed since, up to ``length``, and drop those that an earlier step staged.

        Args:
            length: number of the sequence's committed tokens, at least ``self.length``.
            num_earlier: number of nodes that earlier forwards of this step staged, which stay staged.
        """
        if (num_new := length - self.length) < 0:
            raise RuntimeError(f"a state after {self.length} tokens cannot be taken back to {length}")
        if num_new:
            kept = range(num_new) if self.kept is None else self.kept
            if not self.staged or len(kept) != num_new:
                raise RuntimeError(f"{num_new} tokens were committed, and {len(kept) if self.staged else 0} are staged")
            rows = torch.tensor(kept, device="cpu")
            self.states = {
                key: staged.after(self.states[key], rows.to(self.states[key].device))
                for key, staged in self.staged.items()
            }
            self.length = length
        if num_new or not num_earlier:
            self.staged, self.kept = {}, None

    def copy(self) -> RecurrentStates:
        """Return the states for another sequence with the same first ``length`` tokens."""
        return RecurrentStates(self.length, dict(self.states))
