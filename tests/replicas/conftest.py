"""Ray's own warnings are no errors of ours: its modules are imported here, before the tests import them."""

from __future__ import annotations

import os
import warnings

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hf_slospec.replicas.start  # noqa: F401
