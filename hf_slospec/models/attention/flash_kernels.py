"""Flash-attention kernels that return the log-sum-exp, behind one signature."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_slospec.models.attention.packing import Entries
from hf_slospec.models.batch.attention_rules import AttentionRules

HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)  # compute capability


class KernelUnavailable(Exception):  # noqa: N818  not an error: the next kernel is tried
    """Reason why a kernel cannot be used on a device."""


class FlashKernel(Protocol):
    """Attention of packed queries over ranges of packed keys; out and lse of an entry without keys are undefined."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    has_softcap: bool

    def __call__(
        self,
        query: torch.Tensor,  # [num_queries, num_heads, head_dim]
        key: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        entries: Entries,
        is_causal: bool,  # the last query of an entry sees its last key, each query before it one key fewer
        rules: AttentionRules,  # the window counts only if causal
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [num_queries, num_heads, head_dim] and lse [num_heads, num_queries] f32, the natural logarithm."""


class FlashAttnPackage:
    """FlashAttention-2 from the ``flash-attn`` package."""

    name, dtypes, has_softcap = "flash-attn", HALF, True

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Any = _import_from("flash_attn", "flash_attn_varlen_func")
        if "softcap" not in inspect.signature(self._function).parameters:
            raise KernelUnavailable("flash-attn is older than 2.6; upgrade it")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: Entries,
        is_causal: bool,
        rules: AttentionRules,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = self._function(
            query,
            key,
            value,
            entries.cu_queries,
            entries.cu_keys,
            entries.max_queries,
            entries.max_keys,
            softmax_scale=rules.scaling,
            causal=is_causal,
            window_size=_window_size(is_causal, rules),
            softcap=rules.softcap or 0.0,
            return_attn_probs=True,
        )
        return out, lse


class TorchVarlen:
    """Variable-length flash attention from torch itself."""

    name, dtypes, has_softcap = "torch varlen_attn", HALF, False

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        self._function = _import_from("torch.nn.attention.varlen", "varlen_attn")
        self._aux = _import_from("torch.nn.attention.varlen", "AuxRequest")(lse=True)
        parameters = inspect.signature(self._function).parameters.keys()
        if missing := {"return_aux", "scale", "window_size"} - parameters:
            raise KernelUnavailable(f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")
        self._must_name_gqa = "enable_gqa" in parameters  # torch 2.11 groups query heads without being asked

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: Entries,
        is_causal: bool,
        rules: AttentionRules,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert rules.softcap is None
        return self._function(
            query,
            key,
            value,
            entries.cu_queries,
            entries.cu_keys,
            entries.max_queries,
            entries.max_keys,
            return_aux=self._aux,
            scale=rules.scaling,
            window_size=_window_size(is_causal, rules),
            **({"enable_gqa": query.shape[1] != key.shape[1]} if self._must_name_gqa else {}),
        )


def _window_size(is_causal: bool, rules: AttentionRules) -> tuple[int, int]:
    if not is_causal:
        return -1, -1
    return -1 if rules.window is None else rules.window - 1, 0


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise KernelUnavailable(f"flash attention needs a CUDA device, and this is {device.type}")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < AMPERE:
        raise KernelUnavailable(f"{torch.cuda.get_device_name(device)} is older than Ampere (compute capability 8.0)")


def _import_from(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:  # OSError: built for another torch or CUDA
        raise KernelUnavailable(f"{module}.{name} cannot be imported ({error})") from error
