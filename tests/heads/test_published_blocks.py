"""DFlash and DSpark heads in their publishers' layouts: trees against the reference, and output
against stock.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecGenerator, UnsupportedModelError, load_drafter
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.heads.loading import load_head
from tests.drafters.test_features import texts_of
from tests.heads.checkpoints import HIDDEN, target_of, write
from tests.heads.published_blocks import (
    CASES,
    RANK,
    SELECTOR,
    block_tensors,
    deepspec,
    domino,
    flat,
    gemma4,
    lilicorr,
    reduced,
    speculators,
)
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, Checks
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=10)


def folder_of(case, folder):
    return write(folder / "head", case.config, case.saved(case.tensors))


@pytest.mark.parametrize("name", CASES)
def test_trees_are_those_of_the_reference(name, tmp_path, monkeypatch):
    case = CASES[name]
    target = target_of("llama")
    inputs = ragged_prompts(3)
    method = load_drafter(folder_of(case, tmp_path), target)
    assert isinstance(method, HeadMethod) and method.feature_layers == case.features
    kinds = {"": "DFlash", "selector": "DFlash2", "domino": "Domino", "xpress": "XPress"}
    kinds |= {"lattice": "LiLiCorr", "convolved lattice": "LiLiCorr"}
    assert method.kind == kinds.get(case.markov, "DSpark")
    checks = Checks(target, case.expected, texts_of(target, inputs, **GREEDY))
    ours = SLOSpecGenerator(
        target, drafter=method, config=DRAFTS_ALWAYS.model_copy(update=dict(max_depth=6))
    )
    with checks.on(monkeypatch):
        assert_same_as_stock(target, ours.generate, inputs, **GREEDY)
    assert checks.num_checked > 5 and not checks.num_unready


def test_embeddings_of_gemma_keep_their_factor_in_jetspec_only(tmp_path):
    target: Any = tiny_model("gemma3")
    ids = torch.tensor([[3, 50]])
    embeddings = target.get_input_embeddings()
    for name, expected in (
        ("jetspec", embeddings(ids)),
        ("dflash of sliding layers", embeddings.weight[ids]),
    ):
        config = CASES[name].config
        config = config | dict(
            dflash_config=config["dflash_config"] | dict(target_layer_ids=[0, 1])
        )
        head: Any = load_head(write(tmp_path / name, config, CASES[name].tensors), target)
        torch.testing.assert_close(head.embed(ids), expected)


def test_a_verifier_of_another_class_is_a_warning(tmp_path, caplog):
    for architecture, count in (
        ("LlamaForCausalLM", 0),
        ("LlamaForConditionalGeneration", 0),
        ("MistralForCausalLM", 1),
    ):
        verifier = {"name_or_path": "some/target", "architectures": [architecture]}
        config = speculators("dflash", speculators_config={"verifier": verifier})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_head(write(tmp_path / architecture, config, block_tensors()), target_of("llama"))
        assert len(caplog.records) == count, architecture


MARKOV = block_tensors("vanilla", HIDDEN + RANK)
CONFIDENT = dict(enable_confidence_head=True, confidence_head_with_markov=True)


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        (deepspec(**CONFIDENT, markov_rank=8), MARKOV, UnsupportedModelError, "has markov_rank 8 .* tensors .* 6"),
        (deepspec(**CONFIDENT, markov_head_type="gated"), MARKOV, UnsupportedModelError, "markov_head_type 'gated'"),
        (deepspec(), MARKOV, UnsupportedModelError, "enable_confidence_head False"),
        (deepspec(), block_tensors(), UnsupportedModelError, "has markov_rank 6 .* 0"),
        (flat("DFlashDraftModel", own=dict(projector_type="domino")), block_tensors(), UnsupportedModelError,
         "config has gru_hidden_dim None; it must be an integer"),
        (domino(pure_draft_prefix_len=-1), block_tensors("domino"), UnsupportedModelError, "integer of at least 0"),
        (gemma4(**CONFIDENT, rope_parameters={"rope_type": "default"}), MARKOV, UnsupportedModelError,
         "unknown type None"),
        (gemma4(**CONFIDENT, num_hidden_layers="2"), MARKOV, UnsupportedModelError, "invalid config"),
        (domino(gru_hidden_dim=9), block_tensors("domino"), UnsupportedModelError, "prefix_gru.weight_hh has shape"),
        (gemma4(**CONFIDENT, enable_moe_block=True), MARKOV, UnsupportedModelError, "has enable_moe_block True"),
        (gemma4(**CONFIDENT), MARKOV, UnsupportedModelError, "unknown layers.0.self_attn.v_proj"),
        (flat("DFlashDraftModel", own=dict(projector_type="other")), block_tensors(), UnsupportedModelError, "'other'"),
        (flat("DFlashDraftModel", own=dict(use_swa=True)), block_tensors(), UnsupportedModelError, "swa_window_size"),
        (speculators("dflash", dict(model_type="x")), block_tensors(), UnsupportedModelError, "layers of type 'x'"),
        (speculators("dflash", transformer_layer_config=None), block_tensors(), UnsupportedModelError, "has no trans"),
        (speculators("dflash2", **SELECTOR | dict(conv_group_size=5)), block_tensors("selector"),
         UnsupportedModelError, "groups of 5 channels"),
        (speculators("dflash2", **SELECTOR, block_size=2), block_tensors("selector"), UnsupportedModelError, "needs 3"),
        (flat("DFlashDraftModel", is_neox_style=False), block_tensors(), UnsupportedModelError, "is_neox_style False"),
        (lilicorr(0, lilicorr_factor_dim=None), block_tensors("lattice"), UnsupportedModelError,
         "has lilicorr_factor_dim None; it must"),
        (lilicorr(0, lilicorr_logit_scale="3"), block_tensors("lattice"), UnsupportedModelError, "logit_scale '3'"),
        (lilicorr(0, lilicorr_num_heads=5), block_tensors("lattice"), UnsupportedModelError, "width of 32.* its 5 att"),
        (lilicorr(0, sample_from_anchor=True), block_tensors("lattice"), UnsupportedModelError, "sample_from_anchor"),
        (lilicorr(0) | dict(draft_vocab_size=40), reduced(block_tensors("lattice")), UnsupportedModelError,
         "reduced vocabulary"),
        (lilicorr(0, conv_kernel_size=2), block_tensors("convolved lattice"), UnsupportedModelError,
         "conv_group_size None"),
        (lilicorr(0), block_tensors(), UnsupportedModelError, "it lacks lilicorr.anchor_norm.weight"),
        (flat("Qwen3XPressModel", xpress_rank=7), block_tensors("xpress"), UnsupportedModelError,
         r"refiner.down_g.weight has shape \(6, 32\) and not \(7, 32\)"),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_are_refused(config, tensors, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_drafter(write(tmp_path, config, tensors), target_of("llama"))
