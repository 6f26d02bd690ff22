"""Triton's interpreter with products of tiles in which a row has the same bits wherever it stands,
as on GPUs.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot_by_rows(self, a, b, d, *options):
    """As Triton's, which multiplies whole tiles by a BLAS whose bits depend, on some CPUs, on a
    row's place in them.
    """
    if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
        return _create_dot(self, a, b, d, *options)
    rows = np.matmul(a.data[..., None, :], b.data[..., None, :, :], dtype=d.data.dtype)[..., 0, :]
    return interpreter.TensorHandle(rows + d.data, d.dtype.scalar)


def multiply_by_rows():
    """Let the interpreter compute each row of a product by itself, in this process."""
    interpreter.InterpreterBuilder.create_dot = _dot_by_rows
