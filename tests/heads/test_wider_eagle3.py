"""EAGLE-3 heads of several layers, of Qwen3 or Gemma 4, or with windows, and P-EAGLE, against a
reference and stock.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_slospec import (
    SLOSpecGenerator,
    UnsupportedModelError,
    load_drafter,
)
from hf_slospec.heads.loading import load_head
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.trial import check_by_trial
from tests.drafters.test_features import texts_of
from tests.heads import references
from tests.heads.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    eagle3_fields,
    eagle3_tensors,
    published_config,
    random_tensors,
    speculators_config,
    target_of,
    vocabulary_maps,
    write,
)
from tests.heads.published_blocks import (
    GLOBAL_DIM,
    best_products,
    gemma4,
    whole,
    with_gemma4_layers,
)
from tests.heads.test_heads import PROMPT, Reference, assert_same, renamed_layer
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, Checks
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts

WINDOW = 4
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=10)
Tensors = dict[str, torch.Tensor]


def tensors_of(num_layers, *, qwen3=False, num_features=3):
    """Tensors of a head under the names of speculators, for a draft vocabulary as large as the
    target's.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, num_features * HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN), "layers.0.hidden_norm.weight": (HIDDEN,)}
    for index in range(num_layers):
        size = HIDDEN if index else 2 * HIDDEN
        layer = {
            "self_attn.q_proj": (64, size), "self_attn.k_proj": (32, size), "self_attn.v_proj": (32, size),
            "self_attn.o_proj": (HIDDEN, 64), "mlp.gate_proj": (48, HIDDEN), "mlp.up_proj": (48, HIDDEN),
            "mlp.down_proj": (HIDDEN, 48), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        if qwen3:
            layer |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return random_tensors(shapes)


def reduced(tensors):
    lm_head = tensors["lm_head.weight"][:DRAFT_VOCAB]
    return tensors | {"lm_head.weight": lm_head} | vocabulary_maps(DRAFT_VOCAB)


def renamed(tensors):
    """The names of SGLang: the first layer is ``midlayer``, and others have a norm of another name."""
    names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
    names |= {
        name: name.replace("input_layernorm", "hidden_norm")
        for name in tensors
        if name.startswith("layers.1.")
    }
    return {f"model.{names[name]}": tensor for name, tensor in tensors.items()}


def nested(**layers):
    return speculators_config(
        transformer_layer_config=eagle3_fields(**layers), eagle_aux_hidden_state_layer_ids=[2, 4, 5]
    )


SLIDING = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, num_hidden_layers=2
)
QWEN3 = dict(
    model_type="qwen3",
    attention_bias=False,
    architectures=["Qwen3Eagle3Model"],
    num_hidden_layers=1,
)
# Config, the reference's tensors, the saved ones, and each layer's window.
CASES: dict[str, tuple[dict[str, Any], Tensors, Tensors, list[int | None]]] = {
    "sliding": (nested(**SLIDING), reduced(tensors_of(2)), reduced(tensors_of(2)), [WINDOW, None]),
    "sliding qwen3": (nested(**SLIDING, model_type="qwen3", use_sliding_window=True),
                      reduced(tensors_of(2, qwen3=True)), reduced(tensors_of(2, qwen3=True)), [WINDOW, None]),
    "deepspec": (published_config(**QWEN3, target_layer_ids=[0, 1, 3, 5, 7], draft_vocab_size=VOCAB),
                 tensors_of(1, qwen3=True, num_features=5), tensors_of(1, qwen3=True, num_features=5), [None]),
    "sglang": (published_config(num_hidden_layers=2, draft_vocab_size=VOCAB), tensors_of(2), renamed(tensors_of(2)),
               [None] * 2),
}  # fmt: skip


def folder_of(name, folder):
    config, _, saved, _ = CASES[name]
    return write(folder / "head", config, saved)


@pytest.mark.parametrize("name", CASES)
def test_levels_are_those_of_the_reference(name, tmp_path):
    _, weights, _, windows = CASES[name]
    head: Any = load_head(folder_of(name, tmp_path), target_of("llama"))
    num_features = weights["fc.weight"].shape[1] // HIDDEN
    assert head.feature_layers == ((2, 4, 5) if num_features == 3 else (1, 2, 4, 6, 8))
    features = torch.randn(PROMPT, num_features * HIDDEN)
    combined = features @ weights["fc.weight"].T
    torch.testing.assert_close(head.combine(features), combined, rtol=1e-5, atol=1e-5)
    reference: Reference = lambda *entries: references.eagle3(  # noqa: E731
        *entries, weights, head.config, windows
    )
    assert_same(head, combined, reference, len(weights["lm_head.weight"]))
    check_by_trial(packed := PackedModel(head))
    assert [layer.window for layer in packed.layers] == windows


