"""Windows of ten tokens of a request: which are late, which one is furthest behind, and what the
metrics say.
"""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.request.metrics import WINDOW
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.toys.engine import commit


def request_of(*stages, new=200):
    return Request(0, RequestParams([1], new, stages))


@pytest.mark.parametrize("seed", range(20))
def test_windows_are_kept_if_the_worst_one_is(seed):
    rng = np.random.default_rng(seed)
    request = request_of(Stage(0.5))
    now_s = 0.0
    for size in rng.integers(1, 14, 20).tolist():
        commit(request, [0] * min(size, request.num_left), now_s)
        now_s += float(rng.choice([0.5, 1.0, 4.0]))
        if request.is_finished:
            break
    metrics = request.metrics()
    assert metrics.windows_kept is (metrics.worst_tpot_s <= 0.5)


def test_outputs_of_fewer_than_ten_tokens_keep_their_windows():
    request = request_of(Stage(1.0))
    assert request.metrics().windows_kept is None  # it has not begun
    commit(request, [0], 0.0)
    commit(request, [0] * (WINDOW - 1), 1e6)
    assert (request.metrics().windows_kept, request.metrics().attained) == (True, False)
    commit(request, [0], 1e6 + 1.0)
    assert request.metrics().windows_kept is False
    assert request_of(Stage(None)).metrics().windows_kept is None


def test_windows_belong_to_their_stage():
    request = request_of(Stage(1.0, 15), Stage(5.0))
    for step in range(3):
        commit(request, [0] * 5, 5.0 * step)  # the first stage ends in time
    assert request.pace_s == 5.0
    commit(request, [0] * 9, 10.0 + 9 * 5.0)
    commit(request, [0], 10.0 + WINDOW * 5.0)
    assert request.metrics().windows_kept is True
    commit(request, [0] * 8, 60.0 + 9 * 5.0)
    # Too late since the tenth token of the stage.
    commit(request, [0] * 2, 60.0 + WINDOW * 5.0 + 1.0)
    assert request.metrics().windows_kept is False


def test_a_guarantee_is_about_the_window_that_is_furthest_behind():
    request = request_of(Stage(1.0))
    commit(request, [0], 0.0)
    commit(request, [0] * 6, 2.0)
    commit(request, [0], 5.0)
    assert request.paced(6.0) == (6.0, 7, 192)  # nothing was guaranteed, so the stage counts
    request.window_guarantee = 0.9
    # 3 s behind; since 0.0 one is ahead, since 5.0 1 s behind.
    assert request.tightest_window(6.0, 1.0) == (4.0, 1)
    assert request.paced(6.0) == (4.0, 1, WINDOW - 1)
    commit(request, [0] * 8, 9.0)  # ends the window since 0.0, in time
    assert request.tightest_window(9.0, 1.0) == (0.0, 0)
    assert request.has_open_guarantee
    commit(request, [0], 20.0)  # too late for the window since 5.0
    assert not request.has_open_guarantee
    assert request.paced(20.0) == (20.0, request.num_emitted - 1, request.num_left)


def test_another_engine_goes_on_with_what_was_missed():
    request = request_of(Stage(1.0))
    commit(request, [0], 0.0)
    commit(request, [0] * WINDOW, 99.0)
    resumed = Request(0, request.params, 100.0, request.progress(100.0))
    commit(resumed, [0], 101.0)
    assert resumed.metrics().windows_kept is False
