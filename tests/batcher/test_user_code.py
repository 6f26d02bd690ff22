"""Processors, criteria, streamers and drafters of the user's own, in the batcher's thread."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer

from hf_slospec import (
    SLOSpecGenerator,
    TokenTree,
)
from tests.support.breadth import quick_or
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, Fails, alone


def test_faults_of_processors_criteria_and_streamers_stay_in_their_request(served, pair):
    class Broken(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            raise ZeroDivisionError("of the user's own")

    failing = [
        served.submit(
            PROMPTS[0], max_new_tokens=500, logits_processor=LogitsProcessorList([Fails(5)])
        ),
        served.submit(
            PROMPTS[0], max_new_tokens=500, stopping_criteria=StoppingCriteriaList([Fails(5)])
        ),
        served.submit(PROMPTS[0], max_new_tokens=500, streamer=Broken(pair[2])),
    ]
    other = served.submit(PROMPTS[1], max_new_tokens=40)
    for handle in failing:
        with pytest.raises(ZeroDivisionError, match="of the user's own"):
            handle.result(WAIT_S)
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], max_new_tokens=40)


def test_streamers_hear_prompt_tokens_and_end(served):
    class Heard:
        def __init__(self):
            self.values = []
            self.ended = threading.Event()

        def put(self, value):
            self.values.append(value)

        def end(self):
            self.ended.set()

    heard = Heard()
    result = served.submit([5, 6, 7], max_new_tokens=6, streamer=heard).result(WAIT_S)
    assert heard.ended.wait(WAIT_S)
    assert heard.values[0].tolist() == [[5, 6, 7]]
    assert [int(value) for value in heard.values[1:]] == result.token_ids
    for ending in ("cancelled", "failed"):
        heard = Heard()
        fails = StoppingCriteriaList([Fails(3)]) if ending == "failed" else None
        handle = served.submit(
            [5, 6, 7], max_new_tokens=5000, streamer=heard, stopping_criteria=fails
        )
        if ending == "cancelled":
            handle.cancel()
        assert heard.ended.wait(WAIT_S), ending


def test_processors_run_without_gradients_and_may_raise_anything(served, pair):
    modes = []

    def looks(input_ids, scores):
        modes.append(torch.is_grad_enabled())
        return scores

    def leaves(input_ids, scores):
        raise SystemExit(3)

    other = served.submit(PROMPTS[1], max_new_tokens=20)
    served.submit(
        PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([looks])
    ).result(WAIT_S)
    leaving = served.submit(
        PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([leaves])
    )
    with pytest.raises(SystemExit):
        leaving.result(WAIT_S)
    assert set(modes) == {False}
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], max_new_tokens=20)


def test_a_users_drafter_leaves_the_global_generator_to_others(pair):
    class Draws:
        def draft(self, requests, plan):
            token = int(torch.randint(2000, ()))
            return [TokenTree.chain(request.tokens[-1], [token], 0.5) for request in requests]

        def release(self, request):
            pass

    target, _, tokenizer = pair
    drawn = []
    with SLOSpecGenerator(target, None, tokenizer, CONFIG, drafter=Draws()) as generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=quick_or(30, 60))
        while not handle.done():
            # Float32 has too few values for many draws.
            drawn.append(float(torch.rand((), dtype=torch.float64)))
        assert handle.result(WAIT_S).token_ids == alone(
            pair, PROMPTS[0], max_new_tokens=quick_or(30, 60)
        )
    assert len(set(drawn)) > 0.99 * len(drawn)
