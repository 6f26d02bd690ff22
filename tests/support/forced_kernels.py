"""Kernels for packed weights, forced instead of measured."""

from __future__ import annotations

from hf_slospec.cpu import kernels as kernel_choice
from hf_slospec.cpu.kernels import DTYPES, PACKING, SIZES, KernelChoice, works

ALL_FASTER = (True,) * len(SIZES)
WORKING = [(name, dtype) for name in PACKING for dtype in DTYPES[name] if works(name, dtype)]


def force_kernel(monkeypatch, name, is_faster=ALL_FASTER):
    """Make every measurement find one kernel, where it works at all, and forget those of before."""
    found: dict[str, KernelChoice] = {}

    def measured(weights, kernels):
        return KernelChoice(kernel=name if name in kernels else None, is_faster=tuple(is_faster))

    monkeypatch.setattr(kernel_choice, "_measured", measured)
    monkeypatch.setattr(kernel_choice, "_choices", lambda num_threads: found)
    monkeypatch.setattr(kernel_choice, "_save", lambda choices: None)
