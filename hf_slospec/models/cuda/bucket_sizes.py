"""Sizes to which packed batches are padded, so that few CUDA graphs are needed."""

from __future__ import annotations

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def bucket_for(size: int) -> int:
    """Return the smallest bucket that holds ``size``; beyond the largest, the next power of two."""
    return next((bucket for bucket in BUCKETS if bucket >= size), 1 << max(size - 1, 0).bit_length())
