"""A generator's batcher: starting, stopping, full queues, calls from its own thread."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer

from hf_slospec import (
    NotRunningError,
    QueueFull,
    RequestHandle,
    SLOSpecGenerator,
)
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, Fails, alone


def test_before_the_start_and_after_the_end(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    generator = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    with pytest.raises(NotRunningError, match="start"):
        generator.submit("x")
    generator.stop()  # does nothing
    with generator:
        handle = generator.submit("x", max_new_tokens=3)
    assert handle.done()
    with pytest.raises(NotRunningError, match="stopped"):
        generator.submit("x")
    assert isinstance(generator.start().submit("x", max_new_tokens=3), RequestHandle)
    generator.stop(drain=False)


def test_a_full_queue(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    config = CONFIG.model_copy(update={"max_queue": 1, "max_batch": 1})
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        handles = [generator.submit(PROMPTS[0], max_new_tokens=200)]
        with contextlib.suppress(QueueFull):  # whether the first still waits
            handles.append(generator.submit(PROMPTS[0], max_new_tokens=200))
        with pytest.raises(QueueFull, match="block=True"):
            generator.submit(PROMPTS[0], max_new_tokens=3)
        late = generator.submit(PROMPTS[0], max_new_tokens=3, block=True)
        for handle in handles:
            handle.cancel()
        assert len(late.result(WAIT_S).token_ids) == 3
    assert generator.stats().waiting == 0


def test_waiting_for_a_request_in_the_thread_that_decodes_it_is_refused(
    served: SLOSpecGenerator,
) -> None:
    others = list[RequestHandle]()

    def waits(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        others[0].result()
        return scores

    others.append(served.submit(PROMPTS[0], max_new_tokens=2000))
    waiting = served.submit(
        PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([waits])
    )
    with pytest.raises(NotRunningError, match="own thread"):
        waiting.result(WAIT_S)
    others[0].cancel()


def test_a_streamer_may_stop_the_batcher(pair: tuple[Any, Any, Any]) -> None:
    generator = SLOSpecGenerator(*pair)

    class Stops(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            generator.stop(drain=True)

    with generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=20, streamer=Stops(pair[2]))
        assert handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=20)
        generator.stop()  # waits for the streamer
        generator.start()
        assert (
            generator.submit(PROMPTS[0], max_new_tokens=3).result(WAIT_S).finish_reason == "length"
        )


def test_starting_again_in_the_thread_that_is_stopping_is_refused(
    pair: tuple[Any, Any, Any],
) -> None:
    generator = SLOSpecGenerator(*pair)
    was_asked = threading.Event()

    def starts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generator.start()  # does nothing while the batcher runs
        was_asked.set()
        while generator._service._batcher._is_taking:
            time.sleep(0.001)
        generator.start()
        return scores

    with generator:
        handle = generator.submit(
            PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([starts])
        )
        assert was_asked.wait(WAIT_S)
        generator.stop(drain=True)
        with pytest.raises(NotRunningError, match="own thread"):
            handle.result(WAIT_S)


def test_requests_are_let_go_when_they_are_over(served: SLOSpecGenerator) -> None:
    fails = StoppingCriteriaList([Fails(3)])
    handles = [
        served.submit(PROMPTS[0], max_new_tokens=9, slo_tpot=1e-9, slo_ttft=1e-9),
        served.submit(PROMPTS[0], max_new_tokens=9, stopping_criteria=fails),
        served.submit(PROMPTS[0], max_new_tokens=9, do_sample=True),
    ]
    for handle in handles:
        with contextlib.suppress(ZeroDivisionError):
            handle.result(WAIT_S)
    gone = [weakref.ref(handle.request) for handle in handles]
    del handles, handle
    served.submit(PROMPTS[0], max_new_tokens=3).result(
        WAIT_S
    )  # pushes them out of the engine's last step
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
