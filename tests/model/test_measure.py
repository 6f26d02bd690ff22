"""Costs fitted to measured forwards, and the forwards that are measured."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.model.measure import (
    CURVE,
    HELD_OUT,
    NEEDED,
    REPEATS,
    SLOPES,
    Forwards,
    Measured,
    Size,
    measure,
)
from hf_slospec.model.packed_model import PackedModel
from tests.support.toys.tiny_models import tiny_model


def true_s(size):
    """A curve, and something for each further request and each key."""
    return 1.0 + 0.01 * size.num_tokens + 0.02 * (size.num_requests - 1) + 1e-4 * size.num_keys


def measured(*sizes):
    found = Measured()
    for size in sizes:
        found.add(size, true_s(size))
    return found


def test_the_fastest_time_counts():
    found = Measured()
    for seconds in (3.0, 2.0, 5.0):
        found.add(Size(4), seconds)
    assert found.seconds == {Size(4): 2.0}


def test_fit_finds_what_tokens_requests_and_keys_cost():
    found = measured(*CURVE, *SLOPES, *HELD_OUT)
    cost = found.fit()
    assert cost.per_request_s == pytest.approx(0.02)
    assert cost.per_key_s == pytest.approx(1e-4)
    for size in (Size(1), Size(100, 5, 77), Size(300, 2, 4000)):
        assert float(cost(size.num_tokens, size.num_requests, size.num_keys)) == pytest.approx(
            true_s(size)
        )
    assert found.errors(cost).keys() == set(HELD_OUT)
    assert np.abs(list(found.errors(cost).values())).max() < 1e-9


def test_a_pause_makes_no_forward_free():
    measured = Measured(dict.fromkeys((*CURVE[:4], *SLOPES), 0.001))
    measured.seconds |= {CURVE[2]: 0.05, SLOPES[1]: 0.1}  # 16 tokens, and 16 with more keys
    cost = measured.fit()
    assert min(cost.curve.seconds) >= 1e-4 and cost.curve.seconds[0] <= 1e-3


def test_errors_are_positive_where_too_much_is_predicted():
    found = measured(*CURVE, *SLOPES)
    found.add(HELD_OUT[0], true_s(HELD_OUT[0]) / 2)
    assert found.errors(found.fit()) == {HELD_OUT[0]: pytest.approx(1.0)}


def test_few_sizes_are_enough_for_a_curve():
    cost = measured(*CURVE[:3]).fit()
    assert (cost.per_request_s, cost.per_key_s) == (0.0, 0.0)
    assert float(cost(16)) == pytest.approx(true_s(Size(16)))


class FakeForwards:
    """Takes no time; its clock says what each forward would have taken."""

    def __init__(self):
        self.now_s = 0.0
        self.sizes = list[Size]()

    def __call__(self, size):
        self.sizes.append(size)
        self.now_s += true_s(size)
        return true_s(size)

    def clock(self):
        return self.now_s


def test_a_slow_model_is_known_at_fewer_sizes():
    assert list(measure(FakeForwards(), 0.0).seconds) == list(NEEDED)
    forwards = FakeForwards()
    some = measure(forwards, 8.0).seconds
    assert {*CURVE[:4], *SLOPES} <= set(some) < {*CURVE, *SLOPES}
    assert forwards.now_s < true_s(Size(1)) + 8.0 + true_s(CURVE[-1])


def test_forwards_that_would_end_after_the_limit_are_left_out(monkeypatch):
    monkeypatch.setattr(
        f"{__name__}.true_s", lambda size: 0.2 + 0.1 * size.num_tokens
    )  # as bf16 without bf16 kernels
    forwards = FakeForwards()
    cost = measure(forwards, 5.0).fit()
    sizes = forwards.sizes
    assert forwards.now_s < 0.3 + 5.0 + 0.1  # the warm-up, and rounding
    assert Size(16) in sizes and max(size.num_tokens for size in sizes) < 64
    assert float(cost(64)) == pytest.approx(0.2 + 0.1 * 64)  # the curve goes on as a line


def test_a_fast_model_is_known_at_all_sizes():
    forwards = FakeForwards()
    found = measure(forwards, 1000.0, held_out=True)
    assert found.seconds == {size: true_s(size) for size in (*CURVE, *SLOPES, *HELD_OUT)}
    assert len(forwards.sizes) == 1 + REPEATS * len(found.seconds)  # with the warm-up
    assert set(measure(FakeForwards(), 1000.0).seconds) == {*CURVE, *SLOPES}


def test_sizes_that_cost_too_much_are_left_out(monkeypatch):
    monkeypatch.setattr(f"{__name__}.true_s", lambda size: size.num_tokens / 16)
    found = measure(FakeForwards(), 1000.0).seconds
    assert (
        max(size.num_tokens for size in found) == 64
    )  # 64 tokens cost 64 times one: 128 are of no use


def test_forwards_of_a_real_model():
    forward_s = Forwards(PackedModel(tiny_model("llama")))
    assert forward_s(Size(7, 3, 20)) > 0.0
    assert forward_s(Size(2, 1, 30)) > 0.0


def test_measured_tokens_are_routed_to_different_experts():
    model = tiny_model("mixtral")
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    try:
        forwards = Forwards(PackedModel(model))
        chosen.clear()  # those of the probe
        forwards(Size(32))
    finally:
        for hook in hooks:
            hook.remove()
    config = model.config
    assert config.num_experts_per_tok < config.num_local_experts
    assert len(chosen) == len(model.model.layers)
    assert all(len(indices.unique()) == config.num_local_experts for indices in chosen)
