"""Loading of drafting heads: what is recognised, the layers they read, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from hf_slospec.drafters import checkpoint
from hf_slospec.errors import IncompatibleDraftError, UnsupportedModelError
from hf_slospec.heads.eagle3 import Eagle3Head
from hf_slospec.heads.loading import load_head, load_mtp
from hf_slospec.heads.mtp import MtpHead, ShippedMtpHead
from tests.heads.checkpoints import (
    CONFIGS,
    HIDDEN,
    eagle3_tensors,
    mtp_tensors,
    published_config,
    speculators_config,
    target_of,
    with_single_experts,
    write,
)
from tests.support.toys.tiny_models import VOCAB

Tensors = dict[str, torch.Tensor]


def load_eagle3(folder, config, tensors=None):
    return load_head(
        write(folder, config, eagle3_tensors(set()) if tensors is None else tensors),
        target_of("llama"),
    )


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (published_config(), (2, 4, 5)),
        (published_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}), (1, 3, 7)),
        (published_config(eagle_aux_hidden_state_layer_ids=[0, 2, 6]), (1, 3, 7)),
        (published_config(target_layer_ids=[0, 2, 7]), (1, 3, 8)),
        (published_config(architectures=["Eagle3LlamaForCausalLM"], eagle_config=None), (2, 4, 5)),
        (published_config(architectures=None), (2, 4, 5)),
        (speculators_config(), (2, 4, 5)),
        (speculators_config(eagle_aux_hidden_state_layer_ids=[0, 2, 8]), (0, 2, 8)),
    ],
)
def test_eagle3_layouts_and_their_layers(tmp_path, config, layers):
    head = load_eagle3(tmp_path, config)
    assert isinstance(head, Eagle3Head)
    assert head.feature_layers == layers
    assert not head.training
    assert head.embed_tokens is target_of("llama").get_input_embeddings()
    tensors = eagle3_tensors(set())
    assert torch.equal(head.target_ids, tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"])


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    tensors = eagle3_tensors(set(), draft_vocab=VOCAB)
    for config in (
        published_config(draft_vocab_size=VOCAB),
        published_config(draft_vocab_size=None),
    ):
        assert load_eagle3(tmp_path, config, tensors).target_ids is None


def test_norms_of_features_are_known_by_their_tensors(tmp_path):
    for flag in ("norm_before_fc", "fc_norm"):
        assert getattr(
            load_eagle3(tmp_path, published_config(), eagle3_tensors({flag})).settings, flag
        )


def test_tensors_may_be_in_several_files_and_have_copies_of_the_target(tmp_path):
    path = write(tmp_path, published_config(), {})
    tensors = eagle3_tensors(set()) | {"verifier_norm.weight": torch.ones(HIDDEN)}
    for index, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / f"model-{index}.safetensors")
    head: Any = load_head(path, target_of("llama"))
    assert torch.equal(head.fc.weight, tensors["fc.weight"])


def test_heads_take_the_dtype_of_the_target(tmp_path):
    target = copy.deepcopy(target_of("llama")).to(torch.bfloat16)
    head: Any = load_head(write(tmp_path, published_config(), eagle3_tensors(set())), target)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert head.target_ids.dtype == torch.int64


def changed(**tensors):
    """Tensors of a head with some of them, by name with _ for ".", replaced or removed."""
    every: dict[str, Any] = eagle3_tensors(set()) | {
        name.replace("__", "."): own for name, own in tensors.items()
    }
    return {name: tensor for name, tensor in every.items() if tensor is not None}


def shifted(by):
    return eagle3_tensors(set())["d2t"] + by


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        (published_config(vocab_size=VOCAB + 1), {}, IncompatibleDraftError, "vocabulary of 102 tokens"),
        (published_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}), {}, IncompatibleDraftError,
         r"hidden states \(2, 3, 9\) of a target that has 0 to 8"),
        (published_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}), {}, IncompatibleDraftError,
         "reads 96 features; 2 hidden states of the target have 64"),
        (published_config(hidden_size=64), {}, IncompatibleDraftError, "hidden size of 64 and no embeddings"),
        (published_config(), {"d2t": shifted(VOCAB)}, IncompatibleDraftError, "d2t of .* different ids"),
        (published_config(), {"t2d": torch.ones(VOCAB + 3, dtype=torch.bool)}, IncompatibleDraftError, "d2t and t2d"),
        (published_config(), {"d2t": None}, UnsupportedModelError, "drafts 40 of 101 tokens, and has no tensor d2t"),
        (published_config(), {"d2t": torch.zeros(39)}, UnsupportedModelError, r"d2t of .* has shape \(39,\)"),
        (published_config(), {"norm__weight": None}, UnsupportedModelError, "it lacks norm.weight"),
        (published_config(), {"midlayer__self_attn__q_norm__weight": torch.ones(16)}, UnsupportedModelError,
         "it has unknown midlayer.self_attn.q_norm.weight"),
        (published_config(), {"lm_head__weight": torch.ones(39, HIDDEN)}, UnsupportedModelError,
         r"lm_head.weight has shape \(39, 32\) and not \(40, 32\)"),
        (published_config(model_type="gemma2"), {}, UnsupportedModelError, "layers of type 'gemma2'"),
        (published_config(num_attention_heads=5), {}, UnsupportedModelError, "invalid config"),
        (published_config(rope_scaling={"rope_type": "spiral"}), {}, UnsupportedModelError, "unknown type 'spiral'"),
        (published_config(eagle_config={"use_aux_hidden_state": False}), {}, UnsupportedModelError, "EAGLE-2"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(tmp_path, config, tensors, error, message):
    with pytest.raises(error, match=message):
        load_eagle3(tmp_path, config, changed(**tensors))


def test_pickled_and_missing_files_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="safetensors files: there are none"):
        load_head(str(tmp_path), target_of("llama"))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin may run code"):
        load_head(str(tmp_path), target_of("llama"))
    path = write(tmp_path, published_config(), eagle3_tensors(set()))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        load_head(path, target_of("llama"))


def test_a_whole_model_is_no_head(tmp_path):
    target = target_of("llama")
    target.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM.*no drafting head.*; these are"
    ):
        load_head(str(tmp_path), target)


def test_repositories_are_downloaded_without_pickled_files(tmp_path, monkeypatch):
    path = write(tmp_path, published_config(), eagle3_tensors(set()))
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return path

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    monkeypatch.setattr(checkpoint, "hub_options", lambda name: {})
    load_head("some/head", target_of("llama"))
    assert asked == [("some/head", ["*.json", "*.safetensors"])]


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_mtp_of_the_targets_own_checkpoint(tmp_path, family):
    target = copy.deepcopy(target_of(family))
    target.save_pretrained(tmp_path)
    target.config.name_or_path = str(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"no tensor named mtp\.fc\.weight"):
        load_mtp(target)
    stock = load_file(tmp_path / "model.safetensors")
    save_file(
        stock | {"model.mtp.layers.0.eh_proj.weight": torch.ones(2, 2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        UnsupportedModelError,
        match=r"a layout that is not implemented, with tensors such as model\.mtp",
    ):
        load_mtp(target)
    save_file(stock, tmp_path / "model.safetensors")
    own = {f"mtp.{name}": tensor.contiguous() for name, tensor in mtp_tensors(family).items()}
    save_file(load_file(tmp_path / "model.safetensors") | own, tmp_path / "model.safetensors")
    head: Any = load_mtp(target)
    assert isinstance(head, MtpHead)
    assert torch.equal(head.fc.weight, own["mtp.fc.weight"])
    assert head.lm_head is target.get_output_embeddings()


def test_mtp_of_another_target_is_refused(tmp_path):
    tensors = {f"mtp.{name}": tensor for name, tensor in mtp_tensors("llama").items()}
    with pytest.raises(IncompatibleDraftError, match="hidden size of 64; the target's is 32"):
        load_head(write(tmp_path, {"hidden_size": 64}, tensors), target_of("llama"))
    tensors["mtp.fc.weight"] = torch.ones(HIDDEN, HIDDEN)
    with pytest.raises(
        IncompatibleDraftError, match=r"fc\.weight has shape \(32, 32\) and not \(32, 64\)"
    ):
        load_head(write(tmp_path, {}, tensors), target_of("llama"))
    tensors = {f"mtp.{name}": tensor for name, tensor in mtp_tensors("qwen3-next").items()}
    with pytest.raises(IncompatibleDraftError, match="it has unknown"):
        load_head(write(tmp_path, CONFIGS["qwen3-next"], tensors), target_of("llama"))


def test_mtp_that_transformers_loads(tmp_path):
    target_of("glm4-moe").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="transformers cannot load the MTP layers"):
        load_mtp(AutoModelForCausalLM.from_pretrained(tmp_path))
    weights: Any = MtpModel(target_of("glm4-moe"), 1).layers[0].state_dict()
    weights = {name: torch.randn_like(weight) for name, weight in weights.items()}
    names = {name: f"model.layers.46.{name.removeprefix('mtp_block.')}" for name in weights}
    names["post_norm.weight"] = "model.layers.46.shared_head.norm.weight"
    own = with_single_experts({names[name]: weight for name, weight in weights.items()})
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    head: Any = load_mtp(target)
    assert isinstance(head, ShippedMtpHead)
    assert head.embed_tokens is target.get_input_embeddings()
    assert not head.training
    for name, weight in head.mtp.layers[0].state_dict().items():
        assert torch.equal(weight, weights[name]), name
