"""The optimizer of matrices, against torch's, which computes in bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_slospec.training import run as muon
from hf_slospec.training.run import Muon, orthogonalized

OPTIONS: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, momentum=0.9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")
def test_steps_are_those_of_torch_and_go_on_with_its_checkpoint(monkeypatch):
    monkeypatch.setattr(
        muon, "orthogonalized", lambda matrix, _: orthogonalized(matrix, torch.bfloat16)
    )
    torch.manual_seed(0)
    shapes = (12, 40), (40, 12), (16, 16)
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    own = Muon(ours, **OPTIONS)
    other = torch.optim.Muon(theirs, **OPTIONS)
    for step in range(6):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            two.grad = one.grad.clone()
        if step == 3:
            own = Muon(ours, **OPTIONS)
            own.load_state_dict(copy.deepcopy(other.state_dict()))
        own.step()
        other.step()
    for one, two in zip(ours, theirs, strict=True):
        assert float((one.detach() - 1).abs().mean()) > 0.01
        torch.testing.assert_close(one, two, rtol=0.0, atol=1e-5)


def test_singular_values_become_alike():
    torch.manual_seed(0)
    for shape in ((12, 40), (40, 12)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape), torch.float32))
        assert float(values.min()) > 0.5 and float(values.max()) < 1.5
