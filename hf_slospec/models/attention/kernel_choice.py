"""Which flash-attention kernel works for a layer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from hf_slospec.models.attention.kernel_trial import check_kernel
from hf_slospec.models.attention.kernels import FlashAttnPackage, FlashKernel, KernelUnavailable, TorchVarlen

logger = logging.getLogger(__name__)

KERNELS: tuple[Callable[[torch.device], FlashKernel], ...] = (FlashAttnPackage, TorchVarlen)  # the better one first


def kernel_on(device: torch.device, dtype: torch.dtype, head_dim: int) -> FlashKernel | str:
    """The first kernel that works there with heads like these, or what is wrong with each."""
    return _first_that_works(device, dtype, head_dim, KERNELS)


@functools.cache
def _first_that_works(
    device: torch.device, dtype: torch.dtype, head_dim: int, kernels: tuple[Callable[[torch.device], FlashKernel], ...]
) -> FlashKernel | str:
    what = f"{device} in {dtype} with heads of size {head_dim}"
    reasons = dict[str, None]()
    for load in kernels:
        kernel = _working(load, device, dtype, head_dim)
        if not isinstance(kernel, str):
            logger.debug("flash attention on %s is done by %s", what, kernel.name)
            return kernel
        logger.debug("no flash attention on %s: %s", what, kernel)
        reasons[kernel] = None
    return "; ".join(reasons)


def _working(
    load: Callable[[torch.device], FlashKernel], device: torch.device, dtype: torch.dtype, head_dim: int
) -> FlashKernel | str:
    try:
        kernel = load(device)
        if dtype not in kernel.dtypes:
            return f"{kernel.name} does not compute in {dtype}"
        check_kernel(kernel, device, dtype, head_dim)
    except KernelUnavailable as reason:
        return str(reason)
    return kernel
