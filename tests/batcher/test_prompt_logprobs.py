"""Log probabilities of prompts: computed in the batcher's own steps, beside what runs, and equal to
stock's.
"""

from __future__ import annotations

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.engine.interfaces import READ_CHUNK
from tests.support.served_pair import WAIT_S, alone, written

CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=20_000)


@pytest.fixture(scope="module")
def pair():
    return load_tiny_pair(torch.float32)


@pytest.fixture
def generator(pair):
    target, draft, tokenizer = pair
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as made:
        yield made


def ids_of(pair, length):
    ids = pair[2]("\n".join(tiny_prompts()))["input_ids"]
    assert len(ids) >= length
    return list(ids[:length])


def check(pair, ids, found, num_top):
    with torch.no_grad():
        logprobs = pair[0](torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert len(found) == len(ids) and found[0] is None
    for place, own in enumerate(found[1:], 1):
        row = logprobs[place - 1]
        assert own.logprob == pytest.approx(float(row[ids[place]]), abs=1e-4)
        assert [value for _, value in own.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("length", [1, 2, READ_CHUNK, READ_CHUNK + 1, 3 * READ_CHUNK + 7])
def test_prompt_logprobs_equal_those_of_a_forward_with_and_without_kept_kv(pair, generator, length):
    ids = ids_of(pair, length)
    for num_top in (0, 3):  # the second time, the K/V of the prompt is kept
        check(pair, ids, generator.prompt_logprobs(ids, num_top), num_top)
    handle = generator.submit(ids, prompt_logprobs=2, max_new_tokens=8, logprobs=1)
    assert handle.result(WAIT_S).token_ids == written(generator, ids, max_new_tokens=8)
    check(pair, ids, handle.prompt_logprobs, 2)
    assert len(handle.logprobs) == 8 or handle.finish_reason == "stop"


def test_requests_that_do_not_ask_for_prompt_logprobs_have_none(pair, generator):
    handle = generator.submit(ids_of(pair, 20), max_new_tokens=2)
    handle.result(WAIT_S)
    assert handle.prompt_logprobs == []


def test_a_long_prompt_is_scored_beside_a_guaranteed_request(pair, generator):
    """No step holds the other request up for more than a chunk of the prompt."""
    ids = ids_of(pair, 12 * READ_CHUNK)
    steps = []
    on_step = generator._service.on_step
    generator._service.on_step = lambda step: (steps.append(step), on_step(step))
    prompt = tiny_prompts()[1][:40]
    other = generator.submit(prompt, slo_tpot=30.0, max_new_tokens=400, eos_token_id=None)
    next(iter(other))
    scored = generator.submit(ids, prompt_logprobs=1, max_new_tokens=1)
    scored.result(WAIT_S)
    other.cancel()
    scoring = [step for step in steps if step.prefill_tokens and step.num_decoding]
    assert len(scoring) >= 11 and all(step.prefill_tokens <= READ_CHUNK for step in scoring)
    check(pair, ids, scored.prompt_logprobs, 1)


def test_scoring_goes_on_after_a_preemption(pair, generator):
    ids = ids_of(pair, 6 * READ_CHUNK)
    service = generator._service
    preempted = []
    on_step = service.on_step

    def preempt_once(step):
        on_step(step)
        engine = service._engine()
        assert engine is not None
        for request in list(engine.scheduler.running):
            if not preempted and request.num_unread and request.kv.num_cached > 2 * READ_CHUNK:
                preempted.append(request.kv.num_cached)
                engine.scheduler.preempt(request, engine.clock())
                engine.forget([request])

    service.on_step = preempt_once
    handle = generator.submit(ids, prompt_logprobs=1, max_new_tokens=4, eos_token_id=None)
    assert handle.result(WAIT_S).token_ids == alone(
        pair, pair[2].decode(ids), max_new_tokens=4, eos_token_id=None
    )
    assert preempted and handle.metrics.preempted == 1
    check(pair, ids, handle.prompt_logprobs, 1)
