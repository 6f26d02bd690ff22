"""Stages of requests: when they end, and when they are attained."""

from __future__ import annotations

import pytest

from hf_slospec.engine.request import Request, RequestParams, Stage
from tests.support.toys.engine import commit


@pytest.mark.parametrize(
    ("times", "attained"),
    [
        ([0.0, 0.5, 1.0, 3.0, 5.0], True),
        ([0.0, 0.5, 1.1, 2.0, 3.0], False),  # the first stage is late, the last one in time
        ([0.0, 0.5, 1.0, 3.0, 5.1], False),
        ([0.0, 0.9, 1.0, 4.5, 5.0], True),  # targets hold for averages
    ],
)
@pytest.mark.parametrize("stage", [Stage(0.5, 3), Stage(0.5, is_over=lambda tokens: tokens[-1] == 9)])
def test_every_stage_has_to_be_attained(stage: Stage, times: list[float], attained: bool) -> None:
    request = Request(0, RequestParams([9, 9], 20, (stage, Stage(2.0))))
    targets = [request.tpot_slo_s]
    for token, now_s in zip((5, 7, 9, 9, 8), times, strict=True):
        commit(request, [token], now_s)
        targets.append(request.tpot_slo_s)
    assert targets == [0.5, 0.5, 0.5, 2.0, 2.0, 2.0]
    assert request.metrics().attained is attained
    assert request.metrics().tpot_slo_s == 2.0
    assert request.metrics().slack_s == pytest.approx(2 * 2.0 - (times[-1] - times[2]))
    assert request.decoded(10.0) == pytest.approx((10.0 - times[2], 2))


def test_a_stage_that_ends_within_a_step_ends_with_the_step() -> None:
    request = Request(0, RequestParams([0], 20, (Stage(1.0, 3), Stage(None, 2), Stage(1.0))))
    commit(request, [1], 0.0)
    commit(request, [1, 1, 1, 1], 4.0)  # two of these make the stage's three; all four count for it
    assert request.tpot_slo_s is None
    assert request.decoded(5.0) == (1.0, 0)
    commit(request, [1], 6.0)
    assert request.tpot_slo_s is None  # its second token is still to come
    commit(request, [1, 1], 99.0)  # no promise, nothing to be late with
    assert request.tpot_slo_s == 1.0
    commit(request, [1], 100.0)
    assert request.metrics().attained is True


def test_stages_without_targets_attain_nothing() -> None:
    request = Request(0, RequestParams([0], 20, (Stage(None, 1), Stage(None))))
    commit(request, [1], 0.0)
    commit(request, [1], 1.0)
    assert request.metrics().attained is None
    assert request.metrics().slack_s is None
