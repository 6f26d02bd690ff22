"""SmartSpec's and TurboSpec's goodput: formulas against Monte Carlo, and the choices they lead to."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.lab.policies.goodput import (
    MovingAcceptance,
    best_batch,
    chain_tokens,
    confident_length,
    heads_nodes,
    heads_shapes,
    heads_tokens,
)
from hf_slospec.lab.policies.sequoia import StaticTree
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.trees import SEEDS, grow

DRAWS = 200_000


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_tokens_of_a_chain_match_monte_carlo(acceptance, length):
    is_accepted = np.random.default_rng(0).random((DRAWS, length)) < acceptance
    drawn = 1.0 + np.cumprod(is_accepted, axis=1).sum(axis=1)
    assert chain_tokens(acceptance, length) == pytest.approx(
        drawn.mean(), abs=4.0 * drawn.std() / DRAWS**0.5 + 1e-12
    )


@pytest.mark.parametrize(
    ("rates", "widths"), [((0.6, 0.6, 0.6), (3, 2, 2)), ((0.9, 0.2), (1, 4)), ((), ())]
)
def test_tokens_of_heads_match_monte_carlo(rates, widths):
    rng = np.random.default_rng(0)
    drawn = np.ones(DRAWS)
    alive = np.ones(DRAWS, dtype=bool)
    for rate, width in zip(rates, widths, strict=True):
        alive &= (rng.random((DRAWS, width)) < rate).any(axis=1)
        drawn += alive
    assert heads_tokens(rates, widths) == pytest.approx(
        drawn.mean(), abs=4.0 * drawn.std() / DRAWS**0.5 + 1e-12
    )
    assert heads_nodes(widths) == 1 + sum(
        np.prod(widths[:end], dtype=int) for end in range(1, len(widths) + 1)
    )


def best_length(tokens, seconds, max_length, bias):
    """Of one batch that has slots."""
    lengths = np.arange(max_length + 1)
    has_slots = np.ones((1, max_length + 1), dtype=bool)
    return best_batch(tokens(lengths)[None], seconds(lengths)[None], has_slots, bias)[1]


@given(
    seed=SEEDS,
    num_requests=st.integers(1, 5),
    max_length=st.integers(0, 4),
    bias=st.sampled_from([1.0, 1.1, 2.0]),
)
def test_the_best_batch_equals_the_printed_loops(seed, num_requests, max_length, bias):
    """Algorithm 2, lines 3 to 11, with ties and slots; length 0 always has slots."""
    rng = np.random.default_rng(seed)
    shape = (num_requests, max_length + 1)
    tokens = rng.integers(1, 6, shape) / 2
    seconds = rng.integers(1, 4, shape) / 4
    has_slots = rng.random(shape) < 0.6
    has_slots[:, 0] = True
    best_goodput = -1.0
    best = (-1, -1)
    for row in range(num_requests):
        for length in range(max_length + 1):
            if not has_slots[row, length]:
                continue
            goodput = tokens[row, length] / seconds[row, length] * (1.0 if length else bias)
            if goodput > best_goodput:
                best_goodput = goodput
                best = (row, length)
    assert best_batch(tokens, seconds, has_slots, bias) == best


def test_the_moving_average_counts_what_was_tried():
    acceptance = MovingAcceptance()
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(3000):
        accepted = int(np.cumprod(rng.random(5) < 0.8).sum())
        acceptance.observe(min(accepted + 1, 5), accepted)
        rates.append(acceptance.rate)
    assert np.mean(rates[100:]) == pytest.approx(0.8, abs=0.02)
    before = acceptance.rate
    acceptance.observe(0, 0)
    assert acceptance.rate == before


@given(
    acceptance=st.floats(0.0, 0.99),
    higher=st.floats(0.0, 0.99),
    context_s=st.floats(0.0, 0.1),
    node_s=st.floats(0.0, 0.1),
    level_s=st.floats(0.0, 0.2),
)
def test_the_best_length_falls_with_requests_and_rises_with_acceptance(
    acceptance, higher, context_s, node_s, level_s
):
    """Property 8. The step time is the paper's: affine in context and in nodes (equation 7)."""

    def length_of(num_requests, rate):
        def seconds(lengths):
            return 1.0 + num_requests * (context_s + node_s * (lengths + 1)) + level_s * lengths

        return best_length(
            lambda lengths: num_requests * chain_tokens(rate, lengths), seconds, 8, 1.0
        )

    low, high = sorted((acceptance, higher))
    by_rate = [length_of(4, rate) for rate in (low, high)]
    assert by_rate == sorted(by_rate)
    if high < 0.1:  # the tokens of long chains are lost in rounding
        return
    # Levels are shared by the requests, so it is where they cost nothing that more requests can
    # only shorten.
    level_s = 0.0
    by_requests = [length_of(num_requests, high) for num_requests in (1, 3, 10, 100)]
    assert by_requests == sorted(by_requests, reverse=True)


def test_plain_decoding_wins_where_nodes_cost_most():
    """Property 8, its limit: with n requests the fixed cost of a step counts for nothing, and a < 1
    of a node's.
    """
    for rate in (0.0, 0.5, 0.9, 0.99):
        assert (
            best_length(
                lambda k, a=rate: chain_tokens(a, k), lambda k: 1e-4 + 1.0 * (k + 1), 8, 1.0
            )
            == 0
        )


@pytest.mark.parametrize(("max_depth", "max_width"), [(0, 3), (1, 3), (3, 1), (3, 4), (2, 8)])
def test_shapes_of_heads_are_all_there_are(max_depth, max_width):
    shapes = heads_shapes(max_depth, max_width)
    expected = {
        (*widths, *[0] * (max_depth - depth))
        for depth in range(max_depth + 1)
        for widths in itertools.product(range(1, max_width + 1), repeat=depth)
        if math.prod(widths) <= max_width
    }
    assert {tuple(row) for row in shapes.tolist()} == expected
    assert len(shapes) == len(expected)
    assert not shapes[0].any()
    rates = np.linspace(0.9, 0.3, max_depth)
    for row in shapes.tolist():
        widths = [width for width in row if width]
        assert heads_tokens(rates, row) == pytest.approx(heads_tokens(rates[: len(widths)], widths))
        assert heads_nodes(row) == heads_nodes(widths) == StaticTree.of_expansion(widths).num_nodes


def test_confidence_ends_a_chain_behind_its_first_unsure_token():
    tree = grow([0, 1, 2, 3], [0.9, 0.6, 0.5, 0.9], [1, 2, 3, 4])
    assert [confident_length(tree, t) for t in (0.0, 0.5, 0.55, 0.6, 0.95)] == [4, 3, 3, 2, 1]
    assert confident_length(TokenTree.root_only(1), 0.5) == 0
