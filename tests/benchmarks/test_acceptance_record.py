"""Sums and scores of recorded acceptance, on one tree and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.acceptance_record import AcceptanceRecord, reliability
from hf_slospec.engine.acceptance import Acceptance, Drawing
from hf_slospec.tree.tree import Forest
from tests.support.toys.trees import grow


class Text:
    drawing = Drawing.SAMPLED


def test_sums_by_depth_and_rank():
    tree = grow([0, 0, 0, 1, 1, 4], [0.5, 0.3, 0.1, 0.6, 0.2, 0.9], [1, 2, 3, 1, 2, 1])
    forest = Forest.of([tree])
    acceptance = Acceptance()
    record = AcceptanceRecord(acceptance)
    prediction = acceptance.predict([Text()], forest)
    every = np.ones(len(forest.depths), dtype=np.bool_)
    acceptance.observe([Text()], prediction, every, np.array([1, 4, 6]))
    assert acceptance.overall != 0.0  # it has learned
    figures = record.figures(max_depth=2, max_rank=2)
    by_depth = [(0, []), (1, [1, 2, 3]), (2, [4, 5, 6])]  # depth 3 counts as depth 2
    by_rank = [(0, [1, 4, 6]), (1, [2, 3, 5])]
    for sums, places in ((figures["by_depth"], by_depth), (figures["by_rank"], by_rank)):
        for place, nodes in places:
            predicted = round(sum(prediction.calibrated[nodes]), 2)
            found = [row[place] for row in sums]
            assert found == [predicted, len({1, 4, 6} & set(nodes)), len(nodes)]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
@settings(deadline=None)
def test_scores(outcomes):
    found = reliability(np.array([p for p, _ in outcomes]), np.array([hit for _, hit in outcomes]))
    bins: dict[int, list[float]] = {}
    for predicted, hit in outcomes:
        bins.setdefault(min(int(predicted * 10), 9), []).append(predicted - hit)
    squares = [(predicted - hit) ** 2 for predicted, hit in outcomes]
    assert found["brier"] == pytest.approx(np.mean(squares))
    gaps = sum(abs(sum(gaps)) for gaps in bins.values())
    assert found["ece"] == pytest.approx(gaps / len(outcomes), abs=1e-12)
