"""Past answers: bounds, prompts, saving, and drafters that look into them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    PastAnswers,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_drafter,
)
from hf_slospec.drafters.lookup import PromptLookupDrafter
from hf_slospec.drafters.past_answers import CONTEXT, END
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.suffix import AnswerTrees, SuffixDrafter
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.toys.tiny_models import tiny_model
from tests.support.toys.trees import path_to

PROMPT = [5, 6, 7]
ANSWER = [20, 21, 22, 23, 24, 25]


def request_of(prompt, output, salt=""):
    request = Request(0, RequestParams(prompt, 100, cache_salt=salt))
    for token in output:
        request.emit(token)
    return request


def add(past, prompt, answer, salt=""):
    past.end(request_of(prompt, answer, salt))


def loaded_from(path, **bounds):
    past = PastAnswers(**bounds)  # type: ignore[arg-type]
    past.load(path)
    return past


def chain(drafter, request, depth=4):
    """Return the tokens of a draft's deepest path."""
    [tree] = drafter.draft([request], Plan(depth, 4))
    tree.check()
    return path_to(tree, int(tree.depths.argmax()))


def probs_by_path(past, request):
    """Return the probabilities of all continuations, whose order is not defined among equals."""
    found = []
    for draft in past.index(AnswerTrees).continuations(request, 1000):
        paths = list[tuple[int, ...]]()
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(dict(zip(paths, draft.probs, strict=True)))
    return found


@pytest.mark.parametrize("kind", [SuffixDrafter, PromptLookupDrafter])
def test_an_answer_to_the_prompt_is_proposed_from_its_first_token_on(kind):
    past = PastAnswers()
    add(past, PROMPT, ANSWER)
    add(past, [9, 6, 7], [30, 31])
    add(past, PROMPT, [40, 41], salt="another")
    drafter = kind(past=past)
    assert chain(drafter, request_of(PROMPT, [])) == ANSWER[:4]
    assert chain(drafter, request_of(PROMPT, ANSWER[:2])) == ANSWER[2:]
    assert chain(drafter, request_of([9, 6, 7], [])) == [30, 31]
    assert chain(drafter, request_of(PROMPT, [], salt="third")) == []
    assert chain(drafter, request_of(PROMPT, [], salt="another")) == [40, 41]


def test_only_suffix_searches_answers_to_other_prompts_and_no_prompts():
    past = PastAnswers()
    add(past, PROMPT, ANSWER)
    assert chain(PromptLookupDrafter(past=past), request_of([8], ANSWER[:2])) == []
    assert chain(SuffixDrafter(past), request_of([8], ANSWER[:2])) == ANSWER[2:]
    assert not chain(SuffixDrafter(past), request_of([8, *PROMPT], []))


@pytest.mark.parametrize("max_per_prompt", [32, 1])
@pytest.mark.parametrize("kind", [SuffixDrafter, PromptLookupDrafter])
def test_rows_of_one_prompt_see_each_other_while_they_run(kind, max_per_prompt):
    """Also if fewer answers are kept than rows run."""
    drafter = kind(past=PastAnswers(max_per_prompt=max_per_prompt))
    first = request_of(PROMPT, ANSWER)
    second = request_of(PROMPT, ANSWER[:2])
    drafter.draft([second, first], Plan(4, 1))
    assert chain(drafter, second) == ANSWER[2:]
    for request in (first, second):
        drafter.release(request)
        drafter.release(request)
    assert len(drafter.past) == min(max_per_prompt, 2)


def test_the_oldest_are_dropped():
    past = PastAnswers(max_per_prompt=2, max_tokens=12)
    for first in range(10, 16):
        add(past, PROMPT, [first, 1])
    kept = past.before(request_of(PROMPT, []))
    assert (
        kept.tolist() == [*PROMPT, 15, 1, END] and kept.dtype == np.int64
    )  # the running one is the second
    for prompt in range(20):
        add(past, [prompt], [prompt])
    assert len(past) == 12
    add(past, [1], list(range(12)))
    assert len(past) == 1 and past.num_tokens == 12
    add(past, [1], list(range(13)))  # too long by itself
    assert len(past) == past.num_tokens == 0
    for bounds in (dict(max_tokens=0), dict(max_per_prompt=0)):
        with pytest.raises(InvalidInputError, match="max_per_prompt must be at least 1"):
            PastAnswers(**bounds)


def test_trees_are_those_of_a_new_store_with_the_same_answers():
    """Trees that grew, shrank and were built again draft what trees built at once draft."""
    rng = random.Random(0)
    past = PastAnswers(max_tokens=150, max_per_prompt=4)
    prompts = [[1, 2], [3, 4], [5, 6]]
    requests = list[Request]()
    drafter = SuffixDrafter(past)
    for step in range(200):
        if len(requests) < 5:
            requests.append(request_of(rng.choice(prompts), []))
        for request in requests:
            request.emit(rng.randrange(10, 13))
        drafter.draft(requests, Plan(3, 2))
        if step % 3 == 0:
            drafter.release(requests.pop(rng.randrange(len(requests))))
        anew = PastAnswers(max_tokens=150, max_per_prompt=4)
        anew.answers = past.answers
        anew._keys_to = past._keys_to
        anew.running = past.running
        for request in requests:
            assert probs_by_path(past, request) == probs_by_path(anew, request)
    assert 100 < past.num_tokens <= 150
    for request in requests:
        drafter.release(request)
    assert all(
        group.prompt == "" for group in past.index(AnswerTrees)._trees
    )  # those of prompts go with their last request


def test_saved_and_loaded(tmp_path):
    past = PastAnswers()
    prompt = list(range(100, 140))
    past.save(tmp_path / "none")
    assert len(loaded_from(tmp_path / "none")) == 0
    add(past, prompt, ANSWER)
    add(past, prompt, [20, 30])
    add(past, PROMPT, [1], salt="ä")
    past.update(request_of(PROMPT, [50, 51]))  # running
    past.save(tmp_path / "answers")
    loaded = loaded_from(tmp_path / "answers", max_tokens=5)
    assert len(loaded) == 3 and loaded.num_tokens == 5
    assert loaded.before(request_of(prompt, [])).tolist() == [*prompt[-CONTEXT:], 20, 30, END]
    assert chain(SuffixDrafter(loaded), request_of(PROMPT, [])) == [50, 51]
    for text in ("text", '{"a": 1}', '[["", "", [1], ["a"]]]'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InvalidInputError, match="not written by PastAnswers"):
            loaded_from(tmp_path / "other")
    (tmp_path / "other").write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match="not written by PastAnswers"):
        loaded_from(tmp_path / "other")


def test_load_drafter_takes_them():
    model = tiny_model("llama")
    past = PastAnswers()
    method = load_drafter("lookup+suffix", model, share_texts=past)
    generator = SLOSpecGenerator(
        model, config=SLOSpecConfig(policy="adaserve", token_budget=40), drafter=method
    )
    generator.generate(torch.randint(3, 101, (1, 8)), max_new_tokens=12, do_sample=False)
    assert len(past) == 1  # both parts keep the same answer
    with pytest.raises(InvalidTypeError, match="share_texts must be True, False or PastAnswers"):
        load_drafter("suffix", model, share_texts="all")  # type: ignore[arg-type]
