"""``submit`` on real models: the output of ``generate`` for each request alone, whatever else runs."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    Progress,
    SLOSpecGenerator,
    UnsupportedOptionError,
)
from tests.support.breadth import quick_or
from tests.support.fixed_policy import always_drafting
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, alone, written


class Ban:
    """A processor of the user's own that reads the text."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores


SOME = quick_or(14, 30)
MIXED = [
    dict(max_new_tokens=SOME),
    dict(max_new_tokens=25, do_sample=True, seed=11),
    dict(max_new_tokens=SOME + 10, do_sample=True, seed=5, temperature=0.7, top_k=20, top_p=0.9),
    dict(max_new_tokens=SOME, repetition_penalty=1.3),
    dict(max_new_tokens=2 * SOME, stop_strings=["return"]),
    dict(
        max_new_tokens=20, do_sample=True, seed=11, repetition_penalty=1.2, no_repeat_ngram_size=3
    ),
    dict(max_new_tokens=1),
    dict(max_new_tokens=SOME + 20, eos_token_id=[5, 17, 200, 300, 301, 302]),
    dict(max_new_tokens=20, logits_processor=LogitsProcessorList([Ban()])),
    dict(max_new_tokens=SOME + 3, min_new_tokens=12),
]


def test_mixed_requests_give_what_generate_gives_for_each_alone(served, pair):
    expected = []
    for prompt, options in zip(PROMPTS, MIXED, strict=True):
        expected.append(alone(pair, prompt, **copy.deepcopy(options)))
    tight = dict(slo_tpot=0.05, slo_ttft=5.0)
    hopeless = dict(slo_tpot=1e-9)
    promises = [
        tight,
        dict(),
        dict(best_effort=True),
        hopeless,
        dict(priority=-3),
    ]
    handles = [
        served.submit(prompt, **options, **promises[index % len(promises)])
        for index, (prompt, options) in enumerate(zip(PROMPTS, MIXED, strict=True))
    ]
    results = [handle.result(WAIT_S) for handle in handles]
    assert [result.token_ids for result in results] == expected
    tokenizer = pair[2]
    for handle, result in zip(handles, results, strict=True):
        assert (
            result.text
            == tokenizer.decode(result.token_ids, skip_special_tokens=True)
            == "".join(handle)
        )
    assert results[4].finish_reason == ("stop" if "return" in str(results[4].text) else "length")
    assert [handle.seed for handle in handles] == [options.get("seed") for options in MIXED]


def test_requests_that_must_not_speculate_run_beside_others(served, pair):
    length = quick_or(24, 40)
    options = dict(max_new_tokens=length, min_new_tokens=length)
    expected = [alone(pair, prompt, **options) for prompt in PROMPTS[:4]]
    with always_drafting(served):
        handles = [
            served.submit(prompt, **options, speculative=bool(index % 2))
            for index, prompt in enumerate(PROMPTS[:4])
        ]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert [handle.metrics.steps for handle in handles[::2]] == [length - 1] * 2
    assert [handle.metrics.drafted for handle in handles[::2]] == [0, 0]
    assert sum(handle.metrics.drafted for handle in handles[1::2]) > 0


