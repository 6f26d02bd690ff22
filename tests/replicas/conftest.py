"""Ray's own warnings are no errors of ours: its modules are imported here, before the tests import
them.
"""

from __future__ import annotations

import os
import warnings

import pytest

from hf_slospec import load_tiny_pair

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
os.environ.update(
    {"RAY_worker_niceness": "0"}
)  # 15, Ray's default, lets the tests beside them take all cores

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hf_slospec.replicas.start  # noqa: F401


@pytest.fixture(scope="module")
def pair():
    return load_tiny_pair()
