"""Changes of a model's weights, however they were written.

torch counts writes to a tensor (``_version``), but neither those of fused optimizers nor those through ``weight.data``,
by which adapters are merged and averages swapped in. So all bits of the weights are summed up before a call, wherever
something may have written them: one pass over the memory, as one step of decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Digest = tuple[int, ...]
State = tuple[tuple[int, int | None], ...]  # address and count of writes of every tensor that holds a weight

FACTOR = 0x2C1B3C6D  # 5 modulo 8: its powers repeat after 2**14 even in the two highest bytes of a word
CPU_WORDS, DEVICE_WORDS = 2**18, 2**23  # that are summed at a time: what a core's cache holds; few launches
WIDTH = 1024  # words of a row of sums

_num_writes = 0


def weights_changed() -> None:
    """Check all weights of every model before its next step.

    Needed after writes that leave no trace: those through ``weight.data``, or to weights on a disk, of a model none of
    whose parameters requires a gradient, or while submitted requests run. All others are noticed by the next call.
    """
    global _num_writes
    _num_writes += 1


# A model that is not trained may hold what was: a copy, an average, or the weights of an optimizer with its own.
register_optimizer_step_post_hook(lambda *_: weights_changed())


class Weights:
    """Weights of a model as they were when they were last read."""

    def __init__(self, weights: Sequence[torch.Tensor], may_be_written: bool):
        """Read the weights; the arguments are those of :meth:`renew`."""
        self._state: tuple[State, ...] = ()
        self._digest: Digest | None = None
        self._num_writes = _num_writes
        self.renew(weights, may_be_written)

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped since, or :func:`weights_changed` was called."""
        return self._num_writes != _num_writes

    def renew(self, weights: Sequence[torch.Tensor], may_be_written: bool) -> bool:
        """Read the weights again, and return whether they may have changed.

        Args:
            weights: parameters and buffers, always in the same order.
            may_be_written: something may have written them without a trace.
        """
        before = self._state, self._digest
        is_behind, self._num_writes = self.is_behind, _num_writes
        self._state = tuple(map(_state_of, weights))
        if is_behind or may_be_written:
            self._digest = digest(weights)
        return before != (self._state, self._digest)


def may_be_trained(weights: Iterable[torch.Tensor]) -> bool:
    """Return whether a parameter requires a gradient, or lets torch count no writes to it."""
    return any(weight.requires_grad or weight.is_inference() for weight in weights)


@torch.no_grad()
def digest(weights: Iterable[torch.Tensor]) -> Digest:
    """Return a checksum of all bits of the weights, which differs if any of them do, or if two are swapped.

    Words of all weights are summed up by their place in a piece, pieces multiplied by different powers of a number,
    and the sums again by row and by column. A single change is always seen, and so are two that would cancel out.
    """
    sums: dict[torch.device, torch.Tensor] = {}
    for weight in weights:
        for words in (words for tensor in _stored(weight) for words in _words(tensor.detach())):
            if words.device not in sums:
                size = CPU_WORDS if words.device.type == "cpu" else DEVICE_WORDS
                sums[words.device] = torch.zeros(size, dtype=torch.int32, device=words.device)
            for piece in words.split(len(sums[words.device])):
                own = sums[words.device][: len(piece)]
                torch.add(piece, own, alpha=FACTOR, out=own)
    found = list[int]()
    for own in sums.values():
        rows = own.view(-1, WIDTH)
        for by_place in (rows.sum(0), rows.sum(1)):  # int64
            places = torch.arange(1, 2 * len(by_place), 2, device=own.device)
            found.append(int((by_place * places).sum()))
    return tuple(found)


def _stored(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold a weight: several of a quantised one, this process's part of a split one.

    None hold a weight that is offloaded, or that was released for its packed copy.
    """
    if weight.is_meta:
        return
    if hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            if isinstance(part := getattr(weight, name), torch.Tensor):  # not a device mesh
                yield from _stored(part)
    else:
        yield weight


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int32, bytes that fill no word apart."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # a part of a larger tensor, as of FSDP's
        flat = flat.clone()
    num_whole = len(flat) // 4 * 4
    yield flat[:num_whole].view(torch.int32)
    if num_whole < len(flat):
        yield flat[num_whole:].int()


def _state_of(weight: torch.Tensor) -> State:
    tensors = list(_stored(weight))
    if not tensors:
        return ((id(weight), None),)
    return tuple((each.data_ptr(), None if each.is_inference() else each._version) for each in tensors)
