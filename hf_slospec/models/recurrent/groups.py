"""Groups of a packed batch's sequences whose tokens are mixed by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_slospec.forks import cached_property
from hf_slospec.models.batch.packed_batch import Span
from hf_slospec.models.device.transfer import to_device
from hf_slospec.models.recurrent.calls import Key
from hf_slospec.models.recurrent.operators import Inputs, Snapshots, Updates, Whole, parents, windows
from hf_slospec.models.recurrent.states import RecurrentStates

# Longer chains are computed by the layers' own functions, in chunks, so that the work grows linearly with their length.
MAX_AT_ONCE = 32


@dataclass(eq=False)
class Group:
    """Sequences whose tokens are mixed by one call: trees of one size, or a single long chain."""

    states: list[RecurrentStates]
    mask: torch.Tensor  # [batch, N, S] bool, True = an ancestor of the token, or itself; see operators
    rows: torch.Tensor  # [batch * N] int64, indices of the tokens in the packed batch
    is_long_chain: bool
    _windows: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def parents(self) -> list[list[int]]:
        """Parents of each sequence's nodes, see :func:`parents`."""
        return [parents(mask) for mask in self.mask]

    def windows(self, kernel_size: int) -> torch.Tensor:
        """Return the inputs that a convolution reads, see :func:`windows`."""
        if kernel_size not in self._windows:
            self._windows[kernel_size] = windows(self.mask, kernel_size)
        return self._windows[kernel_size]

    def select(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the group's part [batch, N, ...] of a tensor of the whole batch, [1, num_tokens, ...]."""
        part = packed[0].index_select(0, self.rows)
        return part.view(*self.mask.shape[:2], *part.shape[1:])

    def write(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Write the group's part [batch, N, ...] of a tensor [1, num_tokens, ...] of the whole batch."""
        out[0].index_copy_(0, self.rows, part.flatten(0, 1).to(out.dtype))

    def state(self, key: Key, zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the states of all sequences in one layer, at first ``zeros()``.  -> [batch, ...]"""
        for sequence in self.states:
            if key not in sequence.states:
                sequence.states[key] = zeros()
        return torch.stack([sequence.states[key] for sequence in self.states])

    def stage(self, key: Key, staged: Updates | Inputs | Snapshots) -> None:
        """Stage the tokens' updates of one layer's states; tensors [batch, ...]."""
        for sequence, *tensors in zip(self.states, *staged, strict=True):
            sequence.staged[key] = type(staged)(*tensors)

    def stage_whole(self, key: Key, state: torch.Tensor) -> None:
        """Stage the state [1, ...] of one layer after a long chain."""
        (sequence,) = self.states
        sequence.staged[key] = Whole(state[0], self.mask.shape[1])

    def earlier(self, key: Key) -> tuple[torch.Tensor, ...] | None:
        """Return the updates, [batch, ...] each, that earlier forwards of the step staged; None if there are none."""
        if self.mask.shape[1] == self.mask.shape[2]:
            return None
        return tuple(map(torch.stack, zip(*(states.staged[key] for states in self.states), strict=True)))


def grouped(spans: Sequence[Span], device: torch.device) -> list[Group]:
    """Return the groups of a packed batch's sequences, which must have states."""
    by_size = dict[tuple[int | None, int, int], list[Span]]()
    for index, span in enumerate(spans):
        is_long_chain = span.is_chain and span.num_tokens > MAX_AT_ONCE
        by_size.setdefault((index if is_long_chain else None, span.num_tokens, span.num_staged), []).append(span)
    return [_group(members, index is not None, device) for (index, *_), members in by_size.items()]


def _group(spans: Sequence[Span], is_long_chain: bool, device: torch.device) -> Group:
    states = [span.sequence.states for span in spans if span.sequence.states is not None]
    mask, rows = to_device(
        (
            torch.stack([span.staged_mask for span in spans]),
            torch.cat([torch.arange(span.begin, span.end, device="cpu") for span in spans]),
        ),
        device,
    )
    return Group(states, mask, rows, is_long_chain)


def with_states(spans: Sequence[Span]) -> Sequence[Span]:
    """Advance the states of a packed batch's sequences over committed tokens, and return the sequences."""
    for span in spans:
        states = span.sequence.states = span.sequence.states or RecurrentStates()
        states.take_in(span.sequence.length, span.num_staged - span.num_tokens)
    return spans
