"""Long prompts, preemption and shortage of memory: the output of requests stays the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_slospec import (
    SLOSpecGenerator,
    tiny_prompts,
)
from hf_slospec.engine.protocols import Plan
from hf_slospec.models.kv_cache.pool import KVPool
from tests.support.breadth import quick_or
from tests.support.generate_arguments import Ends
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, Holds, alone
from tests.support.toys.hasty_room import HastyRoom
from tests.support.toys.models import NowAndThen


def test_long_prompts_are_fed_in_chunks_beside_running_streams(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    config = CONFIG.model_copy(update={"prefill_chunk": 64})
    long = "\n".join(tiny_prompts()[:8])
    expected = alone(pair, long, max_new_tokens=12)
    streams = [alone(pair, prompt, max_new_tokens=quick_or(30, 60)) for prompt in PROMPTS[:3]]
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        handles = [generator.submit(prompt, max_new_tokens=quick_or(30, 60)) for prompt in PROMPTS[:3]]
        late = generator.submit(long, max_new_tokens=12)
        assert late.result(WAIT_S).token_ids == expected
        assert [handle.result(WAIT_S).token_ids for handle in handles] == streams


def test_requests_that_may_emit_far_more_than_fits_run_together_and_stay_exact(pair: tuple[Any, Any, Any]) -> None:
    """Each alone might fill nearly all slots, and all write more than is expected: one of them is preempted."""
    target, draft, tokenizer = pair
    prompts, length = PROMPTS[:4], 220  # tokens
    expected = [alone(pair, prompt, max_new_tokens=length) for prompt in prompts]
    # Requests get equally far in a step, so that three of them fill the slots on any machine before one has finished.
    config = CONFIG.model_copy(update={"kv_tokens": 850, "policy": "fixed", "max_depth": 1, "max_width": 1})
    running = list[int]()

    class Watching(Ends):
        def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
            running.append(generator.stats().running)
            return super().__call__(*arguments, **options)

    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        with Holds() as holds:
            handles = [
                generator.submit(
                    prompt,
                    max_new_tokens=550,
                    stopping_criteria=[holds, Watching(len(tokenizer(prompt)["input_ids"]) + length)],
                )
                for prompt in prompts
            ]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert max(running) == 3
    assert sum(handle.metrics.preempted for handle in handles)


def test_running_out_of_memory_while_committing_is_made_good(
    pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, tokenizer = pair
    expected = [alone(pair, prompt, max_new_tokens=30) for prompt in PROMPTS[:3]]
    move, calls, raised = KVPool.move, itertools.count(), list[int]()

    def fails_at_times(pool: KVPool, source: list[int], destination: list[int]) -> None:
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


@pytest.mark.parametrize("kv_tokens", [None, pytest.param(300, marks=pytest.mark.nightly)])
def test_the_memory_of_an_idle_drafter_is_lent_and_returned(
    pair: tuple[Any, Any, Any], kv_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, tokenizer = pair
    expected = [alone(pair, prompt, max_new_tokens=30) for prompt in PROMPTS]
    monkeypatch.setattr("hf_slospec.engine.scheduling.continuous.KVRoom", HastyRoom)
    monkeypatch.setattr("hf_slospec.serving.service._affordable_kv_tokens", lambda *_: 300)
    monkeypatch.setattr("hf_slospec.serving.service._draft_share", lambda _: 0.7)
    config = CONFIG.model_copy(update={"kv_tokens": kv_tokens})
    seen = list[tuple[int, int, bool]]()  # limit, slots of the target's texts, whether the draft has K/V

    class Watched(NowAndThen):
        def plan(self, *arguments: Any) -> Plan:
            stats = generator.stats()
            seen.append((stats.kv_limit, stats.kv_tokens, stats.memory.draft_kv > 0))
            return super().plan(*arguments)

    with SLOSpecGenerator(target, draft, tokenizer, config, make_policy=lambda *_: Watched(Plan(2, 1))) as generator:
        handles = [generator.submit(prompt, max_new_tokens=30) for prompt in PROMPTS]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
        # For one alone there is memory to draft, if the others, depending on when they came, left none.
        assert generator.submit(PROMPTS[0], max_new_tokens=30).result(WAIT_S).token_ids == expected[0]
    most = {limit: max(held for own, held, _ in seen if own == limit) for limit in {own for own, _, _ in seen}}
    assert most.keys() == ({300, 510} if kv_tokens is None else {300})
    assert all(held <= limit for limit, held in most.items())
    assert any(has_drafts for _, _, has_drafts in seen)
    if kv_tokens is None:
        assert most[510] > 300
        assert not any(has_drafts for limit, _, has_drafts in seen if limit == 510)
