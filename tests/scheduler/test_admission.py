"""Admission: the programme against exhaustive search and simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.scheduler.admission import FAR_S, Candidate, admitted
from tests.support.breadth import EXHAUSTIVE
from tests.support.oracles.admission_search import (
    AMPLE,
    at,
    candidates_of,
    check,
    in_turn,
    is_feasible,
    toy_rate,
    value,
)
from tests.support.toys.trees import SEEDS

EXAMPLES = 400 if EXHAUSTIVE else 120


@given(candidates=candidates_of(1), running=st.integers(0, 4), kv_free=st.integers(0, 30))
@settings(deadline=None, max_examples=EXAMPLES // 2)
def test_equals_exhaustive_search(candidates, running, kv_free):
    check(candidates, toy_rate, (running,), kv_free)


@given(
    candidates=candidates_of(2, max_priority=2, forced_share=1, max_value=5),
    running=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    kv_free=st.integers(-1, 30),
)
@settings(deadline=None, max_examples=EXAMPLES)
def test_equals_exhaustive_search_with_tiers_priorities_values_and_forced_candidates(
    candidates, running, kv_free
):
    if kv_free < 0:  # memory is overdrawn: only those that need none may come
        assert admitted(candidates, toy_rate, running, kv_free) == admitted(
            candidates, toy_rate, running, 0
        )
    else:
        check(candidates, toy_rate, running, kv_free)


@given(
    candidates=candidates_of(2, max_priority=1, forced_share=1),
    seed=SEEDS,
    kv_free=st.integers(0, 40),
)
@settings(deadline=None, max_examples=EXAMPLES // 2)
def test_equals_exhaustive_search_for_any_rates(candidates, seed, kv_free):
    table = (
        np.random.default_rng(seed).integers(-1, 10, (9, 9)) * 4.0
    )  # need not fall with more requests
    check(candidates, lambda counts: float(table[counts]), (0, 1), kv_free)


@given(candidates=candidates_of(2), kv_free=st.integers(0, 30))
@settings(deadline=None)
def test_everybody_who_is_admitted_meets_the_deadline_in_simulation(candidates, kv_free):
    """Fluid, event by event: the earliest deadline is served at the rate that those past their
    deadlines leave.
    """
    chosen = admitted(candidates, toy_rate, (1, 0), kv_free)
    waiting = in_turn(chosen, candidates)
    ends = [(c.deadline_s, c.tier) for c in waiting]
    counts = [1, 0]
    now_s = 0.0
    for candidate in waiting:
        left = float(candidate.prompt_tokens)
        while left > 0.0:
            while ends and ends[0][0] <= now_s:
                counts[ends.pop(0)[1]] += 1
            rate = toy_rate(tuple(counts))
            assert rate > 0.0
            next_s = min(now_s + left / rate, ends[0][0] if ends else math.inf)
            left = left - rate * (next_s - now_s)
            now_s = next_s
            left = 0.0 if left < 1e-6 else left
        assert candidate.prompt_tokens == 0 or now_s <= candidate.deadline_s + 1e-6
    assert (
        toy_rate((1 + sum(c.tier == 0 for c in waiting), sum(c.tier == 1 for c in waiting))) >= 0.0
    )


@given(candidates=candidates_of(2, max_priority=1), kv_free=st.integers(0, 30))
@settings(deadline=None)
def test_admitted_ones_stay_feasible_when_forced(candidates, kv_free):
    chosen = admitted(candidates, toy_rate, (0, 0), kv_free)
    promised = [replace(c, is_forced=i in chosen) for i, c in enumerate(candidates)]
    left = kv_free - sum(candidates[i].kv_tokens for i in chosen)
    assert admitted(promised, toy_rate, (0, 0), left) == chosen


def test_a_prompt_that_fits_exactly_is_admitted():
    assert admitted([at(1.0, 32)], toy_rate, (0,), AMPLE) == [0]
    assert admitted([at(1.0, 32), at(2.0, 24), at(3.0, 16)], toy_rate, (0,), AMPLE) == [0, 1, 2]
    assert admitted([at(1.0, 32), at(2.0, 25)], toy_rate, (0,), AMPLE) == [0]
    # 0.7 - 0.6 and 0.3 are no binary fractions.
    tenths = [at(0.1, 10), at(0.3, 20), at(0.6, 30), at(0.7, 10)]
    assert admitted(tenths, lambda _: 100.0, (0,), AMPLE) == [0, 1, 2, 3]


def test_a_deadline_in_the_past_needs_an_empty_prompt():
    assert admitted([at(-1.0, 1), at(1.0, 32)], toy_rate, (0,), AMPLE) == [1]
    assert admitted([at(-1.0, 0), at(1.0, 24)], toy_rate, (0,), AMPLE) == [0, 1]
    assert admitted([at(-1.0, 0), at(1.0, 25)], toy_rate, (0,), AMPLE) == [
        0
    ]  # it decodes from now on, not from -1 s
    assert admitted([at(0.0, 0), at(0.0, 1)], toy_rate, (0,), AMPLE) == [0]


@pytest.mark.parametrize("never", [math.inf, 2 * FAR_S])
def test_prompts_without_deadline_come_last(never):
    assert admitted([at(never, 10**6), at(1.0, 32), at(never, 0)], toy_rate, (0,), AMPLE) == [
        0,
        1,
        2,
    ]
    assert admitted([at(never, 1)], toy_rate, (3,), AMPLE) == [0]
    assert admitted([at(never, 1), at(never, 1)], toy_rate, (3,), AMPLE) == [
        0
    ]  # two do not decode beside three


@given(candidates=candidates_of(2, max_priority=2), kv_free=st.integers(0, 30))
@settings(deadline=None, max_examples=EXAMPLES // 2)
def test_priorities_are_values_that_exceed_those_of_all_lower_classes(candidates, kv_free):
    base = len(candidates) + 1
    valued = [replace(c, priority=0, value=base ** (2 - c.priority)) for c in candidates]
    assert admitted(valued, toy_rate, (1, 0), kv_free) == admitted(
        candidates, toy_rate, (1, 0), kv_free
    )


def test_of_equal_candidates_the_earlier_and_then_the_lower_index_is_preferred():
    assert admitted([at(1.0, 16)] * 5, toy_rate, (0,), AMPLE) == [0, 1]
    assert admitted([at(1.25, 32), at(1.0, 32)], toy_rate, (0,), AMPLE) == [1]
    # Room left counts only where a later candidate could use it.
    assert admitted([at(1.0, 32, 7), at(1.0, 31, 1)], toy_rate, (0,), 7) == [0]
    assert admitted([at(1.0, 32, 7), at(1.0, 31, 1), at(1.0, 1, 1)], toy_rate, (0,), 7) == [1, 2]
    assert admitted([at(2.0, 0, 3, tier=1), at(1.0, 0, 3), at(3.0, 0, 3)], toy_rate, (0, 0), 6) == [
        0,
        1,
    ]


@pytest.mark.parametrize(("num_priorities", "num_sets"), [(1, 2), (2, 2)])
def test_many_candidates(num_priorities, num_sets):
    """A few times more than fit, scarce in time and in memory, no two alike."""
    rng = np.random.default_rng(0)

    def rate(counts):
        return (
            4000.0 - 100 * counts[0] - 50 * counts[1]
            if 2 * counts[0] + counts[1] <= 80
            else -math.inf
        )

    for _ in range(num_sets):
        tokens = np.rint(rng.lognormal(5.5, 0.8, 64)).astype(int).tolist()
        deadlines = (rng.uniform(0.2, 3.0, 64)).tolist()
        candidates = [
            Candidate(deadline, prompt, prompt + 128, i % 2, i // 2 % num_priorities)
            for i, (deadline, prompt) in enumerate(zip(deadlines, tokens, strict=True))
        ]
        kv_free = sum(c.kv_tokens for c in candidates) // 3
        chosen = admitted(candidates, rate, (4, 4), kv_free)
        assert is_feasible(chosen, candidates, rate, (4, 4), kv_free)
        greedy: list[int] = []  # smallest first
        for i in sorted(range(64), key=lambda i: (candidates[i].priority, tokens[i])):
            greedy += [i] if is_feasible([*greedy, i], candidates, rate, (4, 4), kv_free) else []
        assert value(greedy, candidates) <= value(chosen, candidates) < value(range(64), candidates)
