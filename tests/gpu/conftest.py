"""Fixtures of the tests that need a CUDA device."""

from __future__ import annotations

from tests.support.cuda_tests import captures, kernel  # noqa: F401  fixtures
