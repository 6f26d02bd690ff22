"""Number of replicas: by missed SLOs and waiting requests, with a range in which nothing changes."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.replicas import autoscaling
from hf_slospec.replicas.autoscaling import LOW, UP, by_guarantees, wanted_replicas

SHARES = st.floats(0.0, 1.0)


@given(st.integers(1, 100), SHARES, SHARES, st.floats(0.0, 3.0))
def test_replicas_follow_missed_slos_and_waiting_requests(current, missed, waiting, utilisation):
    wanted = wanted_replicas(current, missed, waiting, utilisation)
    if missed > UP or waiting > UP:
        assert current < wanted <= 2 * current
    elif wanted < current:
        assert wanted == current - 1 and missed == waiting == 0.0
        assert utilisation * current / wanted < LOW  # the others can take over
    else:
        assert wanted == current
    for more in (missed, 1.0):
        assert wanted_replicas(current, more, waiting, utilisation) >= wanted


def context(current, least=1, most=8, queued=0.0, starting=0, **gauges):
    metrics = {
        name: {f"r{index}": value for index in range(current)} for name, value in gauges.items()
    }
    return SimpleNamespace(
        target_num_replicas=current, running_replicas=["r"] * (current - starting), aggregated_metrics=metrics,
        total_queued_requests=queued,
        capacity_adjusted_min_replicas=least, capacity_adjusted_max_replicas=most,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (context(2, missed=0.3, waiting=0.0, utilisation=1.0), 3),
        (context(2, missed=0.0, waiting=2.0, utilisation=1.0), 4),
        (context(8, missed=1.0, waiting=1.0, utilisation=1.0), 8),  # the most that are allowed
        (context(3, missed=0.0, waiting=0.0, utilisation=0.2), 2),
        (context(2, least=2, missed=0.0, waiting=0.0, utilisation=0.0), 2),
        (context(3, missed=0.0, waiting=0.0, utilisation=0.5), 3),
        (context(1, missed=0.0, waiting=0.0, utilisation=0.0), 1),
        (context(4, starting=1, missed=1.0, waiting=1.0, utilisation=1.0), 4),
        (context(2, queued=50.0), 2),  # nothing has been reported yet
    ],
)
def test_serves_policy_reads_the_replicas_gauges(state, wanted):
    assert by_guarantees(state) == (wanted, {})


def test_module_runs_without_this_package():
    """Serve's controller gets the module by value."""
    tree = ast.parse(inspect.getsource(autoscaling))
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any("hf_slospec" in str(name) for name in names)
