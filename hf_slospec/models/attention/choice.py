"""Which flash-attention kernel works on a device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from hf_slospec.models.attention.kernel_trial import check_kernel
from hf_slospec.models.attention.kernels import FlashAttnPackage, FlashKernel, KernelUnavailable, TorchVarlen

logger = logging.getLogger(__name__)

KERNELS: tuple[Callable[[torch.device], FlashKernel], ...] = (FlashAttnPackage, TorchVarlen)  # the better one first


def kernel_on(device: torch.device) -> FlashKernel | str:
    """The first kernel that works on the device, or what is wrong with each."""
    return _first_that_works(device, KERNELS)


@functools.cache
def _first_that_works(
    device: torch.device, kernels: tuple[Callable[[torch.device], FlashKernel], ...]
) -> FlashKernel | str:
    reasons = dict[str, None]()
    for load in kernels:
        kernel = _working(load, device)
        if not isinstance(kernel, str):
            logger.debug("flash attention on %s is done by %s", device, kernel.name)
            return kernel
        logger.debug("no flash attention on %s: %s", device, kernel)
        reasons[kernel] = None
    return "; ".join(reasons)


def _working(load: Callable[[torch.device], FlashKernel], device: torch.device) -> FlashKernel | str:
    try:
        kernel = load(device)
        check_kernel(kernel, device)
    except KernelUnavailable as reason:
        return str(reason)
    return kernel
