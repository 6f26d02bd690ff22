"""Flash-attention kernels that return the log-sum-exp, behind one signature."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_slospec.cuda.flash import Entries
from hf_slospec.model.batch import AttentionRules
from hf_slospec.model.transfer import to_device

HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)  # compute capability
LSE_OPTIONS = (
    "return_attn_probs",
    "return_softmax",
    "return_lse",
)  # by which versions are asked for the log-sum-exp


class KernelUnavailable(Exception):  # noqa: N818  not an error: the next kernel is tried
    """Reason why a kernel cannot be used on a device."""


class FlashKernel(Protocol):
    """Attention of packed queries over ranges of packed keys; out and lse of an entry without keys
    are undefined.
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
        # The last query of an entry sees its last key, each query before it one key fewer
        is_causal: bool,
        rules: AttentionRules,  # the window counts only if causal
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [num_queries, num_heads, head_dim] and lse [num_heads, num_queries] f32, the
        natural logarithm.
        """


class FlashAttn2:
    """``flash_attn_varlen_func`` of the ``flash-attn`` package, which later versions have with
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
        self._must_name_gqa = (
            "enable_gqa" in parameters
        )  # torch 2.11 groups query heads without being asked

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
    except (
        ImportError,
        OSError,
        AttributeError,
    ) as error:  # OSError: built for another torch or CUDA
        raise KernelUnavailable(f"{module}.{name} cannot be imported ({error})") from error


logger = logging.getLogger(__name__)

Load = Callable[[torch.device], FlashKernel]
# Packages that were installed for it, the newest first as in transformers; what is there anyway;
# what is downloaded.
KERNELS: tuple[Load, ...] = (FlashAttn4, FlashAttn3, FlashAttn2, TorchVarlen, HubFlashAttn)


def kernel_on(
    device: torch.device, dtype: torch.dtype, head_dim: int, needs_softcap: bool = False
) -> FlashKernel | str:
    """Return the first kernel that works with heads of this size, or a message with the reason
    against each kernel.
    """
    return _first_working(device, dtype, head_dim, needs_softcap, KERNELS)


@functools.cache
def _first_working(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    needs_softcap: bool,
    kernels: tuple[Load, ...],
) -> FlashKernel | str:
    where = f"{device} in {dtype} with heads of size {head_dim}"
    reasons = dict[str, None]()
    for load in kernels:
        kernel = _try_kernel(load, device, dtype, head_dim, needs_softcap)
        if not isinstance(kernel, str):
            logger.debug("flash attention on %s is done by %s", where, kernel.name)
            return kernel
        logger.debug("no flash attention on %s: %s", where, kernel)
        reasons[kernel] = None
    return "; ".join(reasons)


def _try_kernel(
    load: Load, device: torch.device, dtype: torch.dtype, head_dim: int, needs_softcap: bool
) -> FlashKernel | str:
    try:
        kernel = load(device)
        if dtype not in kernel.dtypes:
            return f"{kernel.name} does not compute in {dtype}"
        if needs_softcap and not kernel.has_softcap:
            return f"{kernel.name} has no softcap"
        check_kernel(kernel, device, dtype, head_dim)
    except KernelUnavailable as reason:
        return str(reason)
    return kernel


def check_kernel(
    kernel: FlashKernel, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Raise KernelUnavailable unless the kernel matches reference attention on calls laid out as
    packed batches are.

    Versions of a kernel differ in the log-sum-exp they return and in the alignment of the causal
    mask."""
    scaling = head_dim**-0.5
    softcaps = (None, 5.0) if kernel.has_softcap else (None,)
    cases = [
        (is_causal, AttentionRules(scaling, window, softcap))
        for is_causal, window in ((False, None), (True, None), (True, 3))
        for softcap in softcaps
    ]
    try:
        errors = [_error(kernel, device, dtype, head_dim, *case) for case in cases]
    except Exception as error:  # compilers of kernels raise classes of their own
        raise KernelUnavailable(f"{kernel.name} failed in a trial with {error!r}") from error
    if not max(errors) <= TRIAL_TOLERANCE:  # also refuses NaN
        raise KernelUnavailable(f"{kernel.name} was off by {max(errors):.2g} in a trial")


TRIAL_TOLERANCE = (
    0.05  # absolute: values and log-sum-exps are of order one, and the kernels round to 8 bits
)
# Tokens and the slots they see; the slots before and between these ranges are unused.
TRIAL_RANGES = [
    (range(0, 3), slice(2, 9)),
    (range(3, 5), slice(9, 9)),
    (range(5, 6), slice(12, 20)),
]
TRIAL_CHAINS = [(range(0, 3), slice(2, 9)), (range(3, 8), slice(12, 17))]


def _error(
    kernel: FlashKernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_causal: bool,
    rules: AttentionRules,
) -> float:
    ranges = TRIAL_CHAINS if is_causal else TRIAL_RANGES
    num_heads = (
        4 if is_causal else 2
    )  # query heads are folded where the mask does not depend on the query
    entries = to_device(Entries.of(ranges), device)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, heads, head_dim, generator=draw, device="cpu").to(device, dtype)
        for length, heads in ((len(entries.token_indices), num_heads), (24, 2), (24, 2))
    )
    window = rules.window
    out, lse = kernel(query, key, value, entries, is_causal, rules)
    if lse.shape != (num_heads, len(query)) or lse.dtype != torch.float32:
        raise KernelUnavailable(
            f"{kernel.name} returns a log-sum-exp of shape {list(lse.shape)}, {lse.dtype}"
        )
    worst = 0.0
    for tokens, slots in ranges:
        if slots.start < slots.stop:
            queries = slice(tokens.start, tokens.stop)
            mask = torch.ones(
                len(tokens), slots.stop - slots.start, dtype=torch.bool, device=device
            )
            if is_causal:
                mask = mask.tril(mask.shape[1] - len(tokens))
                mask = (
                    mask if window is None else mask.triu(mask.shape[1] - len(tokens) - window + 1)
                )
            expected, expected_lse = attention_with_lse(
                query[queries][None], key[slots][None], value[slots][None], mask[None], rules
            )
            errors = (
                (out[queries].float() - expected[0]).flatten(),
                (lse[:, queries].T - expected_lse[0]).flatten(),
            )
            worst = max(worst, float(torch.cat(errors).abs().nan_to_num(nan=torch.inf).max()))
    return worst


def attention_with_lse(
    query: torch.Tensor,  # [batch, num_queries, num_heads, head_dim]
    key: torch.Tensor,  # [batch, num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,  # [batch, num_keys, num_kv_heads, value_dim]
    mask: torch.Tensor,  # [batch, num_queries, num_keys] bool, True = may attend
    rules: AttentionRules,  # the window is part of the mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return reference attention in fp32 and its log-sum-exp.

    Returns:
        out [batch, num_queries, num_heads, value_dim] f32 and lse [batch, num_queries, num_heads]
        f32; 0 and -inf for a query that may attend to no key.
    """
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = key.shape[2]
    # Query heads that share a KV head are folded into its queries.
    grouped = query.float().unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # [batch, num_kv_heads, groups * num_queries, num_keys]
    scores = rules.capped(grouped @ key.float().permute(0, 2, 3, 1) * rules.scaling)
    groups = num_heads // num_kv_heads
    scores = scores.masked_fill(~mask.repeat(1, groups, 1)[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (
        scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]
    ).exp()  # 0, not NaN, where all is masked
    out = weights @ value.float().transpose(1, 2)
    out = out.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2).flatten(2, 3)
