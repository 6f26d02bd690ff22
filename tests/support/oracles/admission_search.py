"""Admission by exhaustive search, on a toy server."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from hf_slospec.scheduler.admission import Candidate, admitted

FULL_RATE = 32.0  # tokens per second of the toy server without decoding requests
SHARES = (8.0, 4.0)  # tokens per second of it that a decoding request of each tier takes
AMPLE = 10**6  # memory for everybody


def toy_rate(counts):
    rate = FULL_RATE - sum(share * count for share, count in zip(SHARES, counts, strict=False))
    return rate if rate >= 0.0 else -math.inf


def at(deadline_s, prompt_tokens, kv_tokens=1, tier=0, **rest):
    return Candidate(deadline_s, prompt_tokens, kv_tokens, tier, **rest)


def forced(deadline_s, prompt_tokens, kv_tokens=1, tier=0):
    return Candidate(deadline_s, prompt_tokens, kv_tokens, tier, is_forced=True)


def in_turn(chosen, candidates):
    return [candidates[i] for i in sorted(chosen, key=lambda i: (candidates[i].deadline_s, i))]


def is_feasible(chosen, candidates, rate, running, kv_free):
    """By the definition, interval by interval between accepted deadlines."""
    accepted = in_turn(chosen, candidates)
    if sum(c.kv_tokens for c in accepted if not c.is_forced) > kv_free:
        return False
    counts = list(running)
    budget = 0.0
    now_s = 0.0
    for candidate in accepted:
        if rate(tuple(counts)) < 0.0:
            return False
        budget += (
            rate(tuple(counts)) * max(candidate.deadline_s - now_s, 0.0) - candidate.prompt_tokens
        )
        if budget < 0.0:
            return False
        now_s = max(candidate.deadline_s, now_s)
        counts[candidate.tier] += 1
    return rate(tuple(counts)) >= 0.0


def value(chosen, candidates):
    """Value of the accepted candidates by priority, the lowest first."""
    accepted = [candidates[i] for i in chosen]
    priorities = sorted({c.priority for c in candidates})
    return tuple(
        sum(c.value for c in accepted if c.priority == priority) for priority in priorities
    )


def feasible_sets(candidates, rate, running, kv_free):
    """All that contain the forced candidates."""
    must = [i for i, c in enumerate(candidates) if c.is_forced]
    others = [i for i, c in enumerate(candidates) if not c.is_forced]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(others, n) for n in range(len(others) + 1)
    )
    sets = [(*must, *subset) for subset in subsets]
    return [chosen for chosen in sets if is_feasible(chosen, candidates, rate, running, kv_free)]


def check(candidates, rate, running, kv_free):
    """Of :func:`admitted`, against exhaustive search."""
    chosen = admitted(candidates, rate, running, kv_free)
    assert chosen == sorted(set(chosen)) == admitted(candidates, rate, running, kv_free)
    possible = feasible_sets(candidates, rate, running, kv_free)
    if possible:
        assert is_feasible(chosen, candidates, rate, running, kv_free)
        assert {i for i, c in enumerate(candidates) if c.is_forced} <= set(chosen)
        assert value(chosen, candidates) == max(value(s, candidates) for s in possible)
    else:
        assert chosen == [i for i, c in enumerate(candidates) if c.is_forced]
    return chosen


def candidates_of(num_tiers, max_priority=0, forced_share=0, max_value=1):
    """Whole numbers of quarter seconds: with whole rates that divide by four, every budget is
    exact.
    """
    candidate = st.builds(
        lambda quarters, prompt, kv, tier, priority, value, roll: Candidate(
            quarters / 4, prompt, kv, tier, priority, value, roll < forced_share
        ),
        st.integers(-1, 16),
        st.integers(0, 40),
        st.integers(0, 8),
        st.integers(0, num_tiers - 1),
        st.integers(0, max_priority),
        st.integers(1, max_value),
        st.integers(0, 9),
    )
    return st.lists(candidate, max_size=7)
