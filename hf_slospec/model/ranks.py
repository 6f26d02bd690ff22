"""The processes that run a model: one, or those that a plugin for split models adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch

from hf_slospec.assembly import load_plugins
from hf_slospec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from hf_slospec.generate.speculator import Speculator
    from hf_slospec.model.target import PackedTarget

T = TypeVar("T")


class Follower(Protocol):
    """Part of a batcher in a process that repeats what the first process decides."""

    @property
    def is_running(self) -> bool:
        """Return whether it follows the first process."""

    def start(self) -> None:
        """Start to follow, unless it does; the first process must start its batcher."""

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Wait until the first process stops its batcher."""

    def refuse(self) -> NoReturn:
        """Raise NotRunningError, as there is no batcher in this process."""


class Ranks:
    """The ranks of a model that one process runs, and what several have to share.

    Ranks measure different times; the first rank's clock counts for all. While they are led, the
    first rank decides alone, and the others repeat the forwards that it orders."""

    number = 1  # of processes

    @property
    def is_led(self) -> bool:
        """Return whether the first rank decides alone."""
        return False

    @property
    def num_deciding(self) -> int:
        """Number of processes that take decisions, which have to be the same."""
        return 1 if self.is_led else self.number

    @property
    def is_first(self) -> bool:
        """Return whether this is the process whose clock counts, and that leads."""
        return True

    def with_draft(self, draft: torch.nn.Module) -> Ranks:
        """Return these ranks, checked for a draft: each runs the whole of it, or all run one that
        is split over them.

        Raises:
            IncompatibleDraftError: the draft is split over other processes than the target.
        """
        ranks_of(draft).check_target(self)
        return self

    def check_target(self, target: Ranks) -> None:
        """Raise IncompatibleDraftError if a draft of these ranks cannot draft for ``target``'s."""

    def begin_to_lead(self) -> None:
        """Let the first rank decide alone from now on; all ranks must call this, as for
        :meth:`end_leading`.
        """

    def end_leading(self) -> None:
        """Let all ranks decide again."""

    def clock(self) -> float:
        """Return monotonic seconds of the first rank's clock, in all ranks that decide."""
        return time.perf_counter()

    def first(self, value: T) -> T:
        """Return the first rank's value, which can be pickled, in all ranks that decide."""
        return value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any of the ranks that decide."""
        return flag if self.is_led else not self.least(not flag)

    def least(self, value: int) -> int:
        """Return the least value of all ranks."""
        return value

    def check_equal(self, work: Sequence[Sequence[int]]) -> None:
        """Raise InvalidInputError in all ranks unless they are about to compute the same."""

    def check_draft(self, speculator: Speculator) -> None:
        """Raise UnsupportedOptionError for a draft that the batcher's first process cannot run."""

    def new_target(self, speculator: Speculator, *arguments: Any) -> PackedTarget:
        """Return the batcher's target in this process; see :meth:`Speculator.new_target`."""
        return speculator.new_target(*arguments)

    def new_follower(self, *arguments: Any) -> Follower:
        """Return the batcher's part in a process that is not the first."""
        raise NotImplementedError


# Returns the ranks over which a model is split, None if it is not; of a plugin.
split_ranks: list[Callable[[torch.nn.Module], Ranks | None]] = []


def ranks_of(model: torch.nn.Module) -> Ranks:
    """Return the ranks over which transformers has split a model.

    Raises:
        UnsupportedModelError: it is split by something other than tensor parallelism.
    """
    load_plugins()
    for find in split_ranks:
        if (ranks := find(model)) is not None:
            return ranks
    if not split_ranks and any(mesh_of(weight) is not None for weight in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is split over processes, and hf_slospec.families, which computes such models, is "
            "not there; call generate without slo_tpot"
        )
    return Ranks()


def whole(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as an ordinary tensor, gathered from all processes if it is split; all of
    them must call this.
    """
    gathered: torch.Tensor = weight if mesh_of(weight) is None else weight.full_tensor()  # type: ignore[attr-defined]
    return gathered


def mesh_of(weight: torch.Tensor) -> Any | None:
    """Return the device mesh over which a weight is split; None for an ordinary tensor."""
    return getattr(weight, "device_mesh", None)
