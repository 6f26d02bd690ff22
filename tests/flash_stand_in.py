"""A flash-attention kernel in plain torch, for any device and dtype: what stands in for CUDA's in the tests."""

from __future__ import annotations

import math

import torch

from hf_slospec.models.attention.packing import Entries


class StandIn:
    """Written from the kernels' documentation, and sharing no code with the package."""

    name, dtypes, has_softcap = "stand-in", (torch.float32, torch.bfloat16, torch.float16), True
    EMPTY_LSE, EMPTY_OUT = math.inf, 0.0  # of an entry without keys; FlashAttention-2's

    def __init__(self, device: torch.device):
        self.calls: list[tuple[bool, int, int]] = []  # is_causal, max_queries, num_heads per KV head

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: Entries,
        scaling: float,
        is_causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = query.shape[1] // key.shape[1]
        self.calls.append((is_causal, entries.max_queries, groups))
        for tensor in (entries.cu_queries, entries.cu_keys):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous() and bool((tensor.diff() >= 0).all())
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert entries.cu_queries[-1] == len(query) and entries.cu_keys[-1] <= len(key)
        assert groups == 1 or entries.max_queries > 1, "some kernels take this for one query per entry"
        out = torch.full_like(query, math.nan)
        lse = query.new_full((query.shape[1], len(query)), math.nan, dtype=torch.float32)
        queries, keys = entries.cu_queries.tolist(), entries.cu_keys.tolist()
        for first, last, start, stop in zip(queries, queries[1:], keys, keys[1:], strict=False):
            if first == last:
                continue
            assert last - first <= entries.max_queries and stop - start <= entries.max_keys
            if start == stop:
                out[first:last], lse[:, first:last] = self.EMPTY_OUT, self.EMPTY_LSE
                continue
            for row in range(first, last):
                end = stop - (last - 1 - row) if is_causal else stop
                begin = start if window is None else max(start, end - window)
                for head in range(query.shape[1]):
                    own = key[begin:end, head // groups].float()
                    scores = own @ query[row, head].float() * scaling
                    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                    lse[head, row] = scores.logsumexp(0)
                    out[row, head] = scores.softmax(0) @ value[begin:end, head // groups].float()
        return out, lse


class EmptyIsMinusInfinity(StandIn):
    """FlashAttention-3's and 4's, and an output nobody wrote to."""

    EMPTY_LSE, EMPTY_OUT = -math.inf, math.nan


class EmptyIsZero(StandIn):
    EMPTY_LSE = 0.0


class WithoutSoftcap(StandIn):
    """Like torch's own."""

    has_softcap = False
