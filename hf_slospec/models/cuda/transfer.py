"""Trees of tensors (dicts, lists, tuples, dataclasses): what they look like, and taking them to a device at once.

Every blocking copy from the host waits until the device has done all that was asked of it before, so the many small
tensors that the host makes for a forward go over together, from pinned memory, without waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

ALIGNMENT = 16  # bytes


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with ``function`` of every tensor in its place."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = (field.name for field in dataclasses.fields(tree))
        return type(tree)(**{name: map_tensors(getattr(tree, name), function) for name in fields})
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    return found


def signature(tree: Any) -> Hashable:
    """Equal for two trees only if they differ in nothing but the values in their tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.device
    if isinstance(tree, dict):
        return dict, tuple((key, signature(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(map(signature, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), tuple(signature(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return type(tree), tree  # 1, 1.0 and True are equal


class DeviceCopy:
    """Room on a device for the tensors of a tree: those made on the host side by side, others each by itself."""

    def __init__(self, tree: Any, device: torch.device):
        self._starts, end = [], 0
        for leaf in _host_tensors(tree):
            self._starts.append(end)
            end += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
        self._host = torch.empty(end, dtype=torch.uint8, device=device)
        self._has_pinned = device.type == "cuda"
        slots = iter(self._slots(self._host, _host_tensors(tree)))
        self.content = map_tensors(tree, lambda leaf: next(slots) if leaf.is_cpu else torch.empty_like(leaf))

    def _slots(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            flat[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            for start, leaf in zip(self._starts, like, strict=True)
        ]

    def fill(self, tree: Any) -> None:
        """Put in the values of a tree of the same signature, waiting for nothing."""
        made = _host_tensors(tree)
        # Torch gives pinned memory to others only once copies from it are done.
        flat = torch.empty(self._host.shape, dtype=torch.uint8, pin_memory=self._has_pinned)
        for slot, leaf in zip(self._slots(flat, made), made, strict=True):
            slot.copy_(leaf)
        self._host.copy_(flat, non_blocking=True)
        for slot, leaf in zip(tensors_in(self.content), tensors_in(tree), strict=True):
            if not leaf.is_cpu:
                slot.copy_(leaf)


def _host_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tensors_in(tree) if leaf.is_cpu]


def to_device(tree: Any, device: torch.device) -> Any:
    """The tree on a device; what the host made gets there in one copy."""
    made = _host_tensors(tree)
    if device.type == "cpu" or not made:
        return map_tensors(tree, lambda leaf: leaf.to(device))
    parcel = DeviceCopy(made, device)
    parcel.fill(made)
    there = iter(parcel.content)
    return map_tensors(tree, lambda leaf: next(there) if leaf.is_cpu else leaf.to(device))