def test_a_guarantee_with_a_probability_changes_no_token_and_is_reported(pair):
    target, draft, tokenizer = pair
    with SLOSpecGenerator(
        target, draft, tokenizer, CONFIG.model_copy(update={"guarantee": 0.9})
    ) as generator:
        options = [dict(slo_tpot=60.0), dict(slo_tpot=1e-9), dict()]
        sampled = dict(do_sample=True, seed=3, max_new_tokens=quick_or(14, 25))
        results = [
            generator.submit(prompt, **sampled, **own)
            for prompt, own in zip(PROMPTS, options, strict=False)
        ]
        for prompt, handle in zip(PROMPTS, results, strict=False):
            assert handle.result(WAIT_S).token_ids == alone(pair, prompt, **sampled)
        reported = [
            (handle.metrics.window_guarantee, handle.metrics.windows_kept) for handle in results
        ]
        assert reported == [(0.9, True), (None, False), (None, None)]
        inputs = tokenizer(PROMPTS[:2], return_tensors="pt", padding=True, padding_side="left")
        out = generator.generate(
            **inputs, max_new_tokens=14, slo_tpot=[60.0, None], return_dict_in_generate=True
        )
        late = generator.generate(
            **inputs, max_new_tokens=14, slo_tpot=[60.0, 1e-9], return_dict_in_generate=True
        )
    assert out.sequences.tolist() == target.generate(**inputs, max_new_tokens=14).tolist()
    assert [(row.window_guarantee, row.windows_kept) for row in out.slo] == [
        (0.9, True),
        (None, None),
    ]
    assert [row.window_guarantee for row in late.slo] == [None, None]  # all of them or none


def test_a_drawn_seed_can_be_used_again(served):
    first = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20)
    again = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20, seed=first.seed)
    other = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20)
    assert (
        first.result(WAIT_S).token_ids
        == again.result(WAIT_S).token_ids
        != other.result(WAIT_S).token_ids
    )
    state = torch.get_rng_state()
    served.submit(PROMPTS[0], do_sample=True, max_new_tokens=5).result(WAIT_S)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is nobody's


def test_ids_tensors_and_texts_are_the_same_prompt(served, pair):
    ids = pair[2](PROMPTS[1])["input_ids"]
    prompts = (
        PROMPTS[1],
        ids,
        tuple(ids),
        [np.int64(token) for token in ids],
        torch.tensor(ids),
        torch.tensor([ids]),
    )
    results = {tuple(written(served, prompt, max_new_tokens=9)) for prompt in prompts}
    assert results == {tuple(alone(pair, PROMPTS[1], max_new_tokens=9))}


def test_chat_messages_go_through_the_template(pair):
    target, draft, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    messages = [{"role": "user", "content": "def f(x):"}]
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        with pytest.raises(InvalidInputError, match="chat template"):
            generator.submit(messages)
        tokenizer.chat_template = (
            "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}# answer"
        )
        result = generator.submit(messages, max_new_tokens=8).result(WAIT_S)
        text = generator.submit("# user\ndef f(x):\n# answer", max_new_tokens=8).result(WAIT_S)
    assert result.token_ids == text.token_ids


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, seed=4)])
def test_a_deadline_for_the_last_token_changes_no_token(served, pair, options):
    options = dict(max_new_tokens=25) | options
    easy, lost = (served.submit(PROMPTS[0], slo_e2e=slo_s, **options) for slo_s in (1e3, 1e-6))
    assert (
        easy.result(WAIT_S).token_ids
        == lost.result(WAIT_S).token_ids
        == alone(pair, PROMPTS[0], **options)
    )
    assert (easy.metrics.e2e_slo_s, easy.metrics.guaranteed, easy.metrics.attained) == (
        1e3,
        True,
        True,
    )
    assert (lost.metrics.guaranteed, lost.metrics.attained) == (False, False)
    assert 0.0 < easy.metrics.ttft_s < easy.metrics.e2e_s < WAIT_S


