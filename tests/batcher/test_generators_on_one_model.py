"""Several generators on one model: every one decodes its own requests, and none waits for long."""

from __future__ import annotations

import pytest

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.batcher.service import BatchingService
from tests.support.breadth import quick_or
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, alone

LONG = quick_or(60, 120)  # tokens of the heavy load


@pytest.fixture
def turns(monkeypatch):
    """The services whose steps have ended, in order."""
    found = []
    on_step = BatchingService.on_step

    def noted(service, step):
        found.append(service)
        on_step(service, step)

    monkeypatch.setattr(BatchingService, "on_step", noted)
    return found


@pytest.mark.parametrize("shares_draft", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_generators_on_one_model_take_turns_whatever_their_load(pair, turns, shares_draft):
    target, draft, tokenizer = pair
    light = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    heavy = SLOSpecGenerator(
        target, draft if shares_draft else None, tokenizer, SLOSpecConfig(max_batch=4)
    )
    expected = [
        alone(pair, prompt, max_new_tokens=LONG, eos_token_id=None) for prompt in PROMPTS[:6]
    ]
    expected.append(alone(pair, PROMPTS[6], max_new_tokens=LONG // 4))
    with light, heavy:
        # Its service has started before the load comes.
        light.submit(PROMPTS[7], max_new_tokens=2).result(WAIT_S)
        turns.clear()
        handles = [
            heavy.submit(prompt, max_new_tokens=LONG, eos_token_id=None) for prompt in PROMPTS[:6]
        ]
        next(handles[0].tokens())
        handles.append(light.submit(PROMPTS[6], max_new_tokens=LONG // 4))
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
        first = turns.index(light._service)
        last = len(turns) - turns[::-1].index(light._service)
        meanwhile = turns[first:last]
        number = meanwhile.count(light._service)
        # One each, but for threads that the machine holds up.
        assert 0 < meanwhile.count(heavy._service) <= 5 * number + 5
