"""Choice of the flash-attention kernel for a device, dtype and head size."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from hf_slospec.models.attention.flash_kernels import (
    FlashAttn2,
    FlashAttn3,
    FlashAttn4,
    FlashKernel,
    HubFlashAttn,
    KernelUnavailable,
    TorchVarlen,
)
from hf_slospec.models.attention.kernel_trial import check_kernel

logger = logging.getLogger(__name__)

Load = Callable[[torch.device], FlashKernel]
# Packages that were installed for it, the newest first as in transformers; what is there anyway; what is downloaded.
KERNELS: tuple[Load, ...] = (FlashAttn4, FlashAttn3, FlashAttn2, TorchVarlen, HubFlashAttn)


def kernel_on(
    device: torch.device, dtype: torch.dtype, head_dim: int, needs_softcap: bool = False
) -> FlashKernel | str:
    """Return the first kernel that works with heads of this size, or a message with the reason against each kernel."""
    return _first_working(device, dtype, head_dim, needs_softcap, KERNELS)


@functools.cache
def _first_working(
    device: torch.device, dtype: torch.dtype, head_dim: int, needs_softcap: bool, kernels: tuple[Load, ...]
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
