"""Calls with ``assistant_tokenizer``, for assistant models with another vocabulary (universal
assisted generation).
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, pipeline

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecGenerator,
    UnsupportedOptionError,
)
from hf_slospec.heads.translated import TranslatedMethod
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import assert_same_as_stock, sharpened
from tests.support.toys.tiny_tokenizers import byte_level, sentencepiece_like

TOKENIZER = byte_level(400)
ASSISTANT_TOKENIZER = sentencepiece_like(2100)
PROMPTS = ["def add(left, right):\n", "class Queue:\n    def put(self, item):\n        self."]
NEW = dict(max_new_tokens=quick_or(12, 24))


def model_of(tokenizer, seed):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return sharpened(lambda: AutoModelForCausalLM.from_config(config), seed)


ASSISTANT = model_of(ASSISTANT_TOKENIZER, 1)
PAIR = dict(assistant_model=ASSISTANT, tokenizer=TOKENIZER, assistant_tokenizer=ASSISTANT_TOKENIZER)


@pytest.fixture
def target():
    model = model_of(TOKENIZER, 0)
    yield model
    hf_slospec.disable(model)


def inputs(batch):
    return dict(TOKENIZER(PROMPTS[:batch], return_tensors="pt", padding=True, padding_side="left"))


def test_speculators_are_kept_for_the_next_call_with_the_same_tokenizers(target):
    hf_slospec.enable(target, config=DRAFTS_ALWAYS)
    decoder = target.generate.decoder
    speculator = decoder.speculator_for(*PAIR.values())
    assert isinstance(speculator.method, TranslatedMethod)
    assert decoder.speculator_for(*PAIR.values()) is speculator
    other = {**PAIR, "assistant_tokenizer": copy.deepcopy(ASSISTANT_TOKENIZER)}
    assert decoder.speculator_for(*other.values()) is not speculator


def test_a_generator_knows_the_targets_tokenizer_and_takes_no_other_at_submit(target):
    generator = SLOSpecGenerator(target, config=DRAFTS_ALWAYS, **PAIR)
    later = dict(assistant_model=ASSISTANT, assistant_tokenizer=ASSISTANT_TOKENIZER)
    ours = generator.generate(**inputs(1), **NEW, do_sample=False, **later)
    assert torch.equal(ours, target.generate(**inputs(1), **NEW, do_sample=False))
    with generator, pytest.raises(UnsupportedOptionError, match="assistant_tokenizer"):
        generator.submit(PROMPTS[0], **NEW, assistant_tokenizer=ASSISTANT_TOKENIZER)


def test_pipelines_with_another_vocabulary(target):
    new = dict(max_new_tokens=12, do_sample=False, return_full_text=False)
    stock = pipeline("text-generation", model=target, tokenizer=TOKENIZER, device="cpu")(
        PROMPTS[0], **new
    )
    pipe = pipeline(
        "text-generation", model=target, tokenizer=TOKENIZER, device="cpu", assistant_model=ASSISTANT,
        assistant_tokenizer=ASSISTANT_TOKENIZER,
    )  # fmt: skip
    hf_slospec.enable(target, always=True)
    assert pipe(PROMPTS[0], **new) == stock
    hf_slospec.enable(target)
    assert pipe(PROMPTS[0], **new, slo_tpot=1.0) == stock


def test_an_assistant_tokenizer_without_an_assistant_is_not_read(target):
    hf_slospec.enable(target)
    for tokenizers in (
        {"assistant_tokenizer": ASSISTANT_TOKENIZER},
        {**PAIR, "assistant_model": None},
    ):
        ours = target.generate(**inputs(2), **NEW, do_sample=False, slo_tpot=1.0, **tokenizers)
        assert torch.equal(ours, target.generate(**inputs(2), **NEW, do_sample=False))


@pytest.mark.parametrize("fallback", [False, True])
def test_wrong_tokenizers_are_refused_by_name(target, fallback):
    hf_slospec.enable(target, fallback=fallback)

    def call(**changed):
        return target.generate(**inputs(1), **NEW, slo_tpot=1.0, **{**PAIR, **changed})

    class Decoding:
        def __call__(self, text): ...
        def decode(self, ids): ...

    for wrong in ("x", 3, object(), Decoding()):
        with pytest.raises(InvalidTypeError, match="assistant_tokenizer"):
            call(assistant_tokenizer=wrong)
        with pytest.raises(InvalidTypeError, match=r"^tokenizer"):
            call(tokenizer=wrong)
    with pytest.raises(InvalidTypeError, match="assistant_tokenizer"):
        call(assistant_model=None, assistant_tokenizer="x")
    with pytest.raises(InvalidInputError, match="without tokenizer"):
        call(tokenizer=None)
    with pytest.raises(InvalidTypeError, match="assistant_tokenizer"):
        hf_slospec.enable(target, ASSISTANT, tokenizer=TOKENIZER, assistant_tokenizer="x")


def test_without_assistant_tokenizer_the_error_says_what_to_pass(target):
    hf_slospec.enable(target)
    arguments = {
        **inputs(1),
        **NEW,
        "assistant_model": ASSISTANT,
        "tokenizer": TOKENIZER,
        "slo_tpot": 1.0,
    }
    with pytest.raises(IncompatibleDraftError, match="assistant_tokenizer"):
        target.generate(**arguments)
    with pytest.warns(FallbackWarning):
        ours = target.generate(**arguments, fallback=True, do_sample=False)
    assert torch.equal(ours, target.generate(**inputs(1), **NEW, do_sample=False))


def test_vocabularies_of_one_size_need_no_assistant_tokenizer_as_in_stock(target):
    draft = copy.deepcopy(target)
    same = dict(assistant_model=draft, tokenizer=TOKENIZER, assistant_tokenizer=TOKENIZER)
    hf_slospec.enable(target)
    with pytest.raises(ValueError, match="assistant_tokenizer"):
        target.generate(**inputs(1), **NEW, **same)
    with pytest.raises(InvalidInputError, match="leave it out"):
        target.generate(**inputs(1), **NEW, **same, slo_tpot=1.0)
    generator = SLOSpecGenerator(target, **same, config=DRAFTS_ALWAYS)
    assert not isinstance(generator.decoder.speculator.method, TranslatedMethod)
    assert_same_as_stock(target, generator.generate, inputs(2), **NEW, do_sample=False)


def test_padded_embeddings_of_one_tokenizer_need_no_translation(target):
    draft = copy.deepcopy(target)
    draft.resize_token_embeddings(len(TOKENIZER) + 24)
    hf_slospec.enable(target, config=DRAFTS_ALWAYS)
    same = dict(assistant_model=draft, tokenizer=TOKENIZER, assistant_tokenizer=TOKENIZER)
    generate = lambda **kwargs: target.generate(**kwargs, **same, slo_tpot=1.0)  # noqa: E731
    assert_same_as_stock(target, generate, inputs(2), **NEW, do_sample=False)
    method = target.generate.decoder.speculator_for(*same.values()).method
    assert not isinstance(method, TranslatedMethod)
