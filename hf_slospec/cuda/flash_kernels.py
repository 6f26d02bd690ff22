"""Flash-attention kernels of several packages with one signature, which return the log-sum-exp."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_slospec.cuda.flash import Entries
from hf_slospec.model.batch import AttentionRules

HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)  # compute capability
# Keyword arguments by which the versions of flash-attn are asked for the log-sum-exp.
LSE_OPTIONS = ("return_attn_probs", "return_softmax", "return_lse")


class KernelUnavailable(Exception):  # noqa: N818  not an error: the next kernel is tried
    """Reason why a kernel cannot be used on a device."""


class FlashKernel(Protocol):
    """Varlen kernel, in which each entry's queries attend to a range of slots; out and lse of an
    entry without keys are undefined.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    has_softcap: bool

    def __call__(
        self,
        query: torch.Tensor,  # [num_queries, num_heads, head_dim]
        key: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        entries: Entries,
        # The last query of an entry attends to all its keys, each earlier query to one key fewer.
        is_causal: bool,
        rules: AttentionRules,  # its window is read only if ``is_causal``
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [num_queries, num_heads, head_dim] and lse [num_heads, num_queries] f32, the
        natural logarithm.
        """


class FlashAttn2:
    """FlashAttention-2 from the ``flash-attn`` package; later versions have the same function with
    other options.
    """

    name = "flash-attn"
    module = "flash_attn"
    dtypes = HALF
    has_softcap = True

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Any = self._load()
        parameters = inspect.signature(self._function).parameters
        if missing := {"softcap", "window_size"} - parameters.keys():
            raise KernelUnavailable(f"{self.name} has no {', '.join(sorted(missing))}; upgrade it")
        # The first versions of FlashAttention-3 return the log-sum-exp without being asked.
        self._lse_options = {option: True for option in LSE_OPTIONS if option in parameters}
        self._no_window = parameters["window_size"].default  # -1 or None on both sides

    def _load(self) -> Any:
        return _import_from(self.module, "flash_attn_varlen_func")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: Entries,
        is_causal: bool,
        rules: AttentionRules,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_window = is_causal and rules.window is not None
        out, lse, *_ = self._function(
            query,
            key,
            value,
            cu_seqlens_q=entries.cu_queries,
            cu_seqlens_k=entries.cu_keys,
            max_seqlen_q=entries.max_queries,
            max_seqlen_k=entries.max_keys,
            softmax_scale=rules.scaling,
            causal=is_causal,
            window_size=_window_size(is_causal, rules) if has_window else self._no_window,
            softcap=rules.softcap or 0.0,
            **self._lse_options,
        )
        return out, lse


class FlashAttn3(FlashAttn2):
    """FlashAttention-3, built from its sources (Hopper)."""

    name = "flash-attn-3"
    module = "flash_attn_interface"


class FlashAttn4(FlashAttn2):
    """FlashAttention-4 from the ``flash-attn-4`` package, which compiles its kernels when they are
    first called.
    """

    name = "flash-attn-4"
    module = "flash_attn.cute"


class HubFlashAttn(FlashAttn2):
    """The build of flash-attn that transformers would load from the Hub by the ``kernels`` package."""

    name = "flash-attn by kernels"

    def _load(self) -> Any:
        get_kernel = _import_from("kernels", "get_kernel")
        repositories, versions = (
            _import_from(
                "transformers.modeling_flash_attention_utils", f"FLASH_ATTN_KERNEL_{table}"
            )
            for table in ("FALLBACK", "VERSIONS")
        )
        repository = repositories["flash_attention_2"]
        try:
            return get_kernel(repository, version=versions.get(repository)).flash_attn_varlen_func
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise KernelUnavailable(
                f"{repository} cannot be loaded from the Hub ({error})"
            ) from error


class TorchVarlen:
    """Variable-length flash attention from torch itself."""

    name = "torch varlen_attn"
    dtypes = HALF
    has_softcap = False

    def __init__(self, device: torch.device):
        _require_cuda(device)
        self._function: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        self._function = _import_from("torch.nn.attention.varlen", "varlen_attn")
        self._aux = _import_from("torch.nn.attention.varlen", "AuxRequest")(lse=True)
        parameters = inspect.signature(self._function).parameters.keys()
        if missing := {"return_aux", "scale", "window_size"} - parameters:
            raise KernelUnavailable(
                f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}"
            )
        # torch 2.11 groups query heads without being asked.
        self._must_name_gqa = "enable_gqa" in parameters

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
        raise KernelUnavailable(
            f"{torch.cuda.get_device_name(device)} is older than Ampere (compute capability 8.0)"
        )


def _import_from(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:  # OSError: built for another torch
        raise KernelUnavailable(f"{module}.{name} cannot be imported ({error})") from error


Load = Callable[[torch.device], FlashKernel]
# In the order in which they are tried: packages that users install, the newest FlashAttention first
# as in transformers; torch's kernel; a build that is downloaded from the Hub.
KERNELS: tuple[Load, ...] = (FlashAttn4, FlashAttn3, FlashAttn2, TorchVarlen, HubFlashAttn)
