"""Number of replicas: by missed SLOs and waiting requests, with a range in which nothing changes."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.replicas import autoscaling
from hf_slospec.replicas.autoscaling import GAUGES, LOW, UP, by_guarantees, wanted_replicas

SHARES = st.floats(0.0, 1.0)


@given(st.integers(1, 100), SHARES, SHARES, st.floats(0.0, 3.0))
def test_replicas_follow_missed_slos_and_waiting_requests(
    current: int, missed: float, waiting: float, utilisation: float
) -> None:
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


def context(
    current: int,
    least: int = 1,
    most: int = 8,
    queued: float = 0.0,
    starting: int = 0,
    **gauges: float,
) -> Any:
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
def test_serves_policy_reads_the_replicas_gauges(state: Any, wanted: int) -> None:
    assert by_guarantees(state) == (wanted, {})


def test_module_runs_without_this_package() -> None:
    """Serve's controller gets the module by value."""
    tree = ast.parse(inspect.getsource(autoscaling))
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any("hf_slospec" in str(name) for name in names)


class Fluid:
    """A load and replicas of a fixed speed; what cannot be served in time is missed."""

    def __init__(self, capacity: float = 1.0, start_s: int = 40):
        self.capacity = capacity
        self.start_s = start_s
        self.replicas = 1
        self.starting = list[int]()
        self.sizes = list[int]()
        self.num_missed = 0.0
        self.num_total = 0.0

    def run(self, rates: list[float], up_delay: int = 10, down_delay: int = 120) -> None:
        """Serve so many requests per second, second by second, with Serve's delays."""
        above = below = 0
        for rate in rates:
            self.starting = [left - 1 for left in self.starting]
            self.replicas += self.starting.count(0)
            self.starting = [left for left in self.starting if left > 0]
            room = self.replicas * self.capacity
            missed = max(rate - room, 0.0) / rate if rate else 0.0
            self.num_missed = self.num_missed + missed * rate
            self.num_total = self.num_total + rate
            now = self.replicas + len(self.starting)
            gauges = dict(zip(GAUGES, (missed, 0.0, min(rate / room, 1.0)), strict=True))
            wanted = by_guarantees(context(now, most=16, starting=len(self.starting), **gauges))[0]
            above = above + 1 if wanted > now else 0
            below = below + 1 if wanted < now else 0
            if above > up_delay:
                self.starting += [self.start_s] * (wanted - now)
                above = 0
            elif below > down_delay and not self.starting:
                self.replicas = wanted
                below = 0
            self.sizes.append(self.replicas)


def test_load_that_rises_and_falls_is_followed_without_swinging() -> None:
    fluid = Fluid()
    fluid.run([0.5] * 300)
    assert set(fluid.sizes) == {1}
    fluid.run([5.0] * 1200)
    assert 5 <= fluid.replicas <= 8 and fluid.num_missed < 0.2 * fluid.num_total
    settled = fluid.sizes[-600:]
    assert len(set(settled)) <= 2, "the number swings under a constant load"
    fluid.run([0.5] * 2400)
    assert fluid.replicas <= 2
    changes = sum(a != b for a, b in zip(fluid.sizes, fluid.sizes[1:], strict=False))
    assert changes <= 20
