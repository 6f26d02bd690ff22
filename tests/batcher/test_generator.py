"""Generators from saved models."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_slospec
from hf_slospec import InvalidInputError, InvalidTypeError, SLOSpecGenerator
from hf_slospec.batcher.submission import inputs_of_texts
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_encoder_decoders import tiny_text_model, tiny_whisper
from tests.support.toys.tiny_models import assert_same_as_stock


def test_from_pretrained_reads_folders(tmp_path):
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    for name, part in (("target", target), ("draft", draft)):
        part.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    generator = SLOSpecGenerator.from_pretrained(
        str(tmp_path / "target"),
        assistant_model=str(tmp_path / "draft"),
        dtype="auto",
        device_map="auto",
    )
    inputs = generator.tokenizer(["import os\n"], return_tensors="pt")
    assert_same_as_stock(generator.model, generator.generate, dict(inputs), **OPTIONS)


def test_from_pretrained_refuses_two_ways_to_draft_before_it_loads():
    with pytest.raises(InvalidInputError, match="give one of them"):
        SLOSpecGenerator.from_pretrained("./nowhere", "./nowhere", drafter="lookup")


def test_from_pretrained_takes_the_name_of_a_drafter_as_second_argument(tmp_path):
    target, _, tokenizer = hf_slospec.load_tiny_pair()
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path)
    generator = SLOSpecGenerator.from_pretrained(str(tmp_path), "lookup")
    assert generator.draft_method.kind == "prompt lookup" and generator.assistant_model is None


TEXTS = ["import os\n", "def fibonacci(n):\n    if n < 2:\n", "class A"]


def test_texts_are_encoded_and_padded_on_the_left(pair, served):
    target, _, tokenizer = pair
    pads_right = copy.deepcopy(tokenizer)
    pads_right.padding_side = "right"
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    stock = target.generate(**inputs, **OPTIONS)
    assert torch.equal(served.generate(TEXTS, **OPTIONS, slo_tpot=0.1), stock)
    assert torch.equal(served.generate(TEXTS, tokenizer=pads_right, **OPTIONS), stock)
    one = served.generate(TEXTS[1], **OPTIONS, return_dict_in_generate=True)
    assert torch.equal(one.sequences, stock[1:2]) and len(one.slo) == 1


def test_chats_are_encoded_by_the_template(pair, served):
    templated = copy.deepcopy(pair[2])
    templated.chat_template = "{% for m in messages %}# {{ m['content'] }}\n{% endfor %}"
    chats = [[{"role": "user", "content": text}] for text in ("number two", "one")]
    expected = served.generate(["# number two\n", "# one\n"], **OPTIONS)
    assert torch.equal(served.generate(chats, tokenizer=templated, **OPTIONS), expected)
    assert torch.equal(served.generate(chats[0], tokenizer=templated, **OPTIONS), expected[:1])


class Characters:
    """Encodes a text by its characters."""

    def __init__(self, pad_token_id, eos_token_id):
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id

    def __call__(self, text):
        return {"input_ids": [ord(character) % 50 + 3 for character in text]}


@pytest.mark.parametrize(
    ("pad", "eos", "padding"), [(1, 2, 1), (None, 2, 2), (None, None, 0), (0, 2, 0)]
)
def test_texts_of_an_encoder_are_padded_on_the_right(pad, eos, padding):
    characters = Characters(pad, eos)
    inputs = inputs_of_texts(["ab", "abcd"], tiny_text_model("Bart"), {"tokenizer": characters})
    a, b, c, d = characters("abcd")["input_ids"]
    assert inputs["inputs"].tolist() == [[a, b, padding, padding], [a, b, c, d]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        ("", {}, InvalidInputError, "prompt is empty"),
        (["a", ""], {}, InvalidInputError, "prompt is empty"),
        ("a", {"attention_mask": torch.ones(1, 1)}, InvalidInputError, "attention_mask cannot be"),
        ("a", {"tokenizer": None}, InvalidInputError, "needs a tokenizer; give SLOSpecGenerator"),
        (["a", 1], {}, InvalidTypeError, "a text or chat messages, or a list of these"),
        ([], {}, InvalidTypeError, "inputs must be a tensor of token ids"),
        ([{"role": "user", "content": "a"}], {}, InvalidInputError, "no chat template"),
    ],
    ids=str,
)
def test_texts_that_cannot_be_encoded_are_refused(served, texts, options, error, words):
    with pytest.raises(error, match=words):
        served.generate(texts, **options)


def test_texts_for_a_model_that_listens_are_refused():
    with pytest.raises(InvalidInputError, match="takes input_features"):
        inputs_of_texts("a", tiny_whisper(), {"tokenizer": Characters(None, None)})
