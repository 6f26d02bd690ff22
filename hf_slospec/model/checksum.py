"""Checksums of weights, which tell changes that leave no other trace.

torch counts writes to a tensor (``_version``), but neither those of fused optimizers nor those
through ``weight.data``, by which adapters are merged and averages swapped in. So a checksum of all
weights is computed before a call, if they may have been written: one pass over the memory, which
takes as long as one step of decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Digest = tuple[int, ...]
# Address and count of writes of every tensor that holds a weight.
State = tuple[tuple[int, int | None], ...]

FACTOR = 0x2C1B3C6D  # 5 modulo 8: powers repeat after 2**14 even in the two highest bits of a word
# Words per addition: on a CPU they fit a core's cache; on a device, few kernels are launched.
CPU_WORDS = 2**18
DEVICE_WORDS = 2**23
WIDTH = 1024  # sums per row


@torch.no_grad()
def digest(weights: Iterable[torch.Tensor]) -> Digest:
    """Return a checksum of all bits of the weights, which differs if any bit does, or if two
    weights are swapped.

    Words are added by their index in a piece, each piece times another power of ``FACTOR``, and
    these sums again by row and by column. A single change is always seen, and so are two that would
    cancel out in a plain sum."""
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


def weight_version(weight: torch.Tensor) -> int:
    """Return an integer that stays the same until a weight is written or moved."""
    return hash((address(weight), digest([weight])))


def state_of(weight: torch.Tensor) -> State:
    """Return the address and the count of writes of each tensor that holds a weight."""
    tensors = list(_stored(weight))
    if not tensors:
        return ((id(weight), None),)
    return tuple(
        (address(each), None if each.is_inference() else each._version) for each in tensors
    )


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's data; the id of a tensor that is stored in several, such as
    a sparse one.
    """
    return tensor.data_ptr() if torch._C._has_storage(tensor) else id(tensor)
