"""A generator's batcher: starting, stopping, full queues, calls from its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer

from hf_slospec import (
    NotRunningError,
    SLOSpecGenerator,
)
from tests.support.served_pair import PROMPTS, WAIT_S, Fails, alone


def test_waiting_for_a_request_in_the_thread_that_decodes_it_is_refused(served):
    others = []

    def waits(input_ids, scores):
        others[0].result()
        return scores

    others.append(served.submit(PROMPTS[0], max_new_tokens=2000))
    waiting = served.submit(
        PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([waits])
    )
    with pytest.raises(NotRunningError, match="own thread"):
        waiting.result(WAIT_S)
    others[0].cancel()


def test_a_streamer_may_stop_the_batcher(pair):
    generator = SLOSpecGenerator(*pair)

    class Stops(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            generator.stop(drain=True)

    with generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=20, streamer=Stops(pair[2]))
        assert handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=20)
        generator.stop()  # waits for the streamer
        generator.start()
        assert (
            generator.submit(PROMPTS[0], max_new_tokens=3).result(WAIT_S).finish_reason == "length"
        )


def test_starting_again_in_the_thread_that_is_stopping_is_refused(pair):
    generator = SLOSpecGenerator(*pair)
    was_asked = threading.Event()

    def starts(input_ids, scores):
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


def test_requests_are_let_go_when_they_are_over(served):
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
    # Pushes them out of the engine's last step.
    served.submit(PROMPTS[0], max_new_tokens=3).result(WAIT_S)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_generators_and_handles_serve_asyncio(pair, served):
    async def several():
        served.stop()
        async with served as same:
            assert same is served
            handles = [served.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
            results = await asyncio.gather(*handles)
            unfinished = served.submit(PROMPTS[0], max_new_tokens=20)
        return handles, results, unfinished

    handles, results, unfinished = asyncio.run(several())
    for handle, result, prompt in zip(handles, results, PROMPTS[:2], strict=True):
        assert result.token_ids == alone(pair, prompt, max_new_tokens=6)
        assert handle.text == result.text
    assert unfinished.finish_reason == "length"  # the end of the block waited for it
    with pytest.raises(NotRunningError):
        served.submit(PROMPTS[0])

    async def fails():
        async with served:
            handles.append(served.submit(PROMPTS[0], max_new_tokens=2000))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    assert handles[-1].finish_reason == "cancelled"
    served.start()


def test_a_closed_generator_says_so(pair):
    generator = SLOSpecGenerator(*pair)
    generator.close()  # it need not have run
    with pytest.raises(NotRunningError, match="was closed"):
        generator.start()
    generator = SLOSpecGenerator(*pair)
    with generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=9)
        generator.close()
        assert handle.finish_reason == "length"
        generator.close()
    for call in (generator.__enter__, generator.start):
        with pytest.raises(NotRunningError, match="was closed; make a new one"):
            call()
    for call in (generator.submit, generator.generate):
        with pytest.raises(NotRunningError, match="was closed; make a new one"):
            call(PROMPTS[0])
    generator.stop()
