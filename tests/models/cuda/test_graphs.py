"""Which graphs there are: captured when they recur, dropped when they no longer hold."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hf_slospec.models.cuda import graphs
from hf_slospec.models.cuda.graphs import Graphs
from tests.support.graph_bench import CPU
from tests.support.graph_stand_in import Tapes


def scaled(inputs: Any) -> torch.Tensor:
    return inputs["x"] * inputs["factor"]


def inputs_of(size: int, factor: int = 2) -> Any:
    return {"x": torch.arange(size), "factor": factor}


def test_graphs_are_captured_when_they_recur_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    tapes = Tapes()
    held = Graphs(tapes, CPU)
    for _ in range(graphs.PATIENCE):
        assert held.run(inputs_of(3), scaled, 0) is None
    captured, replayed = held.run(inputs_of(3), scaled, 0), held.run(inputs_of(3), scaled, 0)
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


def test_graphs_go_when_what_they_take_for_preconditions_changes() -> None:
    held = Graphs(Tapes(), CPU)
    held.patience = 0
    held.run(inputs_of(3), scaled, "here")
    held.run(inputs_of(4), scaled, "here")
    assert len(held) == 2
    held.run(inputs_of(4), scaled, "there")
    assert len(held) == 1


def test_graphs_that_take_too_much_memory_end(caplog: pytest.LogCaptureFixture) -> None:
    class Large(Tapes):
        max_bytes = 25

        def num_bytes(self) -> int:
            return 10 * self.num_captured

    held = Graphs(Large(), CPU)
    held.patience = 0
    with caplog.at_level(logging.INFO, "hf_slospec.models.cuda.graphs"):
        for size in range(1, 6):
            out = held.run(inputs_of(size), scaled, 0)
            assert held.is_off == (size >= 3) and (out is None) == (size > 3)
    assert not len(held) and len(caplog.records) == 1


def test_weights_that_move_and_settings_that_change_are_noticed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    preconditions = graphs.GraphPreconditions(model)
    first = preconditions.now()
    model[0].weight.data.mul_(2.0)
    assert preconditions.now() == first  # graphs read the weights where they are
    model[0].weight.data = model[0].weight.data.clone()
    second = preconditions.now()
    assert second != first
    model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    third = preconditions.now()
    assert third != second
    model[1].eps = 1.0
    preconditions.renew()
    assert preconditions.now() != third and preconditions.is_plain
    model[1].register_forward_hook(lambda *_: None)
    preconditions.renew()
    assert not preconditions.is_plain