NO_PROGRESS = [
    (Progress([1] * 5), InvalidInputError),  # all of max_new_tokens
    (Progress([10**9]), InvalidInputError),
    (Progress([-1]), InvalidInputError),
    (Progress([1], elapsed_s=math.nan), InvalidInputError),
    (Progress([1], elapsed_s=1.0, decoding_s=2.0), InvalidInputError),
    ([1, 2], InvalidTypeError),
]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "match"),
    [
        ("", {}, InvalidInputError, "prompt is empty"),
        ([], {}, InvalidInputError, "prompt is empty"),
        (5, {}, InvalidTypeError, "prompt"),
        ([1.5], {}, InvalidTypeError, "prompt"),
        ([True], {}, InvalidTypeError, "prompt"),
        ([[1, 2], [3, 4]], {}, InvalidTypeError, "one request"),
        ([-1], {}, InvalidTypeError, "prompt"),
        ([10**6], {}, InvalidInputError, "outside"),
        ("x", dict(slo_tpot=float("nan")), InvalidInputError, "slo_tpot"),
        ("x", dict(slo_tpot="fast"), InvalidTypeError, "slo_tpot"),
        ("x", dict(slo_tpot=[0.1, 0.2]), InvalidInputError, "slo_tpot"),
        ("x", dict(slo_ttft=-1), InvalidInputError, "slo_ttft"),
        ("x", dict(slo_ttft=True), InvalidTypeError, "slo_ttft"),
        ("x", dict(slo_ttft=float("inf")), InvalidInputError, "slo_ttft"),
        ("x", dict(slo_e2e=0.0), InvalidInputError, "slo_e2e"),
        ("x", dict(slo_e2e=True), InvalidTypeError, "slo_e2e"),
        (
            "x",
            dict(slo_e2e=1.0, slo_ttft=2.0),
            InvalidInputError,
            r"slo_e2e .* longer than slo_ttft, .* 1.0 and 2.0 s",
        ),
        ("x", dict(priority=0.5), InvalidTypeError, "priority"),
        ("x", dict(priority=None), InvalidTypeError, "priority"),
        ("x", dict(best_effort=1), InvalidTypeError, "best_effort"),
        ("x", dict(seed=-1), InvalidInputError, "seed"),
        ("x", dict(seed="a"), InvalidTypeError, "seed"),
        ("x", dict(timeout=-2.0, block=True), InvalidInputError, "timeout"),
        ("x", dict(num_beams=4), UnsupportedOptionError, "beam"),
        (
            "x",
            dict(num_return_sequences=2, do_sample=True),
            UnsupportedOptionError,
            "num_return_sequences",
        ),
        (
            "x",
            dict(return_dict_in_generate=True),
            UnsupportedOptionError,
            "return_dict_in_generate",
        ),
        ("x", dict(max_new_tokens=0), ValueError, "max_new_tokens"),
        ("x", dict(max_new_tokens=8.0), InvalidTypeError, "max_new_tokens"),
        ("x", dict(streamer=5), InvalidTypeError, "streamer"),
        ("x", dict(max_new_tokens=10**7), InvalidInputError, "kv_tokens"),
        ("x", dict(max_new_token=5), ValueError, "max_new_token"),
        ("x", dict(temperature=-1.0, do_sample=True), ValueError, "temperature"),
        ("x", dict(stop_strings=""), InvalidInputError, "stop_strings"),
        ("x", dict(stop_strings=[]), InvalidInputError, "stop_strings"),
        ("x", dict(stop_strings=["a", ""]), InvalidInputError, "stop_strings"),
        ("x", dict(generation_config={}), InvalidTypeError, "generation_config"),
        (
            "x",
            dict(must_guarantee=True, best_effort=True),
            InvalidInputError,
            "must_guarantee and best_effort",
        ),
        *(
            ("x", dict(resume=progress), error, r"resume|progress")
            for progress, error in NO_PROGRESS
        ),
    ],
)
def test_bad_input_is_refused_at_submit(served, prompt, options, error, match):
    with pytest.raises(error, match=match):
        served.submit(prompt, **dict(max_new_tokens=5) | options)
    served.check_running()


def test_without_a_tokenizer_token_ids_stream(pair):
    target, draft, tokenizer = pair
    ids = tokenizer(PROMPTS[0])["input_ids"]
    with SLOSpecGenerator(target, draft, None, CONFIG) as generator:
        with pytest.raises(InvalidInputError, match="tokenizer"):
            generator.submit("x")
        handle = generator.submit(ids, max_new_tokens=7)
        assert (
            list(handle)
            == handle.result(WAIT_S).token_ids
            == alone(pair, PROMPTS[0], max_new_tokens=7)
        )
        assert handle.result().text is None
