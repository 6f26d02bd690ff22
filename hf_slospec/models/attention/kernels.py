"""Flash-attention kernels that return the log-sum-exp, as one signature."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Protocol

import torch

from hf_slospec.models.attention.packing import Entries

HALF = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)


class KernelUnavailable(Exception):  # noqa: N818  not an error: the next kernel is tried
    """Why a kernel cannot be used here."""


class FlashKernel(Protocol):
    """Attention of packed queries to ranges of packed keys. Of an entry without keys, out and lse may be anything."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    has_softcap: bool

    def __call__(
        self,
        query: torch.Tensor,  # [num_queries, num_heads, head_dim]
        key: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        entries: Entries,
        scaling: float,
        is_causal: bool,  # the last query of an entry sees its last key, each before it one key less
        window: int | None,  # only if causal: keys that a query sees at most
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out [num_queries, num_heads, head_dim], lse [num_heads, num_queries] f32, natural logarithm"""


class FlashAttnPackage:
    """FlashAttention-2 of the ``flash-attn`` package."""

    name, dtypes, has_softcap = "flash-attn", HALF, True

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Any = _imported("flash_attn", "flash_attn_varlen_func")
        if "softcap" not in inspect.signature(self._function).parameters:
            raise KernelUnavailable("flash-attn is older than 2.6")

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
        out, lse, _ = self._function(
            query,
            key,
            value,
            entries.cu_queries,
            entries.cu_keys,
            entries.max_queries,
            entries.max_keys,
            softmax_scale=scaling,
            causal=is_causal,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            return_attn_probs=True,
        )
        return out, lse


class TorchVarlen:
    """The flash-attention kernel that torch brings along."""

    name, dtypes, has_softcap = "torch varlen_attn", HALF, False

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Any = _imported("torch.nn.attention.varlen", "varlen_attn")
        self._wants_lse = _imported("torch.nn.attention.varlen", "AuxRequest")(lse=True)
        wanted = {"return_aux", "scale", "window_size", "enable_gqa"}
        if missing := wanted - inspect.signature(self._function).parameters.keys():
            raise KernelUnavailable(f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")

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
        assert softcap is None
        causal_window = (-1 if window is None else window - 1, 0)
        return self._function(
            query,
            key,
            value,
            entries.cu_queries,
            entries.cu_keys,
            entries.max_queries,
            entries.max_keys,
            return_aux=self._wants_lse,
            scale=scaling,
            window_size=causal_window if is_causal else (-1, -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise KernelUnavailable(f"flash attention needs a CUDA device, and this is {device.type}")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < AMPERE:
        raise KernelUnavailable(f"{torch.cuda.get_device_name(device)} is older than Ampere (compute capability 8.0)")


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:  # OSError: built for another torch or CUDA
        raise KernelUnavailable(f"{module}.{name} cannot be imported ({error})") from error
