"""The processes (ranks) of a tensor-parallel model, and the values that they exchange so that all
take the same decisions.

``tensor_parallel.py`` has the batcher of such a model.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hf_slospec.errors import (
    IncompatibleDraftError,
    InvalidInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.forks import cached_property
from hf_slospec.model.properties import input_device
from hf_slospec.model.ranks import Follower, Ranks, mesh_of, ranks_of

if TYPE_CHECKING:
    from hf_slospec.generate.speculator import Speculator
    from hf_slospec.model.target import PackedTarget

T = TypeVar("T")
# Timeout of collectives that wait for the first process's next order, which may take arbitrarily
# long while the batcher is idle. A process that ends breaks the connection at once.
IDLE = datetime.timedelta(days=365)
# Sizes in transformers' DistributedConfig other than `tp_size`; only tensor parallelism works.
OTHER_SPLITS = {
    "pp_size": "pipeline parallelism",
    "fsdp_size": "FSDP",
    "dp_replicate_size": "data parallelism",
    "ep_size": "expert parallelism",
}


def split_ranks_of(model: torch.nn.Module) -> SplitRanks | None:
    """Return the ranks of a model that transformers loaded with tensor parallelism; None for a
    model that one process holds as a whole.

    Raises:
        UnsupportedModelError: the model is split by something other than transformers' tensor
            parallelism.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    meshes = {mesh for weight in model.parameters() if (mesh := mesh_of(weight)) is not None}
    splits = [name for size, name in OTHER_SPLITS.items() if (getattr(config, size, 1) or 1) > 1]
    is_by_transformers = len(meshes) == 1 and (getattr(model, "tp_size", None) or 1) > 1
    if meshes and not splits and not is_by_transformers:
        splits = ["other means than transformers' tensor parallelism"]
    if splits:
        raise UnsupportedModelError(
            f"{type(model).__name__} is split over processes by {' and '.join(splits)}, and only tensor "
            "parallelism can be speculated; load it with DistributedConfig(tp_size=...), or call generate without "
            "slo_tpot"
        )
    return SplitRanks(meshes.pop().get_group(), input_device(model)) if meshes else None


class SplitRanks(Ranks):
    """The ranks of a tensor-parallel process group, all of which run the same calls.

    Each rank holds a part of every layer, and a forward is a collective operation. So all ranks
    must draft and verify the same tokens, and stop at the same step."""

    # Names of the process groups that are led: several objects may stand for the same group.
    _led: ClassVar[set[str]] = set()

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._device = device

    @property
    def number(self) -> int:  # type: ignore[override]  # a constant of one process
        return self._group.size()

    @property
    def is_led(self) -> bool:
        return self._group.group_name in self._led

    def begin_to_lead(self) -> None:
        _ = self.orders  # connects the processes, which is collective: all ranks are here now
        self._led.add(self._group.group_name)

    def end_leading(self) -> None:
        self._led.discard(self._group.group_name)

    @property
    def is_first(self) -> bool:
        return dist.get_rank(self._group) == 0

    @cached_property
    def orders(self) -> Orders:
        """Channel for orders of the first rank; the first access is collective."""
        return Orders(self._global)

    def check_target(self, target: Ranks) -> None:
        of_target = target._global if isinstance(target, SplitRanks) else "none"
        if of_target != self._global:
            raise IncompatibleDraftError(
                f"assistant_model is split over the processes {self._global}, and the target over {of_target}; load "
                "the draft without distributed_config, so that each process has all of it"
            )

    @property
    def _global(self) -> list[int]:
        return dist.get_process_group_ranks(self._group)

    def clock(self) -> float:
        if self.is_led:
            return super().clock()
        now = torch.tensor(super().clock(), dtype=torch.float64, device=self._device)
        dist.broadcast(now, self._global[0], group=self._group)
        return float(now)

    def first(self, value: T) -> T:
        if self.is_led:
            return value
        values = [value]
        dist.broadcast_object_list(values, self._global[0], group=self._group, device=self._device)
        return values[0]

    def least(self, value: int) -> int:
        least = torch.tensor(value, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return int(least)

    def check_equal(self, work: Sequence[Sequence[int]]) -> None:
        """Compare a checksum of ``work`` over all ranks; if it differs, raise InvalidInputError in
        each of them.
        """
        lengths = [len(numbers) for numbers in work]
        checksum = zlib.crc32(np.concatenate([lengths, *work]).astype(np.int64).tobytes())
        largest = torch.tensor([checksum, -checksum], device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if largest[0] == -largest[1]:
            return
        if self.is_led:
            raise InvalidInputError(
                f"the {self.number} processes of a tensor-parallel model no longer hold the same K/V, so their batcher "
                "ends; the error of stop() in the other processes has the reason; start() it again in all of them"
            )
        raise InvalidInputError(
            f"the {self.number} processes of a tensor-parallel model do not decode the same tokens; call "
            "generate in all of them with the same prompts, options and seed (torch.manual_seed), and with the "
            "same draft"
        )

    def check_draft(self, speculator: Speculator) -> None:
        if speculator.draft is not None and ranks_of(speculator.draft.model).number > 1:
            raise UnsupportedOptionError(
                "the batcher of a tensor-parallel model drafts in the first process alone, and assistant_model is "
                "split over all; load it without distributed_config, so that each process has all of it"
            )

    def new_target(self, speculator: Speculator, *arguments: Any) -> PackedTarget:
        from hf_slospec.families.tensor_parallel import LeadingTarget

        if not self.is_first:
            return super().new_target(speculator, *arguments)
        return LeadingTarget(speculator, self, *arguments)

    def new_follower(self, *arguments: Any) -> Follower:
        from hf_slospec.families.tensor_parallel import RepeatingProcess

        return RepeatingProcess(self, *arguments)


class Orders:
    """Channel by which the first process of a group sends orders to the other processes.

    It has a gloo process group, as a GPU that waited in an NCCL collective would be busy."""

    def __init__(self, ranks: list[int]):
        """Connect the processes with these global ranks; all of them must call this."""
        self._first = ranks[0]
        self._group = dist.new_group(ranks, IDLE, "gloo", use_local_synchronization=True)

    def send(self, order: Any) -> None:
        """Send an order, which must be picklable, to all other processes."""
        dist.broadcast_object_list([order], self._first, group=self._group)

    def receive(self) -> Any:
        """Wait for the first process's next order, and return it.

        Raises:
            RuntimeError: the first process has ended.
        """
        received: list[Any] = [None]
        dist.broadcast_object_list(received, self._first, group=self._group)
        return received[0]
