"""The few sizes in which padded rows come."""

from __future__ import annotations

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def bucket_for(number: int) -> int:
    """The next of the sizes that are used; beyond them, the next power of two."""
    return next((size for size in BUCKETS if size >= number), 1 << max(number - 1, 0).bit_length())
