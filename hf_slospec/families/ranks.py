"""The processes that run one model by tensor parallelism, and values that they share to take the
same decisions.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hf_slospec.errors import IncompatibleDraftError, InvalidInputError, UnsupportedModelError
from hf_slospec.forks import cached_property
from hf_slospec.model.properties import input_device

T = TypeVar("T")
IDLE = datetime.timedelta(
    days=365
)  # for which a process may wait for an order; one that ends breaks the connection
OTHER_SPLITS = {  # sizes in transformers' DistributedConfig, beside `tp_size`
    "pp_size": "pipeline parallelism",
    "fsdp_size": "FSDP",
    "dp_replicate_size": "data parallelism",
    "ep_size": "expert parallelism",
}


class Ranks:
    """The ranks of a model: one process, or those of a tensor-parallel group, which all run the
    same calls.

    Each rank holds a part of every layer, and a forward is a collective operation, so all ranks
    must draft, verify and stop alike. They would measure different times; the first rank's clock
    counts for all. While they are led, the first rank decides alone, and the others repeat the
    forwards that it orders."""

    _led: ClassVar[set[str]] = set()  # names of groups that are led, whatever object knows them

    def __init__(self, model: torch.nn.Module):
        """Find the processes among which transformers has split a model.

        Raises:
            UnsupportedModelError: it is split by something other than tensor parallelism.
        """
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        config = getattr(getattr(model, "config", None), "distributed_config", None)
        meshes = {mesh for weight in model.parameters() if (mesh := mesh_of(weight)) is not None}
        splits = [
            name for size, name in OTHER_SPLITS.items() if (getattr(config, size, 1) or 1) > 1
        ]
        if (
            meshes
            and not splits
            and (len(meshes) > 1 or (getattr(model, "tp_size", None) or 1) == 1)
        ):
            splits = ["other means than transformers' tensor parallelism"]
        if splits:
            raise UnsupportedModelError(
                f"{type(model).__name__} is split over processes by {' and '.join(splits)}, and only tensor "
                "parallelism can be speculated; load it with DistributedConfig(tp_size=...), or call generate without "
                "slo_tpot"
            )
        for mesh in meshes:
            self._group = mesh.get_group()
            self._device = input_device(model)

    @property
    def number(self) -> int:
        """Number of processes."""
        return 1 if self._group is None else self._group.size()

    @property
    def is_led(self) -> bool:
        """Return whether the first rank decides alone."""
        return self._group is not None and self._group.group_name in self._led

    def begin_to_lead(self) -> None:
        """Let the first rank decide alone from now on; all ranks must call this, as for
        :meth:`end_leading`.
        """
        if self._group is not None:
            _ = self.orders  # connected here, where all ranks are
            self._led.add(self._group.group_name)

    def end_leading(self) -> None:
        """Let all ranks decide again."""
        if self._group is not None:
            self._led.discard(self._group.group_name)

    @property
    def num_deciding(self) -> int:
        """Number of processes that take decisions, which have to be the same."""
        return 1 if self.is_led else self.number

    @property
    def is_first(self) -> bool:
        """Return whether this is the process whose clock counts, and that leads."""
        return self._group is None or dist.get_rank(self._group) == 0

    @cached_property
    def orders(self) -> Orders:
        """Orders of the first rank; made by a collective operation."""
        return Orders(self._global)

    def with_draft(self, draft: torch.nn.Module) -> Ranks:
        """Return these ranks, checked for a draft: each runs the whole of it, or all run one that
        is split over them.

        Raises:
            IncompatibleDraftError: the draft is split over other processes than the target.
        """
        draft_ranks = Ranks(draft)
        if draft_ranks._group is not None and draft_ranks._global != self._global:
            raise IncompatibleDraftError(
                f"assistant_model is split over the processes {draft_ranks._global}, and the target over "
                f"{self._global or 'none'}; load the draft without distributed_config, so that each process has all of "
                "it"
            )
        return self

    @property
    def _global(self) -> list[int]:
        return [] if self._group is None else dist.get_process_group_ranks(self._group)

    def clock(self) -> float:
        """Return monotonic seconds of the first rank's clock, in all ranks that decide."""
        if self._group is None or self.is_led:
            return time.perf_counter()
        now = torch.tensor(time.perf_counter(), dtype=torch.float64, device=self._device)
        dist.broadcast(now, self._global[0], group=self._group)
        return float(now)

    def first(self, value: T) -> T:
        """Return the first rank's value, which can be pickled, in all ranks that decide."""
        if self._group is None or self.is_led:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, self._global[0], group=self._group, device=self._device)
        first: T = values[0]
        return first

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any of the ranks that decide."""
        return flag if self.is_led else not self.least(not flag)

    def least(self, value: int) -> int:
        """Return the least value of all ranks."""
        if self._group is None:
            return value
        least = torch.tensor(value, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return int(least)

    def check_equal(self, work: Sequence[Sequence[int]]) -> None:
        """Compare what the ranks are about to compute, by a checksum.

        Raises:
            InvalidInputError: they differ; the error is raised in all of them.
        """
        if self._group is None:
            return
        lengths = [len(numbers) for numbers in work]
        checksum = zlib.crc32(np.concatenate([lengths, *work]).astype(np.int64).tobytes())
        largest = torch.tensor([checksum, -checksum], device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if largest[0] != -largest[1] and self.is_led:
            raise InvalidInputError(
                f"the {self.number} processes of a tensor-parallel model no longer hold the same K/V, so their batcher "
                "ends; the error of stop() in the other processes has the reason; start() it again in all of them"
            )
        if largest[0] != -largest[1]:
            raise InvalidInputError(
                f"the {self.number} processes of a tensor-parallel model do not decode the same tokens; call "
                "generate in all of them with the same prompts, options and seed (torch.manual_seed), and with the "
                "same draft"
            )


class Orders:
    """Messages of the first of some processes to the others, which wait for them as long as it
    lives.

    They have connections between hosts' memories of their own: a GPU that waits in a collective
    operation is busy."""

    def __init__(self, ranks: list[int]):
        """Connect the processes, by their global ranks; all of them must call this."""
        self._first = ranks[0]
        self._group = dist.new_group(ranks, IDLE, "gloo", use_local_synchronization=True)

    def send(self, order: Any) -> None:
        """Send an order, which can be pickled, to all others."""
        dist.broadcast_object_list([order], self._first, group=self._group)

    def receive(self) -> Any:
        """Wait for the next order, and return it.

        Raises:
            RuntimeError: the first process has ended.
        """
        received: list[Any] = [None]
        dist.broadcast_object_list(received, self._first, group=self._group)
        return received[0]


def whole(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as an ordinary tensor, gathered from all processes if it is split; all of
    them must call this.
    """
    gathered: torch.Tensor = weight if mesh_of(weight) is None else weight.full_tensor()  # type: ignore[attr-defined]
    return gathered


def mesh_of(weight: torch.Tensor) -> Any | None:
    """Return the device mesh over which a weight is split; None for an ordinary tensor."""
    return getattr(weight, "device_mesh", None)
