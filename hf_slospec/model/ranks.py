"""The processes ("ranks") that run a model: a single one here; a plugin adds tensor parallelism."""

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
    """The batcher's counterpart in a rank that repeats what the first rank's batcher decides."""

    @property
    def is_running(self) -> bool:
        """Return whether this process follows the first rank."""

    def start(self) -> None:
        """Start to follow the first rank, which must start its batcher; do nothing if already
        following.
        """

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Wait until the first rank stops its batcher."""

    def refuse(self) -> NoReturn:
        """Raise NotRunningError, as requests can be submitted in the first rank only."""


class Ranks:
    """The ranks of a model that a single process runs; base of the ranks of split models.

    Ranks must take equal decisions although they measure different times, so the first rank's clock
    counts for all. While a batcher runs (``is_led``), the first rank decides alone, and the other
    ranks repeat the forwards that it orders.
    """

    number = 1  # number of processes

    @property
    def is_led(self) -> bool:
        """Return whether the first rank decides alone."""
        return False

    @property
    def num_deciding(self) -> int:
        """Number of processes that take decisions, which have to be equal."""
        return 1 if self.is_led else self.number

    @property
    def is_first(self) -> bool:
        """Return whether this process is the first rank, whose clock counts and which leads."""
        return True

    def with_draft(self, draft: torch.nn.Module) -> Ranks:
        """Check that a draft can be used in these ranks, and return the draft's ranks.

        Each rank may run a complete copy of the draft, or the draft is split over the same ranks.

        Raises:
            IncompatibleDraftError: the draft is split over other processes than the target.
        """
        ranks_of(draft).check_target(self)
        return self

    def check_target(self, target: Ranks) -> None:
        """Raise IncompatibleDraftError if a draft with these ranks cannot be used by a target with
        ranks ``target``.
        """

    def begin_to_lead(self) -> None:
        """Let only the first rank take decisions from now on; the other ranks follow its orders.
        Every rank must call this, and later :meth:`end_leading`.
        """

    def end_leading(self) -> None:
        """Let all ranks take decisions again, after :meth:`begin_to_lead`."""

    def clock(self) -> float:
        """Return monotonic seconds of the first rank's clock; equal in all ranks that decide."""
        return time.perf_counter()

    def first(self, value: T) -> T:
        """Return the first rank's value in all ranks that decide; it must be possible to
        pickle it.
        """
        return value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is True in any of the ranks that decide."""
        return flag if self.is_led else not self.least(not flag)

    def least(self, value: int) -> int:
        """Return the minimum of all ranks' values."""
        return value

    def check_equal(self, work: Sequence[Sequence[int]]) -> None:
        """Raise InvalidInputError in all ranks unless ``work``, the tokens that a rank is about to
        compute, is equal in all of them.
        """

    def check_draft(self, speculator: Speculator) -> None:
        """Raise UnsupportedOptionError if the batcher's first rank cannot run the speculator's
        draft model by itself.
        """

    def new_target(self, speculator: Speculator, *arguments: Any) -> PackedTarget:
        """Return the target that the batcher uses in this process; see
        :meth:`Speculator.new_target`.
        """
        return speculator.new_target(*arguments)

    def new_follower(self, *arguments: Any) -> Follower:
        """Return the batcher's counterpart for a process that is not the first rank."""
        raise NotImplementedError


# Functions that plugins add: each takes a model and returns the ranks over which it is split; None
# if it is not split.
split_ranks: list[Callable[[torch.nn.Module], Ranks | None]] = []


def ranks_of(model: torch.nn.Module) -> Ranks:
    """Return the ranks that run a model: several if transformers has split it over processes.

    Raises:
        UnsupportedModelError: the model is split by something other than tensor parallelism.
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
    """Return a weight as an ordinary tensor. If it is split over ranks, it is gathered, and every
    rank must call this.
    """
    gathered: torch.Tensor = weight if mesh_of(weight) is None else weight.full_tensor()  # type: ignore[attr-defined]
    return gathered


def mesh_of(weight: torch.Tensor) -> Any | None:
    """Return the device mesh over which a weight is split; None for an ordinary tensor."""
    return getattr(weight, "device_mesh", None)
