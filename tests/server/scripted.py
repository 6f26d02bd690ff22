"""An engine whose model always writes the same tokens."""

from __future__ import annotations

from types import SimpleNamespace

from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.tool_calls import response_template

QWEN = response_template(
    SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), SimpleNamespace()
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REASONING = "\nA city is\nneeded.\n"
ANSWER = f"<think>{REASONING}</think>\n\nI look.\n{CALL}\n{CALL}<|im_end|>"  # reasoning, a text and two calls


class Scripted(LocalEngine):
    """Engine whose model writes a text, or tokens of another tokenizer, ``size`` of them in a step."""

    def __init__(self, generator, text, tokenizer=None, size=3):
        super().__init__(generator, QWEN if tokenizer is None else None)
        if tokenizer is not None:
            self.tokenizer = tokenizer
            self.vocab_size = len(tokenizer)
        self.tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.size = size
        self.top = []
        self.fault = None  # raised instead of the first step
        self.orders = []

    async def submit(self, order):
        self.orders.append(order)
        return ScriptedDecoding(self, order.prompt)


class ScriptedDecoding:
    finish_reason = "stop"
    replica = None

    def __init__(self, engine, prompt):
        self.engine = engine
        self.metrics = Request(0, RequestParams(list(prompt), 1)).metrics()
        self.logprobs = [TokenLogprobs(-3.0, engine.top)] * len(engine.tokens)
        self.prompt_logprobs = [None, *[TokenLogprobs(-1.0, [])] * (len(prompt) - 1)]

    async def asteps(self):
        if self.engine.fault is not None:
            raise self.engine.fault
        tokens = self.engine.tokens
        size = self.engine.size
        for begin in range(0, len(tokens), size):
            yield tokens[begin : begin + size], begin + size >= len(tokens)

    def cancel(self):
        """Do nothing: nothing runs."""
