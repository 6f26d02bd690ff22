"""Stop strings are found exactly where transformers' own criterion finds them, without its tables."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from hf_slospec.generate import rows as stop_strings
from hf_slospec.generate.rows import StopStrings
from tests.support.toys.tiny_tokenizers import FOREIGN, byte_level, sentencepiece_like


def whole_words():
    """A tokenizer without a decoder, whose tokens are compared as texts."""
    words = {
        word: index
        for index, word in enumerate(["[UNK]", *"abcdef a b ab ba stop st op s t o p 好".split()])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


TOKENIZERS = {
    "bytes": lambda: byte_level(500),
    "fallback": lambda: sentencepiece_like(500),
    "words": whole_words,
}


def criterion(kind, tokenizer, stops):
    try:
        return kind(tokenizer=tokenizer, stop_strings=stops)
    except ValueError:
        return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_are_found_where_stock_finds_them(name):
    tokenizer = TOKENIZERS[name]()
    rng = random.Random(0)
    num_found = num_refused = 0
    for _ in range(25):
        texts = [
            tokenizer.decode(rng.choices(range(len(tokenizer)), k=rng.randint(1, 3)))
            for _ in range(4)
        ]
        texts += [FOREIGN[rng.randrange(len(FOREIGN)) :]]
        stops = [
            text[rng.randint(0, 2) :][: rng.randint(1, 9)] or "s"
            for text in rng.sample(texts, rng.randint(1, 4))
        ]
        stock, ours = (
            criterion(kind, tokenizer, stops) for kind in (StopStringCriteria, StopStrings)
        )
        assert (stock is None) == (ours is None), stops
        if stock is None:
            num_refused += 1
            continue
        rows = []
        for number in range(60):
            tokens = rng.choices(range(len(tokenizer) + 2), k=12)  # two beyond the vocabulary
            if number % 2:
                ends = tokenizer(rng.choice(texts) + rng.choice(stops), add_special_tokens=False)[
                    "input_ids"
                ]
                tokens = (tokens + ends[: rng.randint(1, len(ends))])[-12:] if ends else tokens
            rows.append(tokens)
        ids = torch.tensor(rows)
        for length in (1, 12):
            expected = stock(ids[:, -length:], None)
            assert ours(ids[:, -length:], None).tolist() == expected.tolist(), stops
            num_found += int(expected.sum())
    assert num_found > 20 and (num_refused or name != "words")


def test_stop_strings_need_no_embedding_table(monkeypatch):
    def refuse(*_):
        raise AssertionError("the tables of 200 strings take minutes")

    monkeypatch.setattr(StopStringCriteria, "_stop_string_create_embedding_vec", refuse)
    tokenizer = byte_level(500)
    ours = StopStrings(tokenizer, [f"{number:040d}" for number in range(200)])
    ids = tokenizer("x" + f"{7:040d}")["input_ids"]
    assert (
        ours(torch.tensor([ids]), None).tolist() == [True]
        and not ours(torch.tensor([ids[:-1]]), None).any()
    )


def test_added_tokens_can_complete_stop_strings(monkeypatch):
    tokenizer = whole_words()
    monkeypatch.setattr(stop_strings, "_known", stop_strings.WeakKeyDictionary())
    assert criterion(StopStrings, tokenizer, ["zz"]) is None
    tokenizer.add_tokens(["zz"])
    ours = StopStrings(tokenizer, ["zz"])
    assert ours(torch.tensor([[1, len(tokenizer) - 1]]), None).tolist() == [True]
