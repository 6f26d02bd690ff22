"""SLOs-Serve: lengths of speculation against all there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.scheduler.admission import best_lengths
from tests.support.toys.trees import affine, staircase

TARGETS = (0.25, 0.375, 0.5, 0.75, 1.5, 4.0, math.inf)


@given(
    curve=st.sampled_from([affine, staircase]),
    tiers=st.lists(
        st.tuples(
            st.sampled_from(TARGETS), st.integers(0, 5), st.sampled_from([0.0, 0.0, -0.125, -1.0])
        ),
        min_size=1,
        max_size=3,
    ),
    acceptance=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    max_len=st.integers(1, 4),
    draft_level_s=st.sampled_from([0.0, 0.0625, 0.125]),
)
@settings(deadline=None, max_examples=150)
def test_lengths_are_the_best_of_all(curve, tiers, acceptance, max_len, draft_level_s):
    tpot_slos_s, counts, slacks_s = zip(*tiers, strict=True)
    seconds = curve(np.arange(1, 41))

    def rate(lengths):
        """Of prompt tokens, with steps as long as these chains allow; -inf if some tier cannot keep
        its target.
        """
        limit = min(
            target * sum(acceptance**k for k in range(length)) + slack
            for target, count, slack, length in zip(
                tpot_slos_s, counts, slacks_s, lengths, strict=True
            )
            if count
        )
        rows = list(zip(tpot_slos_s, counts, lengths, strict=True))
        load = sum(count * length for _, count, length in rows)
        due = sum(
            count / target for target, count, length in rows if length == 1
        )  # Each takes part when it is due.
        every = sum(
            count * length for target, count, length in rows if length > 1 or target == math.inf
        )
        longest = max(length for count, length in zip(counts, lengths, strict=True) if count)
        steps = seconds + (longest - 1) * draft_level_s
        fitting = [n for n in range(max(load, 1), 41) if steps[n - 1] <= limit]
        return max(((n - every) / steps[n - 1] - due for n in fitting), default=-math.inf)

    found = best_lengths(
        curve, tpot_slos_s, counts, acceptance, max_len, 40, draft_level_s, slacks_s
    )
    if not any(counts):
        assert found is not None and found.lengths.tolist() == [0] * len(counts)
        return
    choices = [range(1, max_len + 1) if count else [0] for count in counts]
    best = max(map(rate, itertools.product(*choices)))
    if found is None:
        assert best == -math.inf
        return
    assert found.rate == pytest.approx(best)
    assert rate(tuple(found.lengths.tolist())) == pytest.approx(best)
    assert all(
        (length == 0) == (count == 0) for length, count in zip(found.lengths, counts, strict=True)
    )


def test_tight_tiers_speculate_longer():
    found = best_lengths(affine, [0.4, 1.0, math.inf], [1, 2, 3], 0.8, 6, 40)
    assert found is not None
    assert found.lengths[0] > found.lengths[1] >= found.lengths[2] == 1


def test_a_tier_that_fell_behind_speculates_longer():
    level, behind = (
        best_lengths(affine, [0.5, 1.0], [1, 1], 0.8, 6, 40, slacks_s=[0.0, slack])
        for slack in (0.0, -0.75)
    )
    assert level is not None and behind is not None
    assert behind.lengths[1] > level.lengths[1]
