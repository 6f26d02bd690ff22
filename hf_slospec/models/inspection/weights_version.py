"""Detection of changes to a model's weights, however they were written.

torch counts writes to a tensor (``_version``), but neither those of fused optimizers nor those through ``weight.data``,
by which adapters are merged and averages swapped in. So a checksum of all weights is computed before a call, if they
may have been written: one pass over the memory, which takes as long as one step of decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Digest = tuple[int, ...]
State = tuple[tuple[int, int | None], ...]  # address and count of writes of every tensor that holds a weight

FACTOR = 0x2C1B3C6D  # 5 modulo 8: its powers repeat after 2**14 even in the two highest bytes of a word
CPU_WORDS, DEVICE_WORDS = 2**18, 2**23  # words per addition: they fit a core's cache; few kernel launches
WIDTH = 1024  # sums per row

_num_writes = _num_told = 0


def weights_changed() -> None:
    """Count every model as changed, and read its weights again before its next step.

    Needed after changes that leave no trace: writes through ``weight.data``, or to weights on a disk, of a model none
    of whose parameters requires a gradient, or while submitted requests run; and changes of what hooks read from
    elsewhere, such as the strength of a steering vector. The next call notices all others.
    """
    global _num_told
    _num_told += 1
    _count_write()


def _count_write(*_: object) -> None:
    global _num_writes
    _num_writes += 1


# An optimizer's step counts for every model: weights that are not trained may be copies or averages of trained ones.
register_optimizer_step_post_hook(_count_write)


class Weights:
    """State of a model's weights when they were last read."""

    def __init__(self, weights: Sequence[torch.Tensor], may_be_written: bool):
        """Read the weights; the arguments are those of :meth:`renew`."""
        self._state: tuple[State, ...] = ()
        self._digest: Digest | None = None
        self._num_writes, self._num_told = _num_writes, _num_told
        self.renew(weights, may_be_written)

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped since, or :func:`weights_changed` was called."""
        return self._num_writes != _num_writes

    def renew(self, weights: Sequence[torch.Tensor], may_be_written: bool) -> bool:
        """Read the weights again, and return whether they may have changed.

        Args:
            weights: parameters and buffers, always in the same order.
            may_be_written: they may have been written without a trace, so all bits are compared.
        """
        before = self._state, self._digest, self._num_told
        num_writes, num_told, state = _num_writes, _num_told, tuple(map(_state_of, weights))
        if self.is_behind or may_be_written:
            self._digest = digest(weights)  # which may run out of memory, and is then computed again
        self._state, self._num_writes, self._num_told = state, num_writes, num_told
        return before != (self._state, self._digest, self._num_told)


def may_be_trained(weights: Iterable[torch.Tensor]) -> bool:
    """Return whether a parameter requires a gradient, or is an inference tensor, to which torch counts no writes."""
    return any(weight.requires_grad or weight.is_inference() for weight in weights)


@torch.no_grad()
def digest(weights: Iterable[torch.Tensor]) -> Digest:
    """Return a checksum of all bits of the weights, which differs if any bit does, or if two weights are swapped.

    Words are added by their index in a piece, each piece times another power of ``FACTOR``, and these sums again by row
    and by column. A single change is always seen, and so are two that would cancel out in a plain sum.
    """
    sums: dict[torch.device, torch.Tensor] = {}
    for weight in weights:
        for words in (words for tensor in _stored(weight) for words in _words(tensor.detach())):
            if words.device not in sums:
                size = CPU_WORDS if words.device.type == "cpu" else DEVICE_WORDS
                sums[words.device] = torch.zeros(size, dtype=torch.int32, device=words.device)
            for piece in words.split(len(sums[words.device])):
                total = sums[words.device][: len(piece)]
                torch.add(piece, total, alpha=FACTOR, out=total)
    checksums = list[int]()
    for total in sums.values():
        rows = total.view(-1, WIDTH)
        for line in (rows.sum(0), rows.sum(1)):  # int64
            factors = torch.arange(1, 2 * len(line), 2, device=total.device)
            checksums.append(int((line * factors).sum()))
    return tuple(checksums)


def _stored(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a weight: several if it is quantised, none if it is offloaded."""
    if weight.is_meta:
        return
    if weight.is_nested and type(weight) is torch.Tensor:
        for part in weight.unbind():
            yield from _stored(part)
    elif hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            if isinstance(part := getattr(weight, name), torch.Tensor):  # not a device mesh
                yield from _stored(part)
    else:
        yield weight


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int32: its whole words, then each remaining byte."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    dense = dense.int_repr() if dense.is_quantized else dense.resolve_conj().resolve_neg()
    flat = dense.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # a view of a larger tensor, such as FSDP's
        flat = flat.clone()
    num_whole = len(flat) // 4 * 4
    yield flat[:num_whole].view(torch.int32)
    if num_whole < len(flat):
        yield flat[num_whole:].int()


def _state_of(weight: torch.Tensor) -> State:
    tensors = list(_stored(weight))
    if not tensors:
        return ((id(weight), None),)
    return tuple((address(each), None if each.is_inference() else each._version) for each in tensors)


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's data; the id of a tensor that is stored in several, such as a sparse one."""
    return tensor.data_ptr() if torch._C._has_storage(tensor) else id(tensor)
