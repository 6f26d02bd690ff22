"""Drafting and verifying without waiting for the device."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from hf_slospec.drafters import beam
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model import transfer
from hf_slospec.model.eager import EagerPath
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.transfer import DeferredFlags, HostSyncError, SyncGuard
from hf_slospec.request.request import Request, RequestParams
from tests.support.graph_bench import CPU, Bench
from tests.support.toys.tiny_models import tiny_model

READS_ON_HOST = {
    getattr(torch.Tensor, name)
    for name in (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "nonzero",
    )
}
OF_HOST_TENSORS = (
    transfer.DeviceCopy.fill.__code__,
    transfer._bytes.__code__,
)  # read what is not on the device


class NoRead(torch.overrides.TorchFunctionMode):
    """Also finds, on a CPU, what would wait on a GPU only."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if sys._getframe(1).f_code not in OF_HOST_TENSORS:
            assert func not in READS_ON_HOST, f"{func} has the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("patience", [0, 999])
def test_drafting_and_verifying_wait_for_nothing(family, patience, tapes, monkeypatch):
    bench = Bench(tiny_model(family))
    drafter = AssistantDrafter(bench.packed, Room(20, 101))
    plan = Plan(4, 2, min_path_prob=1e-9, min_gain=1e-9, min_confidence=1e-9)
    expected = drafter.draft(bench.requests, plan)
    bench.verify()
    found = list[Any]()
    # In the place of the copy to the host.
    monkeypatch.setattr(
        beam, "_trees", lambda nodes, sizes: found.append(nodes.clone()) or list(nodes)
    )
    monkeypatch.setattr(
        DeferredFlags, "next", lambda self, flags: None
    )  # what waits is a level behind
    monkeypatch.setattr(
        EagerPath, "may_have_spread", lambda self, logits: False
    )  # which only CPUs look for
    bench.graphs.patience = patience  # for both, as they share the model's K/V cache
    for request in bench.requests:
        drafter.sequences.of(request).length -= 1
    if patience == 0:  # captures look at their first result
        drafter._draft({request: request for request in bench.requests}, plan)
        bench.verify()
        for request in bench.requests:
            drafter.sequences.of(request).length -= 1
    found.clear()
    captured = tapes.num_captured
    with SyncGuard(), NoRead():
        drafter._draft({request: request for request in bench.requests}, plan)
        bench.verify()
    assert tapes.num_captured == captured and bool(captured) == (patience == 0)
    (nodes,) = found
    for index, own in enumerate(expected):
        assert (
            own.tokens.tolist() == nodes[index, 0].tolist()
            and own.parents.tolist() == nodes[index, 1].tolist()
        )


def test_reads_are_found():
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


def test_an_answer_one_question_late(monkeypatch):
    """Drafting ends a level later, and no other way."""
    answers = DeferredFlags(CPU)
    assert [answers.next(torch.tensor(answer)) for answer in (False, True, False)] == [
        False,
        True,
        False,
    ]
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
