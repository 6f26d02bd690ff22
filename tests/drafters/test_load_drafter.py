"""load_drafter: what it makes of names, folders and models, and what it refuses before any work."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec import (
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecGenerator,
    UnsupportedModelError,
    disable,
    enable,
    load_drafter,
    load_tiny_pair,
)
from hf_slospec.generate.enable import decoder_of
from tests.heads.checkpoints import (
    GROUPED,
    HIDDEN,
    eagle3_tensors,
    published_config,
    speculators_config,
    target_of,
    write,
)
from tests.support.toys.feature_heads import (
    DRAFTS_ALWAYS,
    FOLDERS,
    dflash_config,
    dflash_folder,
    eagle3_folder,
    mtp_folder,
)
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=8)


def assistant_folder(folder):
    tiny_model("llama", noise=0.03).save_pretrained(folder / "assistant")
    return str(folder / "assistant")


def check(method, target):
    ours = SLOSpecGenerator(target, drafter=method, config=DRAFTS_ALWAYS)
    out = assert_same_as_stock(target, ours.generate, ragged_prompts(2), **GREEDY)
    assert method.model is None or sum(metrics.drafted for metrics in out.slo) > 0


SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "lookup": (lambda folder: "lookup", "prompt lookup"),
    "suffix": (lambda folder: "suffix", "suffix trees"),
    "assistant": (assistant_folder, "assistant model"),
    "model": (lambda folder: tiny_model("llama", noise=0.03), "assistant model"),
    "eagle3": (eagle3_folder, "EAGLE-3 head"),
    "mtp": (mtp_folder, "MTP layer"),
    "dflash": (dflash_folder, "DFlash"),
    "head": (lambda folder: load_drafter(eagle3_folder(folder), target_of("llama")).model, "EAGLE-3 head"),
    "sum": (lambda folder: f"lookup + suffix+{eagle3_folder(folder)}", "prompt lookup + suffix trees + EAGLE-3 head"),
    "sequence": (lambda folder: ["lookup", tiny_model("llama")], "prompt lookup + assistant model"),
    "methods": (lambda folder: ["lookup", load_drafter(mtp_folder(folder), target_of("llama"))],
                "prompt lookup + MTP layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind(name, tmp_path):
    """By load_drafter, and by all that take a drafter, without naming the target a second time."""
    source, kind = SOURCES[name]
    target = target_of("llama")
    given = source(tmp_path)
    method = load_drafter(given, target)
    assert repr(method) == f"<hf_slospec drafter: {kind}>"
    check(method, target)
    given = Path(given) if name == "assistant" else given
    assert SLOSpecGenerator(target, drafter=given).decoder.speculator.method.kind == kind
    decoder = decoder_of(enable(target, drafter=given))
    assert decoder is not None and decoder.speculator.method.kind == kind
    disable(target)


def test_from_pretrained_takes_names_folders_and_models(tmp_path):
    target, draft, tokenizer = load_tiny_pair()
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    given = str(tmp_path / "draft")
    ours = SLOSpecGenerator.from_pretrained(str(tmp_path / "target"), drafter=given)
    assert ours.decoder.speculator.method.kind == "assistant model"
    ours = SLOSpecGenerator.from_pretrained(str(tmp_path / "target"), drafter=["lookup", draft])
    assert ours.decoder.speculator.method.kind == "prompt lookup + assistant model"


@pytest.mark.parametrize("drafter", ["lokup", "mtp+lookup", 3, "./nowhere"])
def test_bad_drafters_are_refused_before_the_target_is_loaded(drafter, tmp_path):
    with pytest.raises((InvalidInputError, InvalidTypeError), match="drafter"):
        SLOSpecGenerator.from_pretrained(str(tmp_path / "no such target"), drafter=drafter)


@pytest.mark.parametrize("drafter", ["lokup", "lookup+"])
def test_bad_drafters_are_refused_before_the_target_is_tried(drafter, monkeypatch):
    monkeypatch.setattr("hf_slospec.generate.call.CheckedModel", None)
    for refused in (
        lambda: enable(target_of("llama"), drafter=drafter),
        lambda: SLOSpecGenerator(target_of("llama"), drafter=drafter, fallback=True),
    ):
        with pytest.raises((InvalidInputError, InvalidTypeError), match="lookup, suffix, mtp"):
            refused()


def test_a_folder_with_a_plus_in_its_name(tmp_path):
    (tmp_path / "a+b").mkdir()
    assert load_drafter(eagle3_folder(tmp_path / "a+b"), target_of("llama")).kind == "EAGLE-3 head"


def test_tokenizers_of_the_folders_decide_about_translation(tmp_path):
    """The assistant's tokenizer lies beside it, the target's is given or lies beside the target."""

    def saved(name, tokenizer):
        torch.manual_seed(0)
        ids = dict(
            vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, pad_token_id=None
        )
        model = LlamaForCausalLM(LlamaConfig(**GROUPED | ids)).eval()
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(tmp_path / name)
        return loaded

    tokenizer = byte_level(420)
    other = byte_level(300, 3, eos="</s>")
    target = saved("target", tokenizer)
    draft = saved("draft", other)
    saved("same", tokenizer)
    translated = load_drafter(str(tmp_path / "draft"), target)
    assert translated.kind == "assistant model with another tokenizer"
    assert (
        load_drafter(draft, target, tokenizer=tokenizer, assistant_tokenizer=other).kind
        == translated.kind
    )
    assert load_drafter(str(tmp_path / "same"), target).kind == "assistant model"
    inputs = dict(
        tokenizer(
            ["import os\n", "def f(x):"], return_tensors="pt", padding=True, padding_side="left"
        )
    )
    ours = SLOSpecGenerator(target, drafter=translated, tokenizer=tokenizer, config=DRAFTS_ALWAYS)
    assert_same_as_stock(target, ours.generate, inputs, **GREEDY, pad_token_id=0)
    with pytest.raises(IncompatibleDraftError, match="vocabulary"):
        load_drafter(tiny_model("llama"), target)


def empty(folder):
    return write(folder / "none", {"model_type": "nothing"}, {"weight": torch.ones(2)})


def with_files(folder, config, weights=None):
    """A folder with these files; other weights are valid ones."""
    path = Path(write(folder / "files", {}, {"weight": torch.ones(2)}))
    (path / "config.json").write_text(config)
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    return str(path)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "number": (lambda folder: 3, InvalidTypeError, "got 3"),
    "nothing": (lambda folder: "", InvalidTypeError, "got ''"),
    "none of them": (lambda folder: [], InvalidTypeError, r"got \[\]"),
    "no folder": (lambda folder: str(folder / "missing"), InvalidInputError, "there is no folder .*by name are lookup"),
    "no name": (lambda folder: "lokup", InvalidInputError, "lokup is neither a folder .*by name are lookup, suffix"),
    "model named first": (lambda folder: "mtp+lookup", InvalidInputError, "before its last part"),
    "object": (lambda folder: object(), InvalidTypeError, r"must be a name \(lookup.*methods 'draft'.*object"),
    "model first": (lambda folder: f"{eagle3_folder(folder)}+lookup", InvalidInputError, "before its last part"),
    "two models": (lambda folder: [tiny_model("llama"), tiny_model("llama")], InvalidInputError, "at most one part"),
    "long name": (lambda folder: "9" * 5000, InvalidInputError, "neither a folder nor a repository"),
    "config that is a list": (lambda folder: with_files(folder, "[1]"), UnsupportedModelError, "must hold an object"),
    "deep config": (lambda folder: with_files(folder, "[" * 10**5), UnsupportedModelError, "cannot be read"),
    "broken weights": (lambda folder: with_files(folder, "{}", b"x"), UnsupportedModelError, "cannot be read"),
    "config of wrong types": (lambda folder: with_files(folder, '{"model_type": "llama", "hidden_size": "x"}'),
                              UnsupportedModelError, "neither a known head nor a causal LM"),
    "no mtp": (lambda folder: "mtp", InvalidInputError, "target was not loaded from"),
    "no model": (empty, UnsupportedModelError, "neither a known head nor a causal LM"),
    "medusa": (lambda folder: write(folder / "m", speculators_config(speculators_model_type="medusa"),
                                    {"weight": torch.ones(2)}), UnsupportedModelError, "head of type 'medusa'"),
    "mask": (lambda folder: _changed_dflash(folder, mask_token_id=VOCAB), UnsupportedModelError, "mask_token_id 101"),
}  # fmt: skip


def _changed_dflash(folder, **changes):
    path = Path(dflash_folder(folder))
    fields = dflash_config()
    fields["dflash_config"] |= changes
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def other_target(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**GROUPED | dict(num_hidden_layers=8) | changes)).eval()


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("changes", [dict(hidden_size=2 * HIDDEN), dict(vocab_size=VOCAB - 8)])
def test_heads_of_other_targets_are_refused_before_any_work(kind, changes, tmp_path):
    method = load_drafter(FOLDERS[kind](tmp_path), target_of("llama"))
    other = other_target(**changes)
    for refused in (
        lambda: SLOSpecGenerator(other, drafter=method),
        lambda: load_drafter(["lookup", method], other),
    ):
        with pytest.raises(IncompatibleDraftError, match="hidden size of 32; this one has"):
            refused()
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        SLOSpecGenerator(other_target(num_hidden_layers=2), drafter=method)


@pytest.mark.parametrize("kind", FOLDERS)
def test_targets_that_were_cast_or_moved_since(kind, tmp_path):
    """Modules that the head shares with the target are cast with it, the head's own are not."""
    path = FOLDERS[kind](tmp_path)
    target = copy.deepcopy(target_of("llama"))
    method = load_drafter(path, target)
    ours = SLOSpecGenerator(target, drafter=method, config=DRAFTS_ALWAYS)
    assert_same_as_stock(target, ours.generate, ragged_prompts(2), **GREEDY)
    target.to(torch.bfloat16)
    with pytest.raises(
        IncompatibleDraftError, match=r"in torch\.float32 on cpu and the target in torch\.bfloat16"
    ):
        ours.generate(**ragged_prompts(2), **GREEDY)
    with pytest.raises(
        IncompatibleDraftError, match="load it again after the target was moved or cast"
    ):
        SLOSpecGenerator(target, drafter=method)
    SLOSpecGenerator(target, drafter=load_drafter(path, target))
    meta = load_drafter(path, copy.deepcopy(target_of("llama")).to("meta"))
    with pytest.raises(IncompatibleDraftError, match="on meta and the target"):
        SLOSpecGenerator(target_of("llama"), drafter=meta)


