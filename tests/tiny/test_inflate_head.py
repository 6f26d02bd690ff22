"""An inflated head drafts for an inflated target what the head drafts for the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec import (
    InvalidInputError,
    SLOSpecConfig,
    SLOSpecGenerator,
)
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.heads.loading import load_head
from hf_slospec.tiny.embedded import FOLDER, load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import config_of, inflate, inflate_head
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

CONFIG = SLOSpecConfig(policy="fixed", max_depth=3, max_width=3, compile=False)
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


LARGE_TARGET = Shape(512, 704, 8, 16, 4, 128, 2300, tie_word_embeddings=False)
LARGE_HEAD = Shape(512, 800, 1, 16, 4, 128, 1200)  # in other proportions than the target


def test_a_head_of_eagles_shape_accepts_as_the_embedded_head(monkeypatch):
    """With K/V heads, head size and ids as published heads for 8B models have them."""
    target, _, tokenizer = load_tiny_pair()
    head: Any = load_head(str(FOLDER / "eagle3"), target)
    larger = inflate(target, LARGE_TARGET)
    larger_head = inflate_head(head, target, larger, LARGE_HEAD)
    assert larger_head.draft_vocab_size == 1200 > head.draft_vocab_size
    assert len(larger_head.target_ids.unique()) == 1200
    inputs = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    plain, inflated = (
        trees_of(*pair, inputs, monkeypatch) for pair in ((target, head), (larger, larger_head))
    )
    assert_same_trees(plain, inflated)
    states = torch.randn(1, 2, 256)
    states = torch.cat((states, torch.zeros(1, 2, 256)), dim=-1)
    inputs_embeds = torch.cat((larger.get_input_embeddings()(torch.tensor([[7, 9]])), states), -1)
    logits = larger_head(inputs_embeds=inputs_embeds, position_ids=torch.arange(2)[None]).logits
    assert (logits[..., head.draft_vocab_size : 1200] < -100.0).all()


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (Shape(512, 1500, 1), "all its sizes"),
        (Shape(2048, 1500, 1, 32, 8, 128, 1200), "target's hidden size 512"),
        (Shape(512, 1500, 1, 16, 2, 128, 1200), "more than 2 K/V heads"),
        (Shape(512, 1500, 1, 16, 8, 128, 2000), "as many additional ids"),
    ],
)
def test_shapes_that_cannot_hold_the_head_are_refused(shape, match):
    target = load_tiny_pair()[0]
    head: Any = load_head(str(FOLDER / "eagle3"), target)
    with torch.device("meta"):
        larger = LlamaForCausalLM(config_of(target, LARGE_TARGET))
    with pytest.raises(InvalidInputError, match=match):
        inflate_head(head, target, larger, shape)
