"""Callbacks of submitted requests that call the model, or the batcher that calls them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from transformers import StoppingCriteria

import hf_slospec
from hf_slospec import NotRunningError, UnsupportedOptionError
from tests.support.nested_calls import CallingCriterion, CallingStreamer, calling
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, alone, written

NESTED = dict(max_new_tokens=5, do_sample=False)
OUTER = dict(max_new_tokens=12, do_sample=False)


@pytest.fixture(scope="module")
def enabled(pair):
    yield hf_slospec.enable(pair[0], pair[1], config=CONFIG)
    hf_slospec.disable(pair[0])


def inputs_of(input_ids, num_rows=1):
    rows = input_ids[:1, -40:].repeat(num_rows, 1)
    return dict(input_ids=rows, attention_mask=torch.ones_like(rows))


@pytest.mark.parametrize(
    "kind", ["processor", pytest.param("criterion", marks=pytest.mark.nightly), "streamer"]
)
def test_nested_generate_spoils_neither_neighbours_nor_later_requests(served, enabled, pair, kind):
    calls = [
        lambda ids: served.generate(**inputs_of(ids), **NESTED),
        lambda ids: served.generate(**inputs_of(ids, 2), **NESTED, assistant_model=pair[0]),
        lambda ids: served.generate(**inputs_of(ids), **NESTED, prompt_lookup_num_tokens=3),
        lambda ids: enabled.generate(**inputs_of(ids), **NESTED, slo_tpot=0.1),
    ]
    stock = type(pair[0]).generate
    wrong = []

    def run(input_ids):
        ours = calls[input_ids.shape[1] % len(calls)](input_ids)[0]
        if not torch.equal(ours, stock(pair[0], **inputs_of(input_ids), **NESTED)[0]):
            wrong.append(input_ids)

    callback, argument = calling(kind, run)
    handles = [served.submit(PROMPTS[0], **OUTER, **argument), served.submit(PROMPTS[1], **OUTER)]
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        assert handle.result(WAIT_S).token_ids == alone(pair, prompt, **OUTER)
    for prompt in PROMPTS[:2]:  # on the same prompts, whose K/V is reused
        assert written(served, prompt, **OUTER) == alone(pair, prompt, **OUTER)
    if kind == "streamer":  # it is called in a thread of its own
        assert callback.ended.wait(WAIT_S)
    assert not wrong and len(callback.seen) >= 12


def waits_in(served, way):
    handle = None if way == "load" else served.submit(PROMPTS[2], **NESTED)
    if handle is None:
        return asyncio.run(served.aload())
    if way == "result":
        return handle.result()
    if way == "iteration":
        return list(handle)
    return asyncio.run(handle.aresult())


@pytest.mark.parametrize("way", ["result", "iteration", "aresult", "load", "logprobs"])
def test_waiting_for_the_batcher_in_its_own_thread_fails_that_request_only(served, pair, way):
    def run(_):
        return served.prompt_logprobs(PROMPTS[2]) if way == "logprobs" else waits_in(served, way)

    criterion = CallingCriterion(run)
    handle = served.submit(PROMPTS[0], **OUTER, stopping_criteria=[criterion])
    other = served.submit(PROMPTS[1], **OUTER)
    with pytest.raises(NotRunningError, match="would wait for itself"):
        handle.result(WAIT_S)
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], **OUTER)
    assert written(served, PROMPTS[2], **NESTED) == alone(pair, PROMPTS[2], **NESTED)


def test_callbacks_may_submit_and_streamers_may_wait(served, pair):
    handles = []
    criterion = CallingCriterion(lambda _: handles.append(served.submit(PROMPTS[2], **NESTED)))
    streamer = CallingStreamer(lambda _: written(served, PROMPTS[2], **NESTED))
    outer = served.submit(
        PROMPTS[0], max_new_tokens=4, stopping_criteria=[criterion], streamer=streamer
    )
    expected = alone(pair, PROMPTS[2], **NESTED)
    assert outer.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=4)
    assert [handle.result(WAIT_S).token_ids for handle in handles] == [expected] * 4


def test_criteria_may_wait_for_generate_in_another_thread(served, pair):
    results = []

    def run(input_ids):
        call = lambda: results.append(served.generate(**inputs_of(input_ids), **NESTED))  # noqa: E731
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(WAIT_S)

    handle = served.submit(PROMPTS[0], **NESTED, stopping_criteria=[CallingCriterion(run)])
    assert handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], **NESTED)
    assert len(results) == 5


def test_an_error_of_a_nested_call_ends_its_request_only(served, pair):
    def fails(input_ids):
        served.generate(**inputs_of(input_ids), max_new_tokens=4, num_beams=2)

    handle = served.submit(PROMPTS[0], **OUTER, stopping_criteria=[CallingCriterion(fails)])
    other = served.submit(PROMPTS[1], **OUTER)
    with pytest.raises(UnsupportedOptionError, match="beam"):
        handle.result(WAIT_S)
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], **OUTER)


class Replaces(StoppingCriteria):
    """Replaces a token that was chosen, or that the model has read."""

    def __init__(self, place):
        self.place = place

    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] % 4 == 0:
            input_ids[0, self.place] = 17
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_replace_the_last_token_only(served, pair):
    expected = alone(pair, PROMPTS[0], **OUTER, stopping_criteria=[Replaces(-1)])
    assert 17 in expected
    for _ in range(2):  # the second one reuses the K/V of the first
        handle = served.submit(PROMPTS[0], **OUTER, stopping_criteria=[Replaces(-1)])
        assert handle.result(WAIT_S).token_ids == expected
    handle = served.submit(PROMPTS[0], **OUTER, stopping_criteria=[Replaces(-3)])
    with pytest.raises(UnsupportedOptionError, match="stopping_criteria has changed input_ids"):
        handle.result(WAIT_S)
    assert written(served, PROMPTS[0], **OUTER) == alone(pair, PROMPTS[0], **OUTER)
