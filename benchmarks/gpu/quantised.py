"""Sizes with quantised weights, such as ``8B-int4``: the target's linear layers by torchao."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.checksum import component_reader
from hf_slospec.server.loading import load_pair
from hf_slospec.tiny.shapes import SIZES

# By the part of a size after its last "-": torchao's config, and its options. Its other packing
# formats of int4 need further packages.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("Int4WeightOnlyConfig", {"int4_packing_format": "tile_packed_to_4d"}),
    "int8": ("Int8WeightOnlyConfig", {}),
    "fp8": ("Float8WeightOnlyConfig", {}),
}
# From the smallest to the largest, as they are built.
ALL_SIZES = tuple(each for size in SIZES for each in (*(f"{size}-{f}" for f in FORMATS), size))


def load(size: str, device: str) -> tuple[Any, Any, Any]:
    """Return target, draft and tokenizer of a size, the target quantised if the size says so.

    Raises:
        UnsupportedOptionError: torchao is not installed, or lacks the format on this device.
    """
    shape, _, name = size.partition("-")
    quantise = _quantiser(name) if name else None
    pair = load_pair(None, None, shape, "bfloat16", device)
    if quantise is not None:
        try:
            quantise(pair[0])
        except (
            AssertionError,
            ImportError,
            NotImplementedError,
            RuntimeError,
            ValueError,
        ) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedOptionError(f"torchao has no {name} weights here: {error}") from error
    return pair


def _quantiser(name: str) -> Callable[[nn.Module], None]:
    kind, options = FORMATS[name]
    try:
        torchao: Any = importlib.import_module("torchao.quantization")
        config = getattr(torchao, kind)(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedOptionError(
            f"{name} weights need torchao 0.18 ({error}); run pip install torchao"
        ) from error
    return lambda model: torchao.quantize_(model, config)


def num_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of all tensors that hold a weight."""
    return sum(tensor.nbytes for tensor in component_reader(weight)(weight))
