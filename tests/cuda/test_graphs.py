"""Which graphs there are: captured when they recur, dropped when they no longer hold."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from hf_slospec.cuda import graphs
from hf_slospec.cuda.graphs import CaptureError, GraphCounts, GraphHistory, Graphs
from hf_slospec.model.version import ModelVersion, can_be_traced
from tests.support.graph_bench import CPU
from tests.support.stand_ins.graphs import Tapes


def scaled(inputs):
    return inputs["x"] * inputs["factor"]


def inputs_of(size, factor=2):
    return {"x": torch.arange(size), "factor": factor}


def test_recurring_forwards_are_captured_and_the_oldest_dropped(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    tapes = Tapes()
    held = Graphs(tapes, CPU)
    for _ in range(graphs.PATIENCE):
        assert held.run(inputs_of(3), scaled, 0) is None
    captured = held.run(inputs_of(3), scaled, 0)
    replayed = held.run(inputs_of(3), scaled, 0)
    assert captured.tolist() == replayed.tolist() == [0, 2, 4]
    held.patience = 0
    for size in (4, 3, 5):
        held.run(inputs_of(size), scaled, 0)
    assert (len(held), tapes.num_captured) == (2, 3)
    held.run(inputs_of(3), scaled, 0)
    assert tapes.num_captured == 3  # it was used after the one that went
    held.run(inputs_of(4), scaled, 0)
    assert tapes.num_captured == 4
    assert held.run(inputs_of(4, factor=5), scaled, 0).tolist() == [0, 5, 10, 15]


def test_graphs_are_dropped_when_preconditions_change():
    held = Graphs(Tapes(), CPU)
    held.patience = 0
    held.run(inputs_of(3), scaled, "here")
    held.run(inputs_of(4), scaled, "here")
    assert len(held) == 2
    held.run(inputs_of(4), scaled, "there")
    assert len(held) == 1


def test_graphs_that_take_too_much_memory_are_turned_off(caplog):
    class Large(Tapes):
        max_bytes = 25

        @property
        def num_bytes(self):
            return 10 * self.num_captured

    held = Graphs(Large(), CPU)
    held.patience = 0
    with caplog.at_level(logging.INFO, "hf_slospec.cuda.graphs"):
        for size in range(1, 6):
            out = held.run(inputs_of(size), scaled, 0)
            assert held.is_off == (size >= 3) and (out is None) == (size > 3)
    messages = [record.message.split(",")[0] for record in caplog.records]
    assert messages[0] == "capturing CUDA graphs"
    assert not len(held) and len(messages) == 2


def test_weights_that_move_and_settings_that_change_are_noticed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    version = ModelVersion(model)
    model[0].weight.data.mul_(2.0)
    version.notice_writes()
    assert version.storage == 0  # graphs read the weights where they are
    model[0].weight.data = model[0].weight.data.clone()
    version.notice_writes()
    assert version.storage == version.weights == 1 and version.modules == 0
    model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    version.notice_writes()
    assert version.storage == 2
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    version.notice_writes()
    assert version.storage == 2 and version.weights == 3
    del model[0].weight
    version.notice_writes()
    assert version.storage == 3
    model[1].eps = 1.0
    version.renew()
    assert version.storage == 4 and version.modules == 1 and can_be_traced(model)
    model[1].adapters = ([{"scaling": 1.0}],)
    version.renew()
    model[1].adapters[0][0]["scaling"] = -3.0
    version.renew()
    assert version.storage == 6
    model[1].forward = functools.partial(type(model[1]).forward, model[1])
    version.renew()
    assert version.storage == 7 and version.modules == 4
    model[1].register_forward_hook(lambda *_: None)
    version.renew()
    assert version.structure == 1 and not can_be_traced(model)


class Failing(Tapes):
    num_failing = 99
    num_tried = 0

    def capture(self, run):
        self.num_tried += 1
        self.num_failing -= 1
        if self.num_failing >= 0:
            raise CaptureError("operation failed due to a previous error during capture")
        return super().capture(run)


def test_captures_that_failed_for_a_transient_reason_are_retried(monkeypatch):
    """Later, and not for ever; other forwards are not affected once one was captured."""
    monkeypatch.setattr(graphs, "RETRY_AFTER", 4)
    tapes = Failing()
    held = Graphs(tapes, CPU)
    held.patience = 0
    tapes.num_failing = 2
    found = [held.run(inputs_of(3), scaled, 0) for _ in range(1 + 5 + 17 + 1)]
    assert [out is None for out in found] == [True] * 22 + [False] * 2
    assert (tapes.num_tried, len(held), held.is_off) == (3, 1, False)
    tapes.num_failing = 99
    assert all(held.run(inputs_of(4), scaled, 0) is None for _ in range(80))
    assert tapes.num_tried <= 3 + 3 and not held.is_off


def test_captures_that_never_succeed_are_turned_off():
    tapes = Failing()
    held = Graphs(tapes, CPU)
    assert all(held.run(inputs_of(3), scaled, 0) is None for _ in range(100 * graphs.RETRY_AFTER))
    assert tapes.num_tried == graphs.MAX_FAILURES and held.has_failed


def test_captures_that_ran_out_of_memory_are_retried():
    is_short = True

    def compute(inputs):
        if is_short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scaled(inputs)

    held = Graphs(Tapes(), CPU)
    held.patience = 0
    assert held.run(inputs_of(3), compute, 0) is None
    is_short = False
    assert held.run(inputs_of(3), compute, 0) is None and not held.is_off
    assert held.run(inputs_of(4), compute, 0) is not None


def test_signatures_seen_on_a_pool_are_captured_at_once_on_others():
    history = GraphHistory()
    held = [Graphs(Tapes(), CPU, history) for _ in range(3)]
    found = [
        pool.run(inputs_of(3), scaled, preconditions)
        for pool, preconditions in zip(held, "aab", strict=True)
    ]
    assert [out is None for out in found] == [True, False, True]
    assert history.counts == GraphCounts(captures=1, eager=2)


@pytest.mark.parametrize("mask", [0.0, -torch.inf, torch.finfo(torch.bfloat16).min])
def test_first_replays_are_compared_without_masked_values(mask):
    right = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    right[:, :5] = mask
    assert graphs._is_close(right.clone(), right)
    for row in (0, 69):
        wrong = right.clone()
        wrong[row, 7] += 50
        assert not graphs._is_close(wrong, right)
