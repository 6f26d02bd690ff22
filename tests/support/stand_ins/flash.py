"""A flash-attention kernel in plain torch, for any device and dtype, in place of CUDA's in the
tests.
"""

from __future__ import annotations

import math

import torch


class StandIn:
    """Written from the kernels' documentation, and sharing no code with the package."""

    name = "stand-in"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    has_softcap = True
    # FlashAttention-2's, for an entry without keys
    EMPTY_LSE = math.inf
    EMPTY_OUT = 0.0

    def __init__(self, device):
        self.calls = []  # is_causal, max_queries, num_heads per KV head

    def __call__(self, query, key, value, entries, is_causal, rules):
        scaling, window, softcap, *_ = rules
        groups = query.shape[1] // key.shape[1]
        self.calls.append((is_causal, entries.max_queries, groups))
        for tensor in (entries.cu_queries, entries.cu_keys):
            assert (
                tensor.dtype == torch.int32
                and tensor.is_contiguous()
                and bool((tensor.diff() >= 0).all())
            )
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert entries.cu_queries[-1] == len(query) and entries.cu_keys[-1] <= len(key)
        assert groups == 1 or entries.max_queries > 1, (
            "some kernels take this for one query per entry"
        )
        out = torch.full_like(query, math.nan)
        lse = query.new_full((query.shape[1], len(query)), math.nan, dtype=torch.float32)
        queries = entries.cu_queries.tolist()
        keys = entries.cu_keys.tolist()
        for first, last, start, stop in zip(queries, queries[1:], keys, keys[1:], strict=False):
            if first == last:
                continue
            assert last - first <= entries.max_queries and stop - start <= entries.max_keys
            if start == stop:
                out[first:last], lse[:, first:last] = self.EMPTY_OUT, self.EMPTY_LSE
                continue
            ends = torch.full((last - first,), stop, device=query.device)
            if is_causal:
                ends += torch.arange(last - first, device=query.device) - self.diagonal(
                    last - first, stop - start
                )
            slots = torch.arange(start, stop, device=query.device)
            hidden = slots >= ends[:, None]
            if window is not None:
                hidden |= slots < ends[:, None] - window
            own_key, own_value = (
                kv[start:stop].float().repeat_interleave(groups, 1) for kv in (key, value)
            )
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), own_key) * scaling
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            scores = scores.masked_fill(hidden, -math.inf)
            lse[:, first:last] = scores.logsumexp(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_value).to(
                out.dtype
            )
        return out, lse

    @staticmethod
    def diagonal(num_queries, num_keys):
        """The query that sees all keys."""
        return num_queries - 1


class EmptyIsMinusInfinity(StandIn):
    """FlashAttention-3's and 4's, and an output nobody wrote to."""

    EMPTY_LSE = -math.inf
    EMPTY_OUT = math.nan


class EmptyIsZero(StandIn):
    EMPTY_LSE = 0.0


class WithoutSoftcap(StandIn):
    """Like torch's own."""

    has_softcap = False


class TopLeft(StandIn):
    """Aligns its causal mask to the first key, as FlashAttention did before 2.1."""

    name = "top-left"

    @staticmethod
    def diagonal(num_queries, num_keys):
        return num_keys - 1


class BaseTwo(StandIn):
    """FlashInfer's log-sum-exp."""

    name = "base two"

    def __call__(self, *arguments):
        out, lse = super().__call__(*arguments)
        return out, lse / math.log(2)


class Transposed(StandIn):
    name = "transposed"

    def __call__(self, *arguments):
        out, lse = super().__call__(*arguments)
        return out, lse.T


class Broken(StandIn):
    name = "broken"

    def __call__(self, *arguments):
        raise RuntimeError("no kernel image is available for execution on the device")