def other_format(folder, config, *names, **tensors):
    shapes = {name: torch.ones(2, 2) for name in names}
    return write(
        folder / "head",
        config,
        shapes | {name.replace("__", "."): own for name, own in tensors.items()},
    )


def draft_folder_with(folder, config, *lacking, **tensors):
    """A folder with a whole causal LM, changed as other formats that have its tensors are."""
    path = Path(assistant_folder(folder))
    fields = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(fields))
    own = load_file(path / "model.safetensors") | {
        name.replace("__", "."): one for name, one in tensors.items()
    }
    save_file(
        {name: one for name, one in own.items() if name not in lacking}, path / "model.safetensors"
    )
    return str(path)


NOT_FINITE = eagle3_tensors(set())
NOT_FINITE["fc.weight"][0, 0] = torch.nan
EAGLE = dict(fc__weight=torch.ones(HIDDEN, 2 * HIDDEN))
# Publishers' layouts that are not loaded; the first was taken for a causal LM.
REFUSED |= {
    "eagle": (lambda folder: draft_folder_with(folder, {}, "lm_head.weight", "model.norm.weight", **EAGLE),
              UnsupportedModelError, "an EAGLE-1, EAGLE-2 or HASS head"),
    "medusa": (
        lambda folder: other_format(folder, {}, "medusa_head.0.0.linear.weight"),
        UnsupportedModelError,
        "a Medusa head .*, which cannot be loaded, as its residual blocks, one for each position, are not implemented",
    ),
    "mlp speculator": (
        lambda folder: other_format(folder, dict(architectures=["MLPSpeculatorPreTrainedModel"]), "head.0.weight"),
        UnsupportedModelError,
        "an MLP speculator of IBM, .* as its MLPs over the last hidden state are not implemented",
    ),
    "base model": (lambda folder: draft_folder_with(folder, {"architectures": ["LlamaModel"]}),
                   UnsupportedModelError, "neither a known head nor a causal LM: its class is LlamaModel"),
    "incomplete": (lambda folder: draft_folder_with(folder, {}, "model.norm.weight"),
                   UnsupportedModelError, "it lacks model.norm.weight"),
    "not finite": (lambda folder: write(folder / "nan", published_config(), NOT_FINITE), UnsupportedModelError,
                   r"NaN or infinite weights, in fc\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sources_that_are_refused(name, tmp_path):
    source, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        load_drafter(source(tmp_path), target_of("llama"))


def test_heads_without_a_window_that_name_one(tmp_path):
    """A window that no layer uses, as configs copied from a target's have it."""
    for changes in (
        dict(layer_types=["full_attention"]),
        dict(use_sliding_window=False),
        dict(layer_types=None),
    ):
        path = write(
            tmp_path / next(iter(changes)),
            published_config(sliding_window=8, **changes),
            eagle3_tensors(set()),
        )
        check(load_drafter(path, target_of("llama")), target_of("llama"))
