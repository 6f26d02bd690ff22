"""Tool calls that are forced: required, named, and one at most."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from hf_slospec import SLOSpecGenerator
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.bodies import ChatBody
from hf_slospec.server.messages import CallParts, Parts
from tests.server.conftest import Served, listening
from tests.server.test_messages import ANSWER, Scripted
from tests.support.breadth import nightly_but

CITY: dict[str, Any] = {"enum": ["Paris", "Rome"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "$defs": {"City": CITY},
                "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "later",
            "parameters": {"properties": {}, "additionalProperties": False},
        },
    },
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def check(calls: Any, *names: str) -> None:
    assert calls and {call.function.name for call in calls} <= set(names)
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert (
                arguments["city"] in CITY["enum"]
                and arguments["days"] in (1, 2)
                and len(arguments) == 2
            )
        else:  # functions without parameters
            assert arguments == {}


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("seed", nightly_but([1], [0, 1, 2]))
@pytest.mark.parametrize(
    ("choice", "tools", "names"),
    [
        ("required", [TOOLS[0], TOOLS[2]], ("weather", "later")),
        (NAMED, TOOLS, ("weather",)),
        ("required", [TOOLS[1]], ("now",)),
        (allowed("required", "later", "weather"), TOOLS, ("weather", "later")),
    ],
)
def test_forced_calls_are_made_whole_and_streamed(
    served: Served, choice: Any, tools: Any, names: tuple[str, ...], seed: int
) -> None:
    body: dict[str, Any] = dict(
        model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed,
        max_tokens=400,
    )  # fmt: skip
    with client_of(served) as client:
        (whole,) = client.chat.completions.create(**body).choices
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        assert whole.message.tool_calls is not None and len(whole.message.tool_calls) == 1
        check(whole.message.tool_calls, *names)
        with client.chat.completions.stream(**body) as stream:
            (final,) = stream.get_final_completion().choices
    assert final.finish_reason == "tool_calls" and not final.message.content
    again = final.message.tool_calls
    assert again is not None
    assert [call.function.arguments for call in again] == [
        call.function.arguments for call in whole.message.tool_calls if call.type == "function"
    ]


def test_several_calls_are_allowed_unless_forbidden(served: Served) -> None:
    body: dict[str, Any] = dict(
        model="tiny", messages=MESSAGES, tools=TOOLS[2:], tool_choice="required", max_tokens=60
    )
    bias = {str(token): -100.0 for token in served.generator.tokenizer.convert_tokens_to_ids(["]"])}
    with client_of(served) as client:
        (several,) = client.chat.completions.create(**body, logit_bias=bias, temperature=0).choices
        check(several.message.tool_calls, "later")
        (one,) = client.chat.completions.create(
            **body, parallel_tool_calls=False, temperature=0
        ).choices
        assert one.message.tool_calls is not None and len(one.message.tool_calls) == 1


def test_what_cannot_be_forced_is_refused_by_name(served: Served) -> None:
    def refused(match: str, **body: Any) -> None:
        with client_of(served) as client, pytest.raises(openai.BadRequestError, match=match):
            client.chat.completions.create(model="tiny", messages=MESSAGES, **body)

    refused("tool_choice", tool_choice="required")
    refused("tool_choice", tool_choice="required", tools=[])
    refused(
        "tool_choice", tool_choice={"type": "function", "function": {"name": "other"}}, tools=TOOLS
    )
    refused("tool_choice", tool_choice="any", tools=TOOLS)
    refused("tool_choice names 'other'", tool_choice=allowed("auto", "now", "other"), tools=TOOLS)
    refused("tool_choice", tool_choice=allowed("auto"), tools=TOOLS)
    refused("tool_choice", tool_choice=allowed("none", "now"), tools=TOOLS)
    refused(
        "tools",
        tool_choice="required",
        tools=[{"type": "function", "function": {"parameters": {}}}],
    )
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    refused("tools: the schema cannot be followed", tool_choice="required", tools=[wrong])
    refused(
        "tools ends the output",
        tool_choice="required",
        tools=TOOLS,
        extra_body={"ignore_eos": True},
    )


def test_allowed_tools_are_the_ones_that_are_shown(served: Served) -> None:
    body = ChatBody(messages=MESSAGES, tools=TOOLS, tool_choice=allowed("auto", "now", "weather"))
    assert body.shown_tools == TOOLS[:2] and not body.must_call and body.json_schema is None
    options: dict[str, Any] = dict(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
    with client_of(served) as client:
        few = client.chat.completions.create(tools=TOOLS[:2], **options)
        same = client.chat.completions.create(
            tools=TOOLS, tool_choice=allowed("auto", "weather", "now"), **options
        )
        assert same.choices[0].message.content == few.choices[0].message.content
        assert same.usage is not None and few.usage is not None
        assert same.usage.prompt_tokens == few.usage.prompt_tokens
        functions: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice: Any = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "later"}],
        }
        answer = client.responses.create(
            model="tiny",
            input="Weather?",
            tools=functions,
            tool_choice=choice,
            parallel_tool_calls=False,
        )
    assert [(item.type, item.name) for item in answer.output if item.type == "function_call"] == [
        ("function_call", "later")
    ]
    assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]


TWO = '[{"name": "a", "arguments": {"x": "}],{"}} ,\n {"name":"b","arguments":{}}]'


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_calls_are_read_whatever_the_pieces(size: int) -> None:
    parser = CallParts()
    found = Parts()
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


def test_call_that_is_cut_off_stays_text() -> None:
    parser = CallParts()
    found = parser.push(TWO[:-5], True)
    assert len(found.tool_calls) == 1 and found.content == '{"name":"b","arguments"'


def test_call_that_is_cut_off_is_no_call_for_the_client(served: Served) -> None:
    body: dict[str, Any] = dict(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=5
    )
    with client_of(served) as client:
        (choice,) = client.chat.completions.create(**body).choices
    assert (
        choice.finish_reason == "length"
        and choice.message.content
        and choice.message.tool_calls is None
    )


def test_calls_that_were_not_forced_may_be_limited_to_one(generator: SLOSpecGenerator) -> None:
    app = make_app(Scripted(generator, ANSWER), ServerSettings(model_name="tiny"))
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for parallel, number in ((True, 2), (False, 1)):
            answer = client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=parallel
            )
            assert len(answer.choices[0].message.tool_calls or ()) == number
