"""How many operations a step gives the device, beside the replays of captured forwards."""

from __future__ import annotations

import pytest
import torch

from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda.flash_kernels import TorchVarlen
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from tests.support.cuda_tests import on_cuda
from tests.support.graph_bench import Bench
from tests.support.stand_ins.device_ops import between_replays, device_operations
from tests.support.toys.tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.usefixtures("device"),
]
DEPTH = 4


@pytest.mark.parametrize(
    ("num_cached", "width"), [((11,), 1), ((11, 30, 7, 9, 25), 3)], ids=["one", "five"]
)
def test_a_draft_level_is_one_replay_and_three_operations(captures, monkeypatch, num_cached, width):
    monkeypatch.setattr(kernel_choice, "KERNELS", (TorchVarlen,))
    bench = Bench(on_cuda(tiny_model("llama"), torch.bfloat16), num_cached)
    drafter = AssistantDrafter(bench.packed, Room(DEPTH * width, 101))
    plan = Plan(DEPTH, width, min_path_prob=1e-9, min_gain=1e-9, min_confidence=1e-9)
    trees = []
    for _ in range(4):  # the prompts, a forward by each signature, the captures, replays
        with device_operations() as names:
            trees.append(drafter.draft(bench.requests, plan))
    before, *levels, after = between_replays(names)
    assert len(levels) == DEPTH - 1, "roots and each level are a replay"
    assert all(len(level) <= 3 for level in levels), levels
    assert len(before) <= 3 and len(after) <= 1, (before, after)
    for replayed, plain in zip(trees[-1], trees[1], strict=True):
        assert replayed.tokens.tolist() == plain.tokens.tolist()
        assert replayed.parents.tolist() == plain.parents.tolist()


def test_accepted_nodes_move_by_five_operations(monkeypatch):
    """The slots, and for each half of the layers what is read and what is written."""
    monkeypatch.setattr(kernel_choice, "KERNELS", (TorchVarlen,))
    bench = Bench(on_cuda(tiny_model("llama"), torch.bfloat16), (11,))
    pool = bench.sequences.cache.pool
    with device_operations() as names:
        pool.move([5, 7], [3, 4])
    assert len(names) == 5, names