def test_the_targets_output_layer_and_a_bias(tmp_path):
    target = target_of("llama")
    tensors = eagle3_tensors(set(), draft_vocab=VOCAB)
    own = {f"model.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    bias = own["model.fc.bias"] = torch.randn(HIDDEN)
    path = write(tmp_path, published_config(draft_vocab_size=VOCAB), own)
    head: Any = load_head(path, target)
    assert head.lm_head is target.get_output_embeddings()
    features = torch.randn(PROMPT, 3 * HIDDEN)
    torch.testing.assert_close(head.combine(features), features @ tensors["fc.weight"].T + bias)
    weights = tensors | {"lm_head.weight": target.get_output_embeddings().weight}
    reference = partial(references.eagle3, weights=renamed_layer(weights), config=head.config)
    assert_same(head, head.combine(features).detach(), reference, VOCAB)


def gemma4_eagle3(**changes):
    """The config of DeepSpec's EAGLE-3 for Gemma 4."""
    own = dict(
        target_layer_ids=[0, 1, 2], ttt_length=4, step_loss_decay=0.8, draft_num_hidden_layers=1
    )
    return (
        gemma4("Gemma4Eagle3Model", num_hidden_layers=1, layer_types=["full_attention"])
        | own
        | changes
    )


def gemma4_tensors(keys_are_values):
    tensors = whole(with_gemma4_layers(tensors_of(1), 1, keys_are_values, 2 * HIDDEN))
    return tensors | random_tensors({"layers.0.hidden_norm.weight": (HIDDEN,)}, seed=9)


@pytest.mark.parametrize("keys_are_values", [False, True])
def test_levels_with_a_layer_of_gemma4(keys_are_values, tmp_path):
    weights = gemma4_tensors(keys_are_values)
    cap = 3.0 if keys_are_values else None
    config = gemma4_eagle3(attention_k_eq_v=keys_are_values, final_logit_softcapping=cap)
    head: Any = load_head(write(tmp_path, config, weights), target_of("llama"))
    assert head.feature_layers == (1, 2, 3)
    ids = torch.arange(VOCAB)
    torch.testing.assert_close(head.embed_tokens(ids), weights["embed_tokens.weight"] * HIDDEN**0.5)
    features = torch.randn(PROMPT, 3 * HIDDEN)
    combined = features @ weights["fc.weight"].T
    torch.testing.assert_close(head.combine(features), combined, rtol=1e-5, atol=1e-5)
    reference: Reference = lambda embeds, hidden, _: references.gemma4_eagle3(  # noqa: E731
        embeds, hidden, weights, GLOBAL_DIM, cap or 0.0
    )
    assert_same(head, combined, reference, VOCAB)
    check_by_trial(PackedModel(head))


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        (gemma4_eagle3(num_hidden_layers=2), gemma4_tensors(True), UnsupportedModelError, "has 2 layers of Gemma 4"),
        (gemma4_eagle3(attention_k_eq_v=False), gemma4_tensors(True), UnsupportedModelError,
         r"it lacks midlayer\.self_attn\.v_proj"),
        (nested(num_hidden_layers=3), reduced(tensors_of(2)), UnsupportedModelError, r"it lacks layers\.2"),
        (nested(layer_types=["sliding_attention"]), reduced(tensors_of(1)), UnsupportedModelError,
         "no sliding_window in its config"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(config, tensors, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_drafter(write(tmp_path, config, tensors), target_of("llama"))


def peagle_tensors(vocab):
    own = random_tensors(
        {"embed_tokens.weight": (VOCAB, HIDDEN), "mask_hidden": (1, 1, 3 * HIDDEN)}, seed=8
    )
    return (tensors_of(2) if vocab == VOCAB else reduced(tensors_of(2))) | own


METHOD = {"proposal_type": "greedy", "speculative_tokens": 4}
PEAGLE: dict[str, tuple[dict[str, Any], Tensors, int]] = {
    "speculators": (
        nested(num_hidden_layers=2) | dict(
            speculators_model_type="peagle", architectures=["PEagleDraftModel"], mask_token_id=7,
            speculators_config={"algorithm": "peagle", "proposal_methods": [METHOD]},
        ), peagle_tensors(DRAFT_VOCAB), 4,
    ),
    "specforge": (
        published_config(architectures=["PEagleDraftModel"], num_hidden_layers=2, draft_vocab_size=VOCAB,
                         ptd_token_id=7),
        peagle_tensors(VOCAB), 8,
    ),
}  # fmt: skip


@torch.no_grad()
def peagle_tree(name, tokens, features, first, plan):
    """The most probable prefixes of what the entry of the last known feature and the masks behind
    it predict.
    """
    _, weights, num_proposals = PEAGLE[name]
    depth = min(plan.depth, num_proposals)
    every = torch.cat((features, weights["mask_hidden"][0].expand(depth - 1, -1)))
    embeds = weights["embed_tokens.weight"][[*tokens[first + 1 :], *[7] * (depth - 1)]]
    config = LlamaConfig.from_dict(eagle3_fields())
    entries = embeds, every @ weights["fc.weight"].T, torch.arange(first, first + len(every))
    logits, _ = references.eagle3(*entries, weights, config, [None] * 2)
    ids = torch.arange(len(weights["lm_head.weight"])) + weights.get(
        "d2t", torch.zeros(1, dtype=torch.int64)
    )
    return best_products(logits[-depth:].softmax(-1), ids, plan)


@pytest.mark.parametrize("name", PEAGLE)
def test_trees_of_peagle(name, tmp_path, monkeypatch):
    config, tensors, _ = PEAGLE[name]
    target = target_of("llama")
    inputs = ragged_prompts(3)
    method = load_drafter(write(tmp_path, config, tensors), target)
    assert method.kind == "P-EAGLE head"
    checks = Checks(target, partial(peagle_tree, name), texts_of(target, inputs, **GREEDY))
    checks.skips = lambda call: call % 4 == 2
    ours = SLOSpecGenerator(
        target, drafter=method, config=DRAFTS_ALWAYS.model_copy(update=dict(max_depth=6))
    )
    with checks.on(monkeypatch):
        assert_same_as_stock(target, ours.generate, inputs, **GREEDY)
    assert checks.num_checked > 4 and not checks.num_unready


def test_peagle_needs_a_mask_token(tmp_path):
    config, tensors, _ = PEAGLE["specforge"]
    for token in (None, VOCAB):
        with pytest.raises(UnsupportedModelError, match="mask_token_id"):
            load_drafter(
                write(tmp_path, config | dict(ptd_token_id=token), tensors), target_of("llama")
            )
