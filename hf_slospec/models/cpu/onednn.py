"""Limit on the kernels that oneDNN, torch's matrix library on CPUs, keeps in memory."""

from __future__ import annotations

import os

KERNELS = 256  # half a megabyte each; enough for some 25 numbers of rows of a target and a draft
# Of oneDNN itself, and of the layer between it and torch; both keep 1,024 unless set, and hold on to each other's.
VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def limit_kernels() -> None:
    """Let oneDNN keep :data:`KERNELS` kernels, unless an environment variable says how many.

    Batches differ in their numbers of rows, and each number needs kernels of its own, so that memory would grow for
    hours. oneDNN reads the variables at its first operation in a process: after that this has no effect.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(KERNELS))
