"""Records of errors, which do not stop a check."""

from __future__ import annotations

import gc

from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.memory import is_out_of_memory
from hf_slospec.model.transfer import empty_cache


def outcome_of(error: Exception) -> dict[str, str]:
    """Return status and reason of an error.

    The status is ``out of memory``, ``refused`` (the config is not supported here, such as flash
    without a kernel) or ``failed``.
    """
    is_refused = isinstance(error, UnsupportedOptionError)
    status = "out of memory" if is_out_of_memory(error) else "refused" if is_refused else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {error}"}


def release_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    empty_cache()
