"""Signatures of forwards, copies to the device, and waits for it."""

from __future__ import annotations

import pytest
import torch

from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.transfer import (
    DeferredFlags,
    DeviceCopy,
    HostSyncError,
    SyncGuard,
    flattened,
    tensors_in,
)
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.graph_bench import CPU
from tests.support.toys.tiny_models import tiny_model


def test_values_that_the_host_reads_are_in_the_signature():
    def made(**changes):
        values = dict(a=torch.ones(2, 3), n=4, none=None, items=[torch.ones(1)], key=7) | changes
        return {values.pop("key"): values}

    first = flattened(made())[1]
    assert flattened(made(a=torch.zeros(2, 3)))[1] == first
    for changes in (
        dict(a=torch.ones(3, 2)), dict(a=torch.ones(2, 3).bool()), dict(a=torch.ones(2, 3, device="meta")),
        dict(n=5), dict(n=4.0), dict(none=torch.ones(1)), dict(items=[torch.ones(1)] * 2), dict(key=8),
        dict(items=(torch.ones(1),)),
    ):  # fmt: skip
        assert flattened(made(**changes))[1] != first, changes


def test_device_copies_hold_the_values_last_filled_in():
    def made(start):
        ranges = [torch.arange(start, start + n) for n in (3, 0, 5)]
        return {
            "a": ranges,
            "b": (torch.tensor([[True, False]]), ranges[2].int(), ranges[0].double().view(3, 1)),
            "c": 1,
        }

    copy = DeviceCopy(made(0), CPU)
    for start in (3, 9):
        copy.fill(tensors_in(made(start)))
        assert flattened(copy.content)[1] == flattened(made(start))[1]
        for found, right in zip(tensors_in(copy.content), tensors_in(made(start)), strict=True):
            assert torch.equal(found, right)


def test_operators_that_make_the_host_wait_raise():
    x = torch.ones(3)
    for reads in (
        lambda: x.sum().item(), lambda: bool((x > 0).any()), lambda: x.nonzero(), lambda: x[x > 0],
        lambda: x.masked_select(x > 0), lambda: x.repeat_interleave(x.long()), lambda: x.unique(),
        lambda: torch.where(x > 0), lambda: x.to("meta"),
    ):  # fmt: skip
        with SyncGuard(), pytest.raises(HostSyncError):
            reads()
    with SyncGuard():
        assert x[torch.tensor([0])].shape == x.index_put((torch.tensor([0]),), x[:1])[:1].shape


def test_drafting_with_late_answers_ends_a_level_later(monkeypatch):
    answers = DeferredFlags(CPU)
    asked = [False, True, False]
    assert [answers.next(torch.tensor(answer)) for answer in asked] == asked
    requests = [Request(index, RequestParams([1, 5 + index, 9], 40)) for index in range(4)]

    def drafted():
        drafter = AssistantDrafter(PackedModel(tiny_model("llama")), Room(8, 101))
        return drafter.draft(requests, Plan(8, 1, min_path_prob=0.0, min_gain=0.3))

    at_once = drafted()
    monkeypatch.setattr("hf_slospec.drafters.beam.DeferredFlags", Late)
    for early, late in zip(at_once, drafted(), strict=True):
        assert late.max_depth == early.max_depth + 1 < 8
        assert late.up_to(early.max_depth).tokens.tolist() == early.tokens.tolist()


class Late(DeferredFlags):
    def __init__(self, device):
        super().__init__(device)
        self.lag = 1
