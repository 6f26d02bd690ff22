"""Translation between tokenizers: texts stay the same, and so do the tokens in front of what is
new.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_slospec import IncompatibleDraftError, tiny_prompts
from hf_slospec.heads.translation import DraftTokens, TokenTranslation
from hf_slospec.model.kept_prefixes import num_common
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import quick_or
from tests.support.toys.tiny_tokenizers import (
    FOREIGN,
    byte_level,
    sentencepiece_like,
    with_other_ids,
)
from tests.support.toys.trees import SEEDS

LARGE = byte_level(420)
SMALL = byte_level(300, 3, eos="</s>")
SPACED = sentencepiece_like(600)
PERMUTED = with_other_ids(LARGE, np.random.default_rng(0).permutation(len(LARGE)).tolist())
TOKENIZERS = {"large": LARGE, "small": SMALL, "spaced": SPACED, "permuted": PERMUTED}
PAIRS = list(itertools.product(TOKENIZERS, TOKENIZERS))


def translation(target, draft):
    return TokenTranslation(target, draft, len(target), len(draft))


TRANSLATIONS = {pair: translation(*(TOKENIZERS[name] for name in pair)) for pair in PAIRS}


def assert_same_text(own, tokens, translated):
    """Compare two texts, up to one space before them, which some tokenizers add unless there is
    one.

    Tokenizers that write ▁ for a space cannot tell it from one.
    """
    text, other = (
        data.replace("▁".encode(), b" ")
        for data in (own.target.text(tokens), own.draft.text(translated))
    )
    assert other.lstrip(b" ") == text.lstrip(b" ") and abs(len(other) - len(text)) <= 1


def committed(tokenizer, text, seed, is_random):
    """Tokens of a text, or tokens that no tokenizer would find in any."""
    if is_random:
        rng = np.random.default_rng(seed)
        ordinary = [
            token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids
        ]
        return rng.choice(ordinary, 60).tolist()
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


PARTS = [
    "    ",
    " ",
    "\n\n",
    "é",
    "你好",
    "👩‍🚀",
    "🎉",
    "self",
    " the",
    "return ",
    "▁",
    "Ġ",
    "x1",
    FOREIGN,
    "def f(a):\n",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), min_size=1, max_size=40).map("".join)


@given(pair=st.sampled_from(PAIRS), text=TEXTS, seed=SEEDS, is_random=st.booleans())
@settings(deadline=None, max_examples=quick_or(33, 100))
def test_texts_stay_the_same_and_keep_their_common_prefix(pair, text, seed, is_random):
    own = TRANSLATIONS[pair]
    rng = np.random.default_rng(seed)
    tokens = committed(TOKENIZERS[pair[0]], text, seed, is_random)
    # Names of special tokens that the draft lacks become text, which that of the target's tokens
    # does not have.
    left = [
        token for token in tokens if own._special.get(token) in (None, [], [own._same.get(token)])
    ] or [5]
    request = Request(0, RequestParams(left[:1], 1000))
    del left[:1]
    draft = DraftTokens(own, request)
    while True:
        before = list(draft.tokens)
        assert draft.update() == num_common(before, draft.tokens)
        assert_same_text(own, request.tokens, draft.tokens)
        assert draft.update() == len(draft.tokens)
        if not left:
            break
        size = int(rng.integers(1, 9))
        request.tokens += left[:size]
        del left[:size]
    assert_same_text(own, request.tokens, own.translate(request.tokens).tokens)
    if "permuted" in pair and "large" in pair:
        assert draft.tokens == [own._same[token] for token in request.tokens]
    data = own.target.text(request.tokens)
    if data == data.decode(errors="ignore").encode():
        texts = zip(pair, (request.tokens, draft.tokens), strict=True)
        decoded = [
            TOKENIZERS[name].decode(tokens, skip_special_tokens=True) for name, tokens in texts
        ]
        assert len({text.replace("▁", " ").lstrip(" ") for text in decoded}) == 1


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_text_that_grows_is_split_as_the_whole_text_is(pair):
    own = TRANSLATIONS[pair]
    text = "#" + "".join(tiny_prompts()[10:14]) + FOREIGN.replace("▁", "")
    tokens = TOKENIZERS[pair[0]](text, add_special_tokens=False)["input_ids"]
    request = Request(0, RequestParams(tokens[:20], 10**6))
    draft = DraftTokens(own, request)
    changed = 0
    for place in range(20, len(tokens), 3):
        before = len(draft.tokens)
        changed = max(changed, before - draft.update())
        request.tokens += tokens[place : place + 3]
    draft.update()
    whole = TOKENIZERS[pair[1]](text)["input_ids"]
    differing = [
        place
        for place, (one, other) in enumerate(zip(draft.tokens, whole, strict=False))
        if one != other
    ]
    assert (len(draft.tokens), differing) == (len(whole), [])
    assert changed <= 24  # tokens that are processed again


def test_the_same_text_is_the_same_token_whatever_the_space_sign():
    own = translation(SPACED, LARGE)
    pairs = {
        (SPACED.decode([a]), LARGE.decode([b]).strip())
        for a, b in zip(own.target_ids, own.draft_ids, strict=True)
    }
    assert ("self", "self") in pairs
    texts = [own.target.keys[int(token)] for token in own.target_ids]
    assert sum(text.startswith(b" ") for text in texts if isinstance(text, bytes)) > 3
    assert b"\xf0" in texts
    assert len({*texts}) == len(texts)  # <0x41> is not proposed beside A
    byte = SPACED.convert_tokens_to_ids("<0x41>")
    assert byte not in own.target_ids and own._same[byte] == LARGE.convert_tokens_to_ids("A")


def test_special_tokens_by_name_and_by_role():
    own = translation(LARGE, SPACED)  # <|endoftext|>, <|user|>; <s>, </s>
    end = LARGE.eos_token_id
    user = LARGE.convert_tokens_to_ids("<|user|>")
    assert (
        own._same[end] == SPACED.eos_token_id and int(own.draft_id_of[end]) == SPACED.eos_token_id
    )
    assert end in own.target_ids
    named = own.translate([user]).tokens
    assert named[0] == SPACED.bos_token_id and own.draft.text(named) == b" <|user|>"
    back = translation(SPACED, LARGE)
    assert back.translate([SPACED.bos_token_id, SPACED.eos_token_id]).tokens == [LARGE.eos_token_id]
    same = translation(LARGE, PERMUTED)
    assert same.translate([user, end]).tokens == [same._same[user], same._same[end]]
    empty = DraftTokens(back, Request(0, RequestParams([SPACED.bos_token_id], 9)))
    empty.update()
    assert empty.tokens == [back.filler]
    beginning = SPACED("Hello")["input_ids"]
    assert translation(SPACED, SPACED).translate(beginning).tokens == beginning  # one <s>


def test_ids_outside_either_model_are_no_proposals():
    own = TokenTranslation(LARGE, PERMUTED, 300, 350)
    assert int(own.target_ids.max()) < 300 and int(own.draft_ids.max()) < 350
    assert own.translate([10**6, 5]).tokens


def test_vocabularies_with_little_in_common_are_refused():
    words = Tokenizer(
        models.WordLevel({f"word{number}": number for number in range(200)}, unk_token="word0")
    )
    other = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word0")
    with pytest.raises(
        IncompatibleDraftError, match=f"0 tokens in common, of {len(LARGE)} and 200"
    ):
        translation(LARGE, other)
