"""Kernels for packed weights, forced instead of chosen."""

from __future__ import annotations

from hf_slospec.cpu import kernels, packed_weights
from hf_slospec.cpu.kernels import DTYPES, PACKING, works

WORKING = [(name, dtype) for name in PACKING for dtype in DTYPES[name] if works(name, dtype)]


def force_kernel(monkeypatch, name):
    """Make every choice find one kernel, where it works at all."""

    def chosen(weight):
        return name if name in PACKING and works(name, weight.dtype) else None

    for module in (kernels, packed_weights):
        monkeypatch.setattr(module, "kernel_for", chosen)
