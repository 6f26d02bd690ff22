"""Strategies and settings of fuzz tests, which ``scripts/fuzz.py`` runs with random examples."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PROFILE = "fuzz"  # used by scripts/fuzz.py
HUGE = (2**31, 2**40, 2**63, 10**30)
ODD = (
    None, True, False, 0, 1, -1, -(2**63), *HUGE, 10**400, 0.0, 0.5, -1.5, 1e-300, 1e300, math.nan, math.inf, -math.inf,
    1j, "", "x", "0.1", "\0", "\ud800", b"x", (), [], [1], ["x"], [None], [[]], [[1.5]], {}, {"a": 1}, {1: 2}, object(),
    int, print, np.float32(0.5), np.int64(3), np.array([]), np.array([0.1, 0.2]), torch.tensor(3), torch.tensor([]),
    torch.tensor([0.1, 0.2]), torch.tensor(True), torch.zeros(2, 0, 3), torch.empty(2, 3, device="meta"),
)  # fmt: skip


def fuzzed(examples):
    """Return the settings of a test: these examples, always the same, or those of the profile of
    scripts/fuzz.py.
    """
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    if settings.get_current_profile_name() == PROFILE:
        return settings(deadline=None, suppress_health_check=checks)
    return settings(
        deadline=None,
        suppress_health_check=checks,
        max_examples=examples,
        derandomize=True,
        database=None,
    )


def odd():
    """Values of wrong types, and numbers at and beyond the limits."""
    return st.sampled_from(ODD)


def mostly(valid, of=5):
    """Values of the strategy, and one of so many of any kind."""
    return st.integers(1, of).flatmap(lambda number: odd() if number == of else valid)


def some_of(valid, most=4, least=0, odd_of=5):
    """Arguments, some of those that there are, with mostly valid values."""
    names = st.lists(st.sampled_from(sorted(valid)), min_size=least, max_size=most, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: mostly(valid[name], odd_of) for name in chosen})
    )
