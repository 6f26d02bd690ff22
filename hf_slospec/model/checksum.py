"""Checksums of weights, which reveal changes that leave no other trace.

torch counts writes to a tensor (``_version``), but not the writes of fused optimizers, nor writes
through ``weight.data``, by which adapters are merged and averaged weights swapped in. So a checksum
of all weights is computed before a call if they may have been written. It reads all weights once,
which takes as long as one decode step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from hf_slospec.model.whose_code import library_of

# Classes of weights that have an address; quantised weights are of other classes.
PLAIN = (torch.Tensor, torch.nn.Parameter)
Digest = tuple[int, ...]  # checksum: two integers per device
# Address and count of writes of each tensor that holds a weight's values; count None: not counted.
State = tuple[tuple[int, int | None], ...]

# Multiplier of the checksum. As it is 5 modulo 8, its powers modulo 2**16 repeat only after 2**14
# additions, so that changes in the upper half of an int32 word, too, get many different weights.
FACTOR = 0x2C1B3C6D
# int32 words per addition: on a CPU as many as fit into a core's cache; on other devices more, so
# that few kernels are launched.
CPU_WORDS = 2**18
DEVICE_WORDS = 2**23
WIDTH = 1024  # row length of the matrix in which the sums are added by rows and by columns


@torch.no_grad()
def digest(weights: Iterable[torch.Tensor]) -> Digest:
    """Return a checksum of all bits of the weights, which changes if any bit changes, or if two
    weights are swapped.

    The weights' int32 words are divided into pieces, which are added elementwise, each multiplied
    by another power of ``FACTOR``. The resulting sums are added by rows and by columns. A single
    change is always seen, and so are two changes that would cancel out in a plain sum.
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


def is_packed(weight: Any) -> bool:
    """Return whether a weight is a ``QuantisedWeight`` (cpu/quantised_weight.py), whose values never
    change.
    """
    return hasattr(type(weight), "matrix")


def _stored(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold a weight's values: several if it is quantised, none if it
    is offloaded or its values never change.
    """
    if weight.is_meta or is_packed(weight):
        return
    if weight.is_nested and type(weight) is torch.Tensor:
        for part in weight.unbind():
            yield from _stored(part)
    else:
        yield from component_reader(weight)(weight)


def component_reader(weight: torch.Tensor) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """Return a function that reads from a weight like this one the tensors that hold its values.

    These are the weight itself if it has storage, and the tensors in its attributes if its class is
    not torch's: those that a subclass names for torch (torchao), or all, and those in attributes of
    objects of the same library (the ``quant_state`` of bitsandbytes). The function raises
    AttributeError for a weight without these attributes.
    """
    names = () if type(weight) in PLAIN else tuple(_component_names(weight, {id(weight)}))
    return _reader(names, not hasattr(weight, "__tensor_flatten__"))


@functools.cache
def _reader(names: tuple[str, ...], has_storage: bool) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    if len(names) > 1 and not has_storage:
        return operator.attrgetter(*names)  # in C, as weights are read in every step
    readers = [operator.attrgetter(name) for name in names]
    return lambda weight: (*((weight,) if has_storage else ()), *(read(weight) for read in readers))


def _component_names(holder: Any, seen: set[int]) -> Iterator[str]:
    """Yield the dotted names of the attributes that hold a weight's components.

    Args:
        holder: a tensor subclass, or an object in one of its attributes.
        seen: ids of objects that are not read again; objects that are read are added.
    """
    flattens = hasattr(holder, "__tensor_flatten__")
    names = holder.__tensor_flatten__()[0] if flattens else list(getattr(holder, "__dict__", {}))
    for name in names:
        value = getattr(holder, name)
        is_tensor = isinstance(value, torch.Tensor)
        is_state = library_of(type(value)) == library_of(type(holder)) and not flattens
        if id(value) in seen or isinstance(value, torch.nn.Module) or not (is_tensor or is_state):
            continue
        seen.add(id(value))
        if is_tensor and not hasattr(value, "__tensor_flatten__"):
            yield name
        if type(value) not in PLAIN:
            yield from (f"{name}.{inner}" for inner in _component_names(value, seen))


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int32 tensors: first all complete words, then the remaining
    bytes as one word each.
    """
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    dense = dense.int_repr() if dense.is_quantized else dense.resolve_conj().resolve_neg()
    flat = dense.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # not aligned to words, as in a view of FSDP's flat tensor
        flat = flat.clone()
    num_whole = len(flat) // 4 * 4
    yield flat[:num_whole].view(torch.int32)
    if num_whole < len(flat):
        yield flat[num_whole:].int()


def weight_version(weight: torch.Tensor) -> int:
    """Return an integer that changes if the weight is written or moved."""
    return hash((address(weight), digest([weight])))


def state_of(weight: torch.Tensor) -> State:
    """Return the address and the count of writes of each tensor that holds a weight's values; the
    id of what holds them if there is none.
    """
    if is_packed(weight):
        return ((cast(Any, weight).matrix.id, None),)
    tensors = list(_stored(weight))
    if not tensors:
        return ((id(weight), None),)
    return tuple(
        (address(each), None if each.is_inference() else each._version) for each in tensors
    )


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's data, or the id of a tensor without data of its own, such as
    a sparse one.
    """
    return tensor.data_ptr() if torch._C._has_storage(tensor) else id(tensor)
