"""Of several attention kernels, the one that a trial finds to be the fastest for a shape."""

from __future__ import annotations

from math import inf

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cuda import fastest
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda.fastest import FastestAttention, seconds_of
from hf_slospec.cuda.flash_attention import FlashAttention
from hf_slospec.cuda.tree_attention import TreeAttention
from hf_slospec.model.attention.backends import KernelAttention
from hf_slospec.model.attention.sdpa import sdpa_attention
from hf_slospec.model.batch import AttentionRules
from tests.support.oracles.attention_rows import ROWS, SPANS, case
from tests.support.stand_ins.flash import StandIn
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy

RULES = AttentionRules(0.3)


class Counting(KernelAttention):
    """Computes by sdpa, and counts its calls."""

    def __init__(self, name):
        super().__init__()
        self.__name__ = name
        self.calls = 0

    def attend(self, *arguments):
        self.calls += 1
        return sdpa_attention(*arguments)


def test_each_shape_is_tried_once_and_has_its_own_choice(monkeypatch):
    first, second = Counting("first"), Counting("second")
    tried = list[tuple[str, int]]()

    def seconds(backend, query, *_):
        tried.append((backend.__name__, query.shape[0]))
        return {("first", 4): 2.0, ("second", 4): 1.0}.get(tried[-1], inf)

    monkeypatch.setattr(fastest, "seconds_of", seconds)
    backend = FastestAttention([first, second])
    made = case(SPANS, 2, 8, 8)
    for num_heads in (4, 4, 8):
        query = torch.randn(num_heads, len(made.tokens), 8)
        out = backend(query, made.keys, made.values, made.row, RULES)
        torch.testing.assert_close(out, made.expected(query, RULES))
    assert (first.calls, second.calls) == (1, 2)  # without a trial of 8 heads, the first
    assert tried == [("first", 4), ("second", 4), ("first", 8), ("second", 8)]


def test_a_trial_runs_a_step_of_trees(monkeypatch):
    """What is replayed is the backend's own attention of the trial's step, for these heads."""
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    monkeypatch.setattr(fastest, "capturer_for", lambda device: device)
    outputs = list[torch.Tensor]()

    def replayed(_, run, device):
        outputs.append(run())
        return 0.5

    monkeypatch.setattr(fastest, "replayed_s", replayed)
    made = case(ROWS["nothing-committed"], 2, 8, 8)
    query = torch.randn(4, len(made.tokens), 8)
    arguments = query, made.keys, made.values, RULES
    assert seconds_of(FlashAttention("stand-in"), *arguments) == 0.5
    assert outputs[0].shape == (fastest.REQUESTS * fastest.NODES, 4, 8)
    odd = case(ROWS["nothing-committed"], 2, 12, 12)  # heads of a size that flash does not take
    query = torch.randn(4, len(odd.tokens), 12)
    assert seconds_of(FlashAttention("stand-in"), query, odd.keys, odd.values, RULES) == inf
    step = fastest._step()
    seen = [row.nonzero()[:, 0].tolist() for row in step.spans[0].staged_mask[:5]]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


@pytest.mark.parametrize("taken", [TreeAttention, FlashAttention])
def test_whichever_is_taken_the_graphs_have_its_plans(taken, device, monkeypatch):
    monkeypatch.setattr(
        fastest, "seconds_of", lambda backend, *_: float(not isinstance(backend, taken))
    )
    model = tiny_copy("llama").to("cuda", torch.bfloat16)
    config = SLOSpecConfig(policy="fixed", max_depth=2, max_width=2)
    ours = SLOSpecGenerator(model, config=config)
    inputs = {name: each.to("cuda") for name, each in ragged_prompts(2).items()}
    first, second = (ours.generate(**inputs, do_sample=False, max_new_tokens=10) for _ in range(2))
    assert torch.equal(first.cpu(), second.cpu())
    packed = ours.decoder.speculator.target.packed
    assert packed.backend.__name__.startswith("fastest_attention[tree_attention[triton]; flash")
    assert {type(each) for each in packed.backend._chosen.values()} == {taken}
    assert packed.path("cuda_graphs").counts.replays > 0
