"""An inflated head drafts for an inflated target what the head drafts for the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
)
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.heads.loading import load_head
from hf_slospec.tiny.inflate import inflate, inflate_head
from hf_slospec.tiny.shapes import Shape
from tests.heads.checkpoints import (
    CONFIGS,
    FLAGS,
    eagle3_fields,
    eagle3_tensors,
    mtp_tensors,
    published_config,
    write,
)
from tests.support.toys.tiny_models import ragged_prompts

CONFIG = SLOSpecConfig(policy="fixed", max_depth=3, max_width=3)
SHAPES = [
    Shape(128, 192, 9),
    Shape(128, 100, 8),
    Shape(128, 192, 9, 16, 4, 32, 700, tie_word_embeddings=False),
]


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIGS["llama"].to_dict() | {"tie_word_embeddings": True})
    return LlamaForCausalLM(config).eval()


def trees_of(target, head, inputs, monkeypatch):
    draft = FeatureDrafter.draft
    found = list[Any]()

    def recorded(drafter, requests, plan):
        trees = draft(drafter, requests, plan)
        found.extend(
            (tree.tokens.tolist(), tree.parents.tolist(), tree.path_probs.tolist())
            for tree in trees
        )
        return trees

    with monkeypatch.context() as patched:
        patched.setattr(FeatureDrafter, "draft", recorded)
        generator = SLOSpecGenerator(target, drafter=HeadMethod(head), config=CONFIG)
        return generator.generate(**inputs, do_sample=False, max_new_tokens=8), found


def assert_same_trees(first, second):
    assert torch.equal(first[0], second[0]) and len(first[1]) == len(second[1]) > 4
    for ours, theirs in zip(first[1], second[1], strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["mtp", "all flags", "biases"])
def test_inflated_heads_draft_the_same_trees(kind, shape, plain, tmp_path, monkeypatch):
    """Of EAGLE-3 heads, attention is wider than the hidden size, and epsilon is not the target's."""
    if kind == "mtp":
        tensors = {f"mtp.{name}": tensor for name, tensor in mtp_tensors("llama").items()}
        path = write(tmp_path, CONFIGS["llama"], tensors)
    else:
        flags = (
            {name for name in FLAGS if name != "norm_before_fc"}
            if kind == "all flags"
            else {"norm_before_fc"}
        )
        changes: dict[str, Any] = (
            {"attention_bias": True} if kind == "biases" else {"rms_norm_eps": 0.1}
        )
        assert eagle3_fields()["head_dim"] * 4 > 32
        config = published_config(**dict.fromkeys(flags, True), **changes)
        path = write(tmp_path, config, eagle3_tensors(flags, **changes))
    head: Any = load_head(path, plain)
    target = inflate(plain, shape)
    inputs = ragged_prompts(2)
    larger = inflate_head(head, plain, target)
    assert_same_trees(
        trees_of(plain, head, inputs, monkeypatch), trees_of(target, larger, inputs, monkeypatch)
    )
