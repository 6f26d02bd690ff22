"""Reasoning, tool calls and content of chat answers, told apart as transformers' response templates
say.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.model.record import TokenLogprobs
from hf_slospec.server.answers import Answer
from hf_slospec.server.chats import ChatBody, Message
from hf_slospec.server.choices import Piece
from hf_slospec.server.response_events import ResponseAnswer
from hf_slospec.server.responses import ResponsesBody
from hf_slospec.server.tool_calls import (
    AnswerParts,
    CallParts,
    TemplateParts,
)
from tests.server.scripted import ANSWER, QWEN

PREFIX = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def parts_of(pieces, prefix=PREFIX):
    reader = TemplateParts(QWEN, prefix, TOOLS)
    found = AnswerParts()
    for place, piece in enumerate(pieces):
        found += reader.push(piece, place + 1 == len(pieces))
    assert reader.num_calls == len(found.tool_calls)
    return found


@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_pieces_of_any_size_give_the_same(cuts):
    ends = [0, *sorted(cuts), len(ANSWER)]
    found = parts_of([ANSWER[begin:end] for begin, end in itertools.pairwise(ends)])
    whole = parts_of([ANSWER])
    assert (found.content, found.reasoning) == (whole.content, whole.reasoning)
    assert [call["function"] for call in found.tool_calls] == [
        call["function"] for call in whole.tool_calls
    ]


def test_reasoning_that_the_prompt_began_is_reasoning():
    found = parts_of(["so it ", "is.</think>Yes."], PREFIX + "<think>\n")
    assert (found.reasoning, found.content) == ("so it is.", "Yes.")


@pytest.mark.parametrize(
    "text", ["<tool_call>{not json}</tool_call> and on", '<tool_call>{"arguments": {}}</tool_call>']
)
def test_what_cannot_be_parsed_stays_text(text):
    for pieces in ([text], [text[:15], text[15:]], [f"Yes. {text[:5]}", *text[5:]]):
        found = parts_of(pieces)
        assert not found.tool_calls and found.content == "".join(pieces)


def test_arguments_of_earlier_calls_are_mappings_for_the_chat_template():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    broken = {"id": "2", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    message = Message(role="assistant", content=None, tool_calls=[call, broken])
    shown = message.for_template(int)["tool_calls"]
    assert shown[0]["function"]["arguments"] == {"city": "Paris"} and shown[1] == broken


def test_arguments_that_nest_too_deeply_stay_text():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    message = Message(role="assistant", content=None, tool_calls=[call])
    assert message.for_template(int)["tool_calls"] == [call]


TWO = '[{"name": "a", "arguments": {"x": "}],{"}} ,\n {"name":"b","arguments":{}}]'


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_calls_are_read_whatever_the_pieces(size):
    parser = CallParts()
    found = AnswerParts()
    for at in range(0, len(TWO), size):
        found += parser.push(TWO[at : at + size], at + size >= len(TWO))
    assert [call["function"] for call in found.tool_calls] == [
        {"name": "a", "arguments": '{"x": "}],{"}'},
        {"name": "b", "arguments": "{}"},
    ]
    assert (
        [call["index"] for call in found.tool_calls] == [0, 1]
        and not found.content
        and parser.num_calls == 2
    )


def test_call_that_is_cut_off_stays_text():
    parser = CallParts()
    found = parser.push(TWO[:-5], True)
    assert len(found.tool_calls) == 1 and found.content == '{"name":"b","arguments"'


def test_log_probabilities_of_a_response_are_those_of_its_text():
    chat = ChatBody(messages=[{"role": "user", "content": "x"}], logprobs=True)
    chat_form = Answer("tiny", chat, lambda token: b"abcdefgh"[token : token + 1])
    body = ResponsesBody.model_validate({"input": "x", "include": ["message.output_text.logprobs"]})
    answer = ResponseAnswer(body, chat_form)

    def add(tokens, parts, reason=None):
        logprobs = [TokenLogprobs(-1.0, ()) for _ in tokens]
        answer.chunk(Piece(0, "", tokens, logprobs, reason, parts), (), False)

    add([0, 1], AnswerParts(reasoning="ab"))
    add([2, 3, 4], AnswerParts(content="de", reasoning="c"))
    add([5], AnswerParts())  # held back, as it may begin a stop string
    add([6], AnswerParts(content="fg"))
    add(
        [7],
        AnswerParts(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        "tool_calls",
    )
    _, message, call = answer.blocks
    assert message["content"][0]["text"] == "defg" and call["type"] == "function_call"
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["d", "e", "f", "g"]
