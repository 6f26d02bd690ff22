"""Noise by position and row, against torch.multinomial."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.model import noise as noise_module
from hf_slospec.model.noise import GeneratorNoise, TorchOperators
from tests.support.breadth import quick_or

BATCH = 3
VOCAB = 11
SEED = 5
PROBS = torch.softmax(torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0)), -1)


def at(noise, position, row):
    return noise.rows([(position, row)])[0]


def foreseen(noise, position, row):
    return noise.rows([(position, row)], is_drawn=False)[0]


def stock_tokens(positions):
    torch.manual_seed(SEED)
    return [torch.multinomial(PROBS, 1)[:, 0].tolist() for _ in range(positions)]


def tokens_at(noise, position):
    return [int((PROBS[row] / at(noise, position, row)).argmax()) for row in range(BATCH)]


def new_noise(seed=None):
    torch.manual_seed(SEED)
    return GeneratorNoise(BATCH, PROBS, seed)


@pytest.mark.parametrize("seed", [None, SEED])
def test_noise_is_that_of_multinomial(seed):
    expected = stock_tokens(6)
    state = torch.get_rng_state()
    noise = new_noise(seed)
    assert [tokens_at(noise, position) for position in range(6)] == expected
    if seed is None:
        assert torch.equal(torch.get_rng_state(), state)


@settings(deadline=None, max_examples=quick_or(20, 60))
@given(
    asked=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, BATCH - 1)), max_size=40
    ),
    kept=st.integers(1, 12),
    has_seed=st.booleans(),
)
def test_noise_in_any_order_foreseen_or_not(asked, kept, has_seed):
    reference = new_noise(SEED)
    expected = [[at(reference, position, row) for row in range(BATCH)] for position in range(10)]
    noise = new_noise(SEED if has_seed else None)
    noise.max_positions = kept
    for is_foreseen, position, row in asked:
        before = torch.get_rng_state()
        drawn = noise.num_drawn
        got = foreseen(noise, position, row) if is_foreseen else at(noise, position, row)
        assert torch.equal(got, expected[position][row])
        assert noise.num_drawn == (drawn if is_foreseen else max(drawn, position + 1))
        if is_foreseen or has_seed:
            assert torch.equal(torch.get_rng_state(), before)
        assert len(noise._cached) <= kept


def test_what_others_draw_in_between_is_respected():
    torch.manual_seed(SEED)
    expected = [torch.multinomial(PROBS, 1)[:, 0].tolist()]
    torch.rand(3)
    expected.append(torch.multinomial(PROBS, 1)[:, 0].tolist())
    state = torch.get_rng_state()
    noise = new_noise()
    foreseen(noise, 4, 0)
    own = [tokens_at(noise, 0)]
    torch.rand(3)
    own.append(tokens_at(noise, 1))
    assert own == expected and torch.equal(torch.get_rng_state(), state)
    seen = foreseen(noise, 2, 1)  # anew, after what was foreseen before proved wrong
    assert torch.equal(seen, at(noise, 2, 1))


def test_generator_ends_where_stock_leaves_it():
    stock_tokens(4)
    state = torch.get_rng_state()
    noise = new_noise()
    at(noise, 7, 0)
    foreseen(noise, 9, 1)
    noise.end(4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kept", [1, 3, 100])
def test_a_ragged_batch_draws_every_position_once(monkeypatch, kept):
    places = [(position, row) for row in range(BATCH) for position in range(3 * row, 3 * row + 4)]
    expected = [at(new_noise(SEED), *place) for place in places]
    noise = new_noise(SEED)
    draws = list[int]()
    noise.max_positions = kept
    at(noise, 12, 0)
    noise._cached.clear()

    class Counting(TorchOperators):
        def exponential_(self, noise, generator):
            draws.append(1)
            super().exponential_(noise, generator)

    monkeypatch.setattr(noise_module, "_on_cpus", Counting())
    found = noise.rows(places)
    assert len(draws) == len({position for position, _ in places})
    assert all(map(torch.equal, found, expected))


def test_passed_positions_are_dropped():
    noise = new_noise(SEED)
    at(noise, 5, 0)
    noise.forget_before(4)
    assert sorted(noise._cached) == [4, 5] and min(noise._states) == 4
    assert torch.equal(foreseen(noise, 6, 1), at(new_noise(SEED), 6, 1))


def test_noise_at_hand_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("hf_slospec.model.noise.MAX_NOISE_BYTES", 6 * 2**20 + 5)
    noise = GeneratorNoise(64, torch.empty(1, 4096), SEED, sharing=2)  # 1 MiB per position
    foreseen(noise, 9, 0)
    assert sum(kept.numel() * kept.element_size() for kept in noise._cached.values()) == 3 * 2**20
    assert GeneratorNoise(64, torch.empty(1, 4096), SEED, sharing=100).max_positions == 1
