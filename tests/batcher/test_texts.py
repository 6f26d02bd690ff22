"""Text of tokens that arrive in steps, and stop strings in it, with small tokenizers of all kinds."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_slospec.batcher.texts import Detokenizer, OutputStopStrings, StoppedText, TextStream
from tests.support.breadth import quick_or
from tests.support.toys.tiny_tokenizers import BYTE_TOKENS, byte_level, sentencepiece_like

SETTINGS = settings(max_examples=quick_or(40, 100))
WORDS = [
    "the keys to the cabinet are on the table",
    "he isn't here , and I don't know ! It's \" 'tis .",
]


@functools.cache
def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        WORDS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@functools.cache
def cleaned_word_piece():
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(word_piece().backend_tokenizer.to_str()), unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", clean_up_tokenization_spaces=True,
    )  # fmt: skip


@functools.cache
def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator([*WORDS, "a  b    c"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@functools.cache
def sentencepiece_without_strip():
    whole = json.loads(sentencepiece_like(500).backend_tokenizer.to_str())
    whole["decoder"]["decoders"].pop()  # as Gemma's
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)), eos_token="</s>"
    )


KINDS = {
    "byte-level": lambda: byte_level(400),
    "sentencepiece": lambda: sentencepiece_like(500),
    "gemma": sentencepiece_without_strip,
    "wordpiece": word_piece,
    "wordpiece-cleaned": cleaned_word_piece,
    "metaspace": metaspace,
}


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


def streamed(stream, tokens, ends):
    """Text of the tokens, pushed in steps that end at these positions."""
    cuts = [0, *sorted(end for end in ends if end < len(tokens)), len(tokens)]
    steps = list(itertools.pairwise(cuts))
    return "".join(
        stream.push(tokens[begin:end], at == len(steps) - 1)
        for at, (begin, end) in enumerate(steps)
    )


def token_lists(tokenizer):
    """Token ids, many of them of few bytes, spaces, marks and special tokens."""
    names = [BYTE_TOKENS[byte] for byte in (0x0A, 0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99)]
    names += [
        "Ġ",
        "ä",
        "½",
        "▁",
        "▁▁",
        "Ċ",
        ".",
        ",",
        "'",
        "n",
        "t",
        "s",
        "!",
        "</s>",
        "<|user|>",
        "[SEP]",
    ]
    vocab = tokenizer.get_vocab()
    odd = sorted({vocab[name] for name in names if name in vocab})
    return st.lists(
        st.one_of(st.sampled_from(odd), st.integers(0, len(tokenizer) - 1)), max_size=24
    )


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@SETTINGS
def test_pieces_join_to_the_text_however_steps_end(kind, skips, data):
    tokenizer = KINDS[kind]()
    to_text = Detokenizer(tokenizer, skips)
    tokens = data.draw(token_lists(tokenizer))
    ends = data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens)))
    assert streamed(TextStream(to_text), tokens, ends) == tokenizer.decode(
        tokens, skip_special_tokens=skips
    )
    assert streamed(TextStream(to_text), tokens, list(range(len(tokens)))) == to_text(tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@SETTINGS
def test_output_is_the_text_behind_the_prompt_however_steps_end(kind, data):
    tokenizer = KINDS[kind]()
    to_text = Detokenizer(tokenizer)
    prompt = tokenizer("the keys to " * data.draw(st.integers(1, 9)))["input_ids"]
    tokens = data.draw(token_lists(tokenizer))
    ends = data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens)))
    whole = to_text([*prompt, *tokens])
    before = to_text(prompt)
    assert streamed(TextStream(to_text, prompt), tokens, ends) == whole[len(before) :]


def end_of(texts, stops, min_tokens):
    """Tokens until a stop string is complete, and which one is; ``texts`` are those after every
    token, from none on.
    """
    before = len(texts[min(min_tokens, len(texts) - 1)].rstrip("\ufffd")) if min_tokens else 0
    for number in range(min_tokens + 1, len(texts)):
        matches = []
        for stop in stops:
            begins = [at for at in range(len(texts[number])) if texts[number].startswith(stop, at)]
            matches += [(at + len(stop), at, stop) for at in begins if at + len(stop) > before]
        if matches:
            return number, min(matches)[2]
    return len(texts) - 1, None


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma", "wordpiece", "metaspace"])
@given(data=st.data())
@SETTINGS
def test_outputs_end_and_are_cut_where_their_text_has_a_stop_string(kind, keeps, data):
    tokenizer = KINDS[kind]()
    to_text = Detokenizer(tokenizer)
    prompt = tokenizer("the keys to the cabinet\n")["input_ids"]
    tokens = data.draw(token_lists(tokenizer))
    texts = [
        to_text([*prompt, *tokens[:number]])[len(to_text(prompt)) :]
        for number in range(len(tokens) + 1)
    ]
    parts = st.sampled_from([*texts, "\n the", "zz"]).filter(bool) if any(texts) else st.just("zz")
    pieces = st.builds(
        lambda text, at, size: text[at : at + size], parts, st.integers(0, 9), st.integers(1, 4)
    )
    stops = data.draw(
        st.lists(
            pieces.filter(lambda piece: piece and "\ufffd" not in piece), min_size=1, max_size=3
        )
    )
    min_tokens = data.draw(st.integers(0, len(tokens) + 1))
    length, stop = end_of(texts, stops, min_tokens)
    criterion = OutputStopStrings(to_text, stops, len(prompt), min_tokens)
    met = [
        bool(criterion(torch.tensor([[*prompt, *tokens[: at + 1]]]), None)) for at in range(length)
    ]
    assert met == [False] * (length - (stop is not None)) + [True] * (stop is not None)
    text = StoppedText(to_text, stops, keeps, prompt, min_tokens)
    found = streamed(
        text, tokens[:length], data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    )
    assert text.stop_string == stop
    if stop is None:
        assert found == texts[-1]
    else:
        assert found == texts[length][: len(found)] and texts[length][
            len(found) - len(stop) * keeps :
        ].startswith(stop)


def test_heads_of_stop_strings_wait_for_what_follows():
    tokenizer = byte_level(400)
    text = StoppedText(Detokenizer(tokenizer), ["</code>"])
    pushed = [
        text.push(tokenizer(piece)["input_ids"], False) for piece in ("x <", "/c", "at </", "code>")
    ]
    assert pushed == ["x ", "", "</cat ", ""] and text.stop_string == "</code>"
    text = StoppedText(Detokenizer(tokenizer), ["</code>"])
    assert [text.push(tokenizer("x </co")["input_ids"], last) for last in (False,)] == ["x "]
    assert text.push([], True) == "</co", "the end shows what was held"


def test_special_tokens_that_are_not_shown_end_outputs_too():
    tokenizer = byte_level(400)
    (user,) = ids_of(tokenizer, "<|user|>")
    hello = tokenizer("Hello")["input_ids"]
    for stop, expected in (("<|user|>", "Hello"), ("lo<|user|>", "Hel"), ("HelloH", "")):
        tokens = [*hello, user, *hello]
        criterion = OutputStopStrings(Detokenizer(tokenizer), stop, 1)
        met = [
            bool(criterion(torch.tensor([[user, *tokens[: at + 1]]]), None))
            for at in range(len(tokens))
        ]
        length = met.index(True) + 1
        text = StoppedText(Detokenizer(tokenizer), [stop])
        assert (text.push(tokens[:length], True), text.stop_string) == (expected, stop)
        assert (length == len(hello) + 1) == stop.endswith("<|user|>")


@example(b"\xe4\xbd\xa0 the\n")
@given(st.binary(max_size=12))
def test_bytes_of_tokens_join_to_the_text(data):
    for tokenizer in (byte_level(400), sentencepiece_like(500)):
        to_text = Detokenizer(tokenizer)
        text = data.decode(errors="ignore")
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined = b"".join(map(to_text.token_bytes, tokens)).decode()
        assert joined.removeprefix(" ") == text.removeprefix(" ")


def test_bytes_of_word_pieces_have_the_space_before_words():
    to_text = Detokenizer(word_piece())
    tokens = word_piece()("the keys , don't")["input_ids"]
    assert b"".join(map(to_text.token_bytes, tokens)).decode().lstrip() == to_text(tokens)
