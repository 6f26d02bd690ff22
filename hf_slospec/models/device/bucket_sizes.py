"""Sizes to which packed batches are padded, so that few CUDA graphs are needed."""

from __future__ import annotations

# Sizes in tokens, and in tokens, keys and logits per sequence. Between 1 and 16 tokens a GPU reads the weights for
# about the same time, so these sizes are powers of two, which are also what draft levels of widths 1, 2 and 4 need.
# From 16 on matrix kernels compute whole tiles, and a step of a third or a half limits the work on padding. 64
# requests with 1 to 4 tokens (levels, and steps that draft little) need 64 to 256; of up to 10 tokens each, 320 to 640.
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640)
# Sizes in sequences. 80 is there because every padding sequence adds at least one token. 4 is not: a draft level of 16
# tokens takes as long as one of 1, and every size has graphs of its own for each shape of level; a verify step of 3 or
# 4 requests is padded by some tokens more.
BATCHES = (1, 2, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256)


def bucket_for(size: int, buckets: tuple[int, ...] = BUCKETS) -> int:
    """Return the smallest bucket that holds ``size``; beyond the largest, the next power of two."""
    return next((bucket for bucket in buckets if bucket >= size), 1 << max(size - 1, 0).bit_length())
