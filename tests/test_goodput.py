"""SmartSpec's and TurboSpec's goodput: formulas against Monte Carlo, and the choices they lead to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.algo.goodput import MovingAcceptance, best_length, chain_tokens, heads_nodes, heads_tokens
from hf_slospec.algo.latency import ForwardCost, LatencyCurve, StepCosts
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.request import Request
from hf_slospec.policies.smartspec import SmartSpecPolicy
from hf_slospec.policies.turbospec import RESET, TurboSpecPolicy

DRAWS = 200_000


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_tokens_of_a_chain_match_monte_carlo(acceptance: float, length: int) -> None:
    is_accepted = np.random.default_rng(0).random((DRAWS, length)) < acceptance
    drawn = 1.0 + np.cumprod(is_accepted, axis=1).sum(axis=1)
    assert chain_tokens(acceptance, length) == pytest.approx(drawn.mean(), abs=4.0 * drawn.std() / DRAWS**0.5 + 1e-12)


@pytest.mark.parametrize(("rates", "widths"), [((0.6, 0.6, 0.6), (3, 2, 2)), ((0.9, 0.2), (1, 4)), ((), ())])
def test_tokens_of_heads_match_monte_carlo(rates: tuple[float, ...], widths: tuple[int, ...]) -> None:
    rng, drawn = np.random.default_rng(0), np.ones(DRAWS)
    alive = np.ones(DRAWS, dtype=bool)
    for rate, width in zip(rates, widths, strict=True):
        alive &= (rng.random((DRAWS, width)) < rate).any(axis=1)
        drawn += alive
    assert heads_tokens(rates, widths) == pytest.approx(drawn.mean(), abs=4.0 * drawn.std() / DRAWS**0.5 + 1e-12)
    assert heads_nodes(widths) == 1 + sum(np.prod(widths[:end], dtype=int) for end in range(1, len(widths) + 1))


@given(
    acceptance=st.floats(0.0, 0.99), node_s=st.floats(0.0, 1.0), level_s=st.floats(0.0, 0.5), bias=st.floats(1.0, 1.3)
)
def test_the_best_length_is_the_best_and_falls_with_the_price(
    acceptance: float, node_s: float, level_s: float, bias: float
) -> None:
    def length_at(factor: float) -> int:
        def seconds(lengths: np.ndarray) -> np.ndarray:
            return 1.0 + factor * (node_s + level_s) * lengths

        best = best_length(lambda lengths: chain_tokens(acceptance, lengths), seconds, 8, bias)
        lengths = np.arange(9)
        goodput = chain_tokens(acceptance, lengths) / seconds(lengths) * np.where(lengths == 0, bias, 1.0)
        assert goodput[best] == goodput.max()
        return best

    found = [length_at(factor) for factor in (0.1, 1.0, 3.0)]
    assert found == sorted(found, reverse=True)


def test_the_moving_average_counts_what_was_tried() -> None:
    acceptance, rng = MovingAcceptance(), np.random.default_rng(0)
    rates = []
    for _ in range(3000):
        accepted = int(np.cumprod(rng.random(5) < 0.8).sum())
        acceptance.observe(min(accepted + 1, 5), accepted)
        rates.append(acceptance.rate)
    assert np.mean(rates[100:]) == pytest.approx(0.8, abs=0.02)
    before = acceptance.rate
    acceptance.observe(0, 0)
    assert acceptance.rate == before


def costs(token_s: float) -> StepCosts:
    return StepCosts(
        ForwardCost(LatencyCurve((1, 1000), (1.0, 1.0 + 999.0 * token_s))), ForwardCost(LatencyCurve((1,), (0.05,)))
    )


def requests_of(number: int) -> list[Request]:
    return [Request(index, [1, 2, 3], 100) for index in range(number)]


def test_speculation_shortens_with_the_batch_and_ends() -> None:
    policy = SmartSpecPolicy(SLOSpecConfig(max_depth=8), costs(0.02))
    depths = [policy.plan(requests_of(number), 0.0).depth for number in (1, 4, 16, 64, 256)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 4
    assert depths[-1] == 0


def test_requests_that_accept_more_draft_more() -> None:
    policy = SmartSpecPolicy(SLOSpecConfig(max_depth=8), costs(0.02), by_request=True)
    hot, cold = requests_of(2)
    for _ in range(60):
        policy.own.setdefault(hot, MovingAcceptance()).observe(4, 4)
        policy.own.setdefault(cold, MovingAcceptance()).observe(4, 1)
    policy.plan([hot, cold], 0.0)
    assert policy._lengths[0] > policy._lengths[1]


def test_a_batch_size_that_did_not_pay_is_left_alone_for_a_while() -> None:
    policy = TurboSpecPolicy(SLOSpecConfig(max_depth=8), costs(0.02))
    assert policy.plan(requests_of(256), 0.0).depth == 0
    assert policy.plan(requests_of(1), 0.0).depth > 0
    policy.costs = costs(0.0)  # now it would pay
    depths = [policy.plan(requests_of(256), 0.0).depth for _ in range(RESET + 1)]
    assert depths[: RESET - 1] == [0] * (RESET - 1)
    assert max(depths[RESET - 1 :]) > 0
