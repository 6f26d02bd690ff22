"""Requests that leave and come back: tool calls, and the SLOs of what comes after them."""

from __future__ import annotations

import threading
import time

import pytest

from hf_slospec import InvalidInputError, InvalidTypeError, SLOSpecGenerator, SLOStage
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, Fails, Holds, answer, written

PROMPT = "\n".join(PROMPTS[:2])
RESULT = "\n# the tool's result: 42\n"


def test_memory_that_others_need_is_taken_from_a_pause_and_its_kv_computed_again(pair):
    with SLOSpecGenerator(*pair, CONFIG.model_copy(update={"kv_tokens": 400})) as generator:
        first = generator.submit(PROMPT, max_new_tokens=10)
        first.result(WAIT_S)
        assert generator.stats().kept_tokens >= first.request.prompt_len
        generator.submit(list(range(5, 200)), max_new_tokens=100).result(WAIT_S)  # needs the slots
        second = generator.submit(RESULT, continues=first, max_new_tokens=10)
        output = second.result(WAIT_S).token_ids
        assert second.metrics.reused == 0
        assert output == answer(pair[0], second.request.params.prompt, max_new_tokens=10)


def test_a_pause_is_in_no_slo_and_earlier_misses_are_kept(served):
    first = served.submit(PROMPT, max_new_tokens=4, slo_tpot=1e-9, slo_ttft=WAIT_S)
    first.result(WAIT_S)
    time.sleep(0.3)
    begun_s = time.perf_counter()
    second = served.submit(
        RESULT, continues=first, max_new_tokens=4, slo_ttft=WAIT_S, slo_e2e=2 * WAIT_S
    )
    second.result(WAIT_S)
    metrics = second.metrics
    assert metrics.ttft_s is not None and metrics.e2e_s is not None
    assert metrics.ttft_s < metrics.e2e_s < time.perf_counter() - begun_s + 0.1
    assert (metrics.attained, metrics.attained_throughout) == (True, False)
    assert (metrics.guaranteed, metrics.guaranteed_throughout) == (True, False)
    assert metrics.earlier == first.metrics and first.metrics.attained is False
    third = served.submit([5, 6], continues=second, max_new_tokens=4)
    third.result(WAIT_S)
    assert third.metrics.attained is None and third.metrics.attained_throughout is False


def test_a_cancelled_request_goes_on_and_its_salt_with_it(served, pair):
    first = served.submit(PROMPT, max_new_tokens=200, cache_salt="mine")
    next(first.tokens())
    first.cancel()
    while not first.done():
        threading.Event().wait(0.01)
    second = served.submit(RESULT, continues=first, max_new_tokens=8)
    assert second.result(WAIT_S).token_ids == answer(
        pair[0], second.request.params.prompt, max_new_tokens=8
    )
    assert second.request.params.cache_salt == "mine" and second.metrics.reused > 0


def test_stages_by_token_id_and_with_a_ttft_of_their_own(served):
    marker = written(served, PROMPT, max_new_tokens=30)[8]
    stages = [
        SLOStage(slo_tpot=WAIT_S, tokens=2),
        SLOStage(slo_tpot=None, slo_ttft=1e-9, until=marker),
    ]
    # A first token within a step would be in time.
    options = dict(max_new_tokens=30, speculative=False)
    handle = served.submit(PROMPT, slo_tpot=[*stages, SLOStage(slo_tpot=WAIT_S)], **options)
    handle.result(WAIT_S)
    assert handle.metrics.attained is False and handle.metrics.tpot_slo_s == WAIT_S
    patient = [
        SLOStage(slo_tpot=WAIT_S, slo_ttft=WAIT_S, tokens=2),
        SLOStage(slo_tpot=WAIT_S, slo_ttft=WAIT_S),
    ]
    handle = served.submit(PROMPT, max_new_tokens=30, slo_tpot=patient, slo_ttft=1e-9)
    handle.result(WAIT_S)
    # The first stage's own.
    assert handle.metrics.attained is True and handle.metrics.ttft_slo_s == WAIT_S


def refused(served, error, match, prompt, handle):
    with pytest.raises(error, match=match):
        served.submit(prompt, continues=handle, max_new_tokens=2)


def test_requests_that_cannot_be_continued_are_refused_with_the_reason(served):
    with Holds() as holds:
        running = served.submit(PROMPT, max_new_tokens=2, stopping_criteria=[holds])
        assert holds.is_reached.wait(WAIT_S)
        refused(served, InvalidInputError, "has not ended", RESULT, running)
    result = running.result(WAIT_S)
    refused(served, InvalidTypeError, "must be the handle", RESULT, result)
    refused(served, InvalidTypeError, "chat messages", [{"role": "tool", "content": "42"}], running)
    refused(served, InvalidInputError, "empty", "", running)
    with pytest.raises(InvalidInputError, match="without images"):
        served.submit(RESULT, continues=running, images=[object()], max_new_tokens=2)
    failed = served.submit(PROMPT, max_new_tokens=4, stopping_criteria=[Fails(1)])
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    refused(served, InvalidInputError, "failed", RESULT, failed)
