"""Reasoning, tool calls and content of chat answers, told apart as transformers' response templates
say.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec import SLOSpecGenerator
from hf_slospec.request.request import Request, RequestParams
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.bodies import Message
from hf_slospec.server.engine import Decoding, LocalEngine, Order
from hf_slospec.server.messages import Parts, PlainParts, TemplateParts, response_template
from tests.server.conftest import listening

QWEN: Any = response_template(
    SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), SimpleNamespace()
)
PREFIX = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nA city is\nneeded.\n</think>\n\nI look.\n{CALL}\n{CALL}<|im_end|>"


def parts_of(pieces: list[str], prefix: str = PREFIX) -> Parts:
    reader = TemplateParts(QWEN, prefix, TOOLS)
    found = Parts()
    for place, piece in enumerate(pieces):
        found += reader.push(piece, place + 1 == len(pieces))
    assert reader.num_calls == len(found.tool_calls)
    return found


def test_an_answer_is_told_apart() -> None:
    found = parts_of([ANSWER])
    assert found.content.strip() == "I look." and found.content[0] == "I"
    assert found.reasoning == "\nA city is\nneeded.\n"
    assert [call["index"] for call in found.tool_calls] == [0, 1]
    assert len({call["id"] for call in found.tool_calls}) == 2
    for call in found.tool_calls:
        assert call["function"]["name"] == "weather" and json.loads(
            call["function"]["arguments"]
        ) == {"city": "Paris"}


@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_pieces_of_any_size_give_the_same(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(ANSWER)]
    found = parts_of([ANSWER[begin:end] for begin, end in itertools.pairwise(ends)])
    whole = parts_of([ANSWER])
    assert (found.content, found.reasoning) == (whole.content, whole.reasoning)
    assert [call["function"] for call in found.tool_calls] == [
        call["function"] for call in whole.tool_calls
    ]


def test_reasoning_that_the_prompt_began_is_reasoning() -> None:
    found = parts_of(["so it ", "is.</think>Yes."], PREFIX + "<think>\n")
    assert (found.reasoning, found.content) == ("so it is.", "Yes.")


@pytest.mark.parametrize(
    "text", ["<tool_call>{not json}</tool_call> and on", '<tool_call>{"arguments": {}}</tool_call>']
)
def test_what_cannot_be_parsed_stays_text(text: str) -> None:
    for pieces in ([text], [text[:15], text[15:]], [f"Yes. {text[:5]}", *text[5:]]):
        found = parts_of(pieces)
        assert not found.tool_calls and found.content == "".join(pieces)


def test_without_a_template_all_is_content() -> None:
    assert PlainParts().push(ANSWER, True) == Parts(ANSWER)


def test_arguments_of_earlier_calls_are_mappings_for_the_chat_template() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    broken = {"id": "2", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    message = Message(role="assistant", content=None, tool_calls=[call, broken])  # type: ignore[call-arg]
    shown = message.for_template()["tool_calls"]
    assert shown[0]["function"]["arguments"] == {"city": "Paris"} and shown[1] == broken


class Scripted(LocalEngine):
    """Engine whose model always writes the same text, some tokens at a time."""

    def __init__(self, generator: SLOSpecGenerator, text: str):
        super().__init__(generator, QWEN)
        self.tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def submit(self, order: Order) -> Decoding:
        return ScriptedDecoding(order.prompt, self.tokens)


class ScriptedDecoding:
    logprobs = ()
    finish_reason = "stop"
    replica = None

    def __init__(self, prompt: list[int], tokens: list[int]):
        self.metrics = Request(0, RequestParams(prompt, 1)).metrics()
        self.tokens = tokens

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        for begin in range(0, len(self.tokens), 3):
            yield self.tokens[begin : begin + 3], begin + 3 >= len(self.tokens)

    def cancel(self) -> None:
        pass


def test_openai_clients_see_tool_calls_whole_and_streamed(generator: SLOSpecGenerator) -> None:
    app = make_app(Scripted(generator, ANSWER), ServerSettings(model_name="tiny"))
    messages: Any = [{"role": "user", "content": "Weather?"}]
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None and choice.message.content is not None
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2  # type: ignore[union-attr]
        assert choice.message.reasoning_content == "\nA city is\nneeded.\n"  # type: ignore[attr-defined]
        with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.content == choice.message.content
        again = final.choices[0].message.tool_calls
        assert again is not None
        assert [call.function.arguments for call in again] == ['{"city": "Paris"}'] * 2
        assert httpx.get(f"{url}/health").status_code == 200


BROKEN = [
    '<think>hm</think>\n\n<tool_call>\n{"name": "weather", "argu',
    f'<think>hm</think>Hello {CALL}\n<tool_call>\n{{"name": "wea',
    f"{CALL}\n<tool_call>\n{{bad",
    '<<tool_call>{bad<|im_end|>{"name": 3}',
    '<<tool_call>{"name": 3}<tool_call>',
    "a < b <think>so</think> c <",
]


@pytest.mark.parametrize("text", BROKEN)
def test_broken_answers_are_told_apart_the_same_however_they_come(text: str) -> None:
    whole = parts_of([text])
    for size in (1, 2, 3, 7):
        found = parts_of([text[at : at + size] for at in range(0, len(text), size)])
        assert (found.content, found.reasoning, len(found.tool_calls)) == (
            whole.content,
            whole.reasoning,
            len(whole.tool_calls),
        )
    assert len(whole.tool_calls) == text.count(CALL) and "</think>" not in whole.content
    last = text.rpartition("<tool_call>")[2] if "<tool_call>" in text else "c <"
    assert last in whole.content


def test_arguments_that_nest_too_deeply_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    message = Message(role="assistant", content=None, tool_calls=[call])  # type: ignore[call-arg]
    assert message.for_template()["tool_calls"] == [call]
