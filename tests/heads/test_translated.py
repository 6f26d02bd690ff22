"""Drafts with another tokenizer: stock's tokens, and the proposals that the same draft makes with
the target's.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.translated import TranslatedDrafter
from hf_slospec.heads.translation import TokenTranslation
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import nightly_but, quick_or
from tests.support.packed import packed_model
from tests.support.served_pair import PROMPTS
from tests.support.toys.tiny_models import FAMILIES, sharpened
from tests.support.toys.tiny_tokenizers import (
    FOREIGN,
    byte_level,
    sentencepiece_like,
    with_other_ids,
)
from tests.support.toys.trees import SEEDS

TARGET_TOKENIZER = byte_level(420)
IDS = np.random.default_rng(0).permutation(len(TARGET_TOKENIZER)).tolist()
PERMUTED, SMALL, SPACED = (
    with_other_ids(TARGET_TOKENIZER, IDS),
    byte_level(300, 3, eos="</s>"),
    sentencepiece_like(600),
)


def model_of(tokenizer, seed=0, noise=0.0, family="llama"):
    name, settings = FAMILIES[family]
    ids = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    ids |= {} if family == "gpt2" else dict(pad_token_id=tokenizer.pad_token_id)
    config = getattr(transformers, name)(**settings | ids)
    return sharpened(lambda: AutoModelForCausalLM.from_config(config), seed, noise)


def permuted(model, ids):
    """The same model, but token ``i`` has the id ``ids[i]``."""
    other = copy.deepcopy(model)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getattr(other, name)().weight.data[ids] = getattr(model, name)().weight.data
    return other


DRAFT = model_of(TARGET_TOKENIZER, noise=0.03)
OTHER_DRAFTS = {
    "permuted": permuted(DRAFT, IDS),
    "small": model_of(SMALL, 1),
    "spaced": model_of(SPACED, 2),
}
TOKENIZERS = {"permuted": PERMUTED, "small": SMALL, "spaced": SPACED}
PACKED = {name: packed_model(model, "sdpa") for name, model in OTHER_DRAFTS.items()}


def translation(draft, target=TARGET_TOKENIZER):
    return TokenTranslation(target, draft, len(target), len(draft))


TRANSLATIONS = {name: translation(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def translated(name, **options):
    return TranslatedDrafter(
        PACKED[name], Room(20, len(TARGET_TOKENIZER), **options), TRANSLATIONS[name]
    )


def assert_same_trees(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(one.path_probs, other.path_probs, rtol=1e-4)


@given(seed=SEEDS, max_kept=st.sampled_from([0, 300]))
@settings(max_examples=quick_or(3, 6))
def test_draft_with_other_ids_proposes_the_same(seed, max_kept):
    """Texts are any tokens, which come in any number at a time, to requests that come and go."""
    rng = np.random.default_rng(seed)
    plain = AssistantDrafter(
        packed_model(DRAFT, "sdpa"), Room(20, len(TARGET_TOKENIZER), max_kept=max_kept)
    )
    other = translated("permuted", max_kept=max_kept)
    requests = list[Request]()
    prompt = rng.integers(2, len(TARGET_TOKENIZER), 30).tolist()
    for step in range(12):
        if rng.random() < 0.4:
            requests.append(Request(step, RequestParams(prompt[: rng.integers(1, 30)], 100)))
            assert plain.reuse(requests[-1]) == other.reuse(requests[-1])
        for request in list(requests):
            if rng.random() < 0.2:  # finished, or preempted and seen again
                plain.release(request)
                other.release(request)
                requests = [own for own in requests if own is not request or rng.random() < 0.5]
        chosen = [request for request in requests if rng.random() < 0.8]
        if chosen:
            assert_same_trees(plain.draft(chosen, Plan(4, 3)), other.draft(chosen, Plan(4, 3)))
        for request in requests:
            assert request not in chosen or plain.sequences.num_cached(request) == len(
                request.tokens
            )
            request.tokens += rng.integers(0, len(TARGET_TOKENIZER), rng.integers(0, 6)).tolist()
    plain.close()
    other.close()


@pytest.mark.parametrize("name", nightly_but(["small"], TOKENIZERS))
def test_kv_is_that_of_the_text_whatever_came_before(name):
    """Drafting step by step, with steps undone and requests released, proposes what drafting from
    nothing does.
    """
    tokens = TARGET_TOKENIZER("return self 🎉漢字 the " + FOREIGN)["input_ids"]
    rng, request, own = (
        np.random.default_rng(0),
        Request(0, RequestParams(tokens[:3], 100)),
        translated(name),
    )
    for place in range(3, len(tokens), 2):
        trees = own.draft([request], Plan(3, 2))
        if rng.random() < 0.3:
            own.release(request)
        if rng.random() < 0.5:
            assert_same_trees(trees, own.draft([request], Plan(3, 2)))
        assert_same_trees(
            trees,
            translated(name).draft(
                [Request(0, RequestParams(list(request.tokens), 100))], Plan(3, 2)
            ),
        )
        text = own._translated.get(request)
        assert text is None or own.sequences.num_cached(text) <= len(text.tokens)
        request.tokens += tokens[place : place + 2]
    own.release(request)
    assert not own._translated


def test_proposals_are_common_tokens_and_follow_the_draft():
    tokens = TARGET_TOKENIZER("def main(self):\n    return")["input_ids"]
    (tree,) = translated("small").draft([Request(0, RequestParams(tokens, 9))], Plan(1, 1))
    ids = SMALL("def main(self):\n    return", return_tensors="pt")
    logits = OTHER_DRAFTS["small"](ids["input_ids"]).logits[0, -1]
    own = TRANSLATIONS["small"]
    assert int(tree.tokens[1]) == int(own.target_ids[logits[own.draft_ids].argmax()])


def test_long_texts_catch_up_over_several_steps(monkeypatch):
    monkeypatch.setattr(AssistantDrafter, "CATCH_UP", 80)
    own, request = (
        translated("small"),
        Request(0, RequestParams(TARGET_TOKENIZER(PROMPTS[0])["input_ids"][:150], 50)),
    )
    depths = [own.draft([request], Plan(3, 1))[0].max_depth for _ in range(6)]
    assert depths[0] == 0 and depths[-1] == 3 and depths == sorted(depths)


def test_texts_that_are_longer_for_the_draft_than_there_is_room():
    tokens = TARGET_TOKENIZER(PROMPTS[0])["input_ids"]
    requests = [
        Request(index, RequestParams(tokens[:length], 5))
        for index, length in enumerate((30, 100, 20))
    ]
    own = translated("small", max_slots=140)
    assert [tree.max_depth > 0 for tree in own.draft(requests, Plan(3, 1))] == [True, False, True]
    own.release(requests[0])
    own.release(requests[2])
    plain = AssistantDrafter(PACKED["permuted"], Room(20, len(TARGET_TOKENIZER), max_slots=20))
    with pytest.raises(MemoryError):
        plain.draft(requests, Plan(3, 1))
