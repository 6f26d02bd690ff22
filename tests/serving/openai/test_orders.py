"""What fields of a request's body mean to the batcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig

from hf_slospec.serving.openai.bodies import CompletionBody
from hf_slospec.serving.openai.orders import PromptInputs, order_of


def test_a_lower_priority_is_earlier_as_in_the_batcher() -> None:
    engine: Any = SimpleNamespace(generation_config=GenerationConfig(), max_len=64, vocab_size=100)
    body = CompletionBody(model="tiny", prompt="x", priority=-3)
    assert order_of(body, PromptInputs([1, 2], {}), {}, engine, 0).arguments["priority"] == -3
