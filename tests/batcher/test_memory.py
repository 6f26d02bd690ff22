"""Long prompts, preemption and shortage of memory: the output of requests stays the same."""

from __future__ import annotations

import itertools

import torch

from hf_slospec import (
    SLOSpecGenerator,
    tiny_prompts,
)
from hf_slospec.model.kv_cache import KVPool
from tests.support.breadth import quick_or
from tests.support.generate_arguments import Ends
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, Holds, alone


def test_long_prompts_are_fed_in_chunks_beside_running_streams(pair):
    target, draft, tokenizer = pair
    config = CONFIG.model_copy(update={"prefill_chunk": 64})
    long = "\n".join(tiny_prompts()[:8])
    expected = alone(pair, long, max_new_tokens=12)
    streams = [alone(pair, prompt, max_new_tokens=quick_or(30, 60)) for prompt in PROMPTS[:3]]
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        handles = [
            generator.submit(prompt, max_new_tokens=quick_or(30, 60)) for prompt in PROMPTS[:3]
        ]
        late = generator.submit(long, max_new_tokens=12)
        assert late.result(WAIT_S).token_ids == expected
        assert [handle.result(WAIT_S).token_ids for handle in handles] == streams


def test_requests_that_may_emit_far_more_than_fits_run_together_and_stay_exact(pair):
    """Each alone might fill nearly all slots, and all write more than is expected: one of them is
    preempted.
    """
    target, draft, tokenizer = pair
    prompts = PROMPTS[:4]
    length = 130  # tokens
    expected = [alone(pair, prompt, max_new_tokens=length) for prompt in prompts]
    # Requests get equally far in a step, so that three of them fill the slots on any machine before
    # one has finished.
    config = CONFIG.model_copy(
        update={"kv_tokens": 800, "policy": "fixed", "max_depth": 1, "max_width": 1}
    )
    running = []

    class Watching(Ends):
        def __call__(self, *arguments, **options):
            running.append(generator.stats().running)
            return super().__call__(*arguments, **options)

    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        with Holds() as holds:
            handles = [
                generator.submit(
                    prompt,
                    max_new_tokens=500,
                    stopping_criteria=[
                        holds,
                        Watching(len(tokenizer(prompt)["input_ids"]) + length),
                    ],
                )
                for prompt in prompts
            ]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert max(running) == 3
    assert sum(handle.metrics.preempted for handle in handles)


def test_running_out_of_memory_while_committing_is_made_good(pair, monkeypatch):
    target, draft, tokenizer = pair
    expected = [alone(pair, prompt, max_new_tokens=30) for prompt in PROMPTS[:3]]
    move = KVPool.move
    calls = itertools.count()
    raised = []

    def fails_at_times(pool, source, destination):
        if source and (call := next(calls)) in (0, 2):
            raised.append(call)
            raise torch.OutOfMemoryError("CUDA out of memory")
        move(pool, source, destination)

    monkeypatch.setattr("hf_slospec.engine.step.PAUSE", 2)
    config = CONFIG.model_copy(update={"policy": "fixed", "max_depth": 3, "max_width": 3})
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        monkeypatch.setattr(KVPool, "move", fails_at_times)
        handles = [generator.submit(prompt, max_new_tokens=30) for prompt in PROMPTS[:3]]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert raised == [0, 2]
