"""Several generators on one model: every one decodes its own requests, and none waits for long."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_slospec import SLOSpecGenerator
from tests.support.breadth import quick_or
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, alone


def test_generate_calls_of_threads_and_batchers_give_what_stock_gives(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    generators = [SLOSpecGenerator(target, draft, tokenizer, CONFIG), SLOSpecGenerator(target, None, tokenizer, CONFIG)]
    expected = [alone(pair, prompt, max_new_tokens=quick_or(12, 20)) for prompt in PROMPTS[:4]]
    found = dict[tuple[int, int], list[int]]()

    def call(number: int) -> None:
        for index in range(2):
            inputs = tokenizer(PROMPTS[2 + index], return_tensors="pt")
            inputs.pop("token_type_ids", None)
            out = generators[number].generate(**inputs, max_new_tokens=quick_or(12, 20))
            found[number, index] = torch.as_tensor(out)[0, inputs["input_ids"].shape[1] :].tolist()

    with generators[0], generators[1]:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        handles = [own.submit(prompt, max_new_tokens=quick_or(12, 20)) for own in generators for prompt in PROMPTS[:2]]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == 2 * expected[:2]
        for thread in threads:
            thread.join(WAIT_S)
    assert found == {(number, index): expected[2 + index] for number in range(2) for index in range(2)}
