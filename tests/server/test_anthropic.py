"""Anthropic's Messages API in its documented wire format, against the chat endpoint."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hf_slospec import SLOSpecGenerator
from hf_slospec.server.answers import error_body
from hf_slospec.server.anthropic import MessagesBody, anthropic_error
from hf_slospec.server.app import ServerSettings, make_app
from tests.server.conftest import KEY, Served, listening
from tests.server.test_messages import ANSWER, Scripted

PATH = "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "pass"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": [USER]}
WEATHER: dict[str, Any] = {
    "name": "weather", "description": "Weather of a city.", "cache_control": {"type": "ephemeral"},
    "input_schema": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def scripted(generator: SLOSpecGenerator) -> Iterator[httpx.Client]:
    """A client of a server whose model reasons, writes and calls two tools."""
    app = make_app(Scripted(generator, ANSWER), ServerSettings(model_name="tiny"))
    with listening(app) as url, httpx.Client(base_url=url, timeout=120.0) as client:
        yield client


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json=ASKED | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert (
        found["type"] == "message"
        and found["role"] == "assistant"
        and found["id"].startswith("msg_")
    )
    return found


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json=ASKED | body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.read().decode().strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream build, as clients do it."""
    begin, ping, *events = events
    assert (begin["type"], ping) == ("message_start", {"type": "ping"}) and events[-1] == {
        "type": "message_stop"
    }
    message: dict[str, Any] = begin["message"]
    assert (
        message["content"] == []
        and message["stop_reason"] is None
        and message["usage"]["output_tokens"] == 0
    )
    assert "metrics" not in message["usage"]
    for event in events[:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                block = message["content"][event["index"]]
                delta = event["delta"]
                name = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "input_json_delta": "json",
                }[delta["type"]]
                block[name] += delta["partial_json" if name == "json" else name]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if text := block.pop("json"):
                    block["input"] = json.loads(text)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    return {name: message[name] for name in ("stop_reason", "stop_sequence")} | {"content": blocks}


def test_message_is_that_of_the_chat(served: Served) -> None:
    chat = served.client.post("/v1/chat/completions", json={
        "messages": [{"role": "system", "content": "def stack():"}, USER], "max_tokens": 12, "temperature": 0,
    }).json()  # fmt: skip
    for system in (
        "def stack():",
        [{"type": "text", "text": "def "}, {"type": "text", "text": "stack():"}],
    ):
        found = create(served.client, system=system, temperature=0)
        (block,) = found["content"]
        assert block == {"type": "text", "text": chat["choices"][0]["message"]["content"]}
        usage = found["usage"]
        assert (
            usage["input_tokens"] + usage["cache_read_input_tokens"]
            == chat["usage"]["prompt_tokens"]
        )
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
        assert found["stop_reason"] == (
            "max_tokens" if usage["output_tokens"] == 12 else "end_turn"
        )


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 5, "top_k": 9}, {"temperature": 0, "stop": "x"}]
)
def test_stream_builds_the_message(served: Served, options: dict[str, Any]) -> None:
    text = create(served.client, **{"temperature": 0, "max_tokens": 30})["content"][0]["text"]
    if "stop" in options:
        options = {"temperature": 0, "max_tokens": 30, "stop_sequences": ["never seen", text[5:8]]}
    whole = create(served.client, **options)
    assert without_ids(built(streamed(served.client, **options))) == without_ids(whole)
    if "stop_sequences" in options:
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[5:8])
        assert whole["content"][0]["text"] == text[: text.index(text[5:8])]


def test_thinking_text_and_tools_are_blocks(scripted: httpx.Client) -> None:
    whole = create(scripted, tools=[WEATHER])
    assert (
        whole["stop_reason"] == "tool_use"
        and whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    )
    thinking, text, *calls = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "\nA city is\nneeded.\n", "signature": ""}
    assert text["text"].strip() == "I look."
    for call in calls:
        assert (call["type"], call["name"], call["input"]) == (
            "tool_use",
            "weather",
            {"city": "Paris"},
        )
    assert len({call["id"] for call in calls}) == 2
    assert without_ids(built(streamed(scripted, tools=[WEATHER]))) == without_ids(whole)
    one = create(
        scripted, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True},
                                    {"type": "tool", "name": "weather"}])  # fmt: skip
def test_tools_may_be_forced(served: Served, choice: dict[str, Any]) -> None:
    options = dict(tools=[WEATHER, WEATHER | {"name": "other"}][: 1 + (choice["type"] == "tool")], tool_choice=choice,
                   max_tokens=100, temperature=0)  # fmt: skip
    whole = create(served.client, **options)
    (call,) = whole["content"]
    assert call["name"] == "weather" and call["input"]["city"] in ("Paris", "Rome")
    assert whole["stop_reason"] == "tool_use"
    assert without_ids(built(streamed(served.client, **options))) == without_ids(whole)


def test_blocks_become_messages_of_the_chat() -> None:
    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
    chat = MessagesBody.model_validate(ASKED | {
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": image}, {"type": "text", "text": "Where?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": True,
                 "content": [{"type": "text", "text": "which city?"}]},
            ]},
        ],
        "tools": [WEATHER], "tool_choice": {"type": "none"}, "output_config": {"effort": "low"},
        "metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "adaptive"}, "slo_tpot": 0.5,
    }).chat  # fmt: skip
    user, turn, first, second, last = chat.messages
    assert user.num_images == 1
    assert turn.for_template() == {
        "role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
            {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": {}}},
        ],
    }  # fmt: skip
    assert first.for_template() == {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    assert second.for_template() == {
        "role": "tool", "tool_call_id": "call_2", "content": "which city?", "is_error": True,
    }  # fmt: skip
    assert last.for_template() == {"role": "user", "content": "Well?"}
    assert chat.shown_tools is None and chat.slo_tpot == 0.5 and chat.max_tokens == 12
    assert chat.reasoning_effort == "low"


def test_answer_goes_on_from_the_assistants_last_message(served: Served) -> None:
    tokenizer = served.generator.tokenizer
    count = served.client.post(f"{PATH}/count_tokens", json={
        "model": "tiny", "messages": [USER, {"role": "assistant", "content": "return"}],
    })  # fmt: skip
    prompt = "# user\npass\n# assistant\nreturn"
    assert count.json() == {"input_tokens": len(tokenizer(prompt)["input_ids"])}
    found = create(
        served.client, messages=[USER, {"role": "assistant", "content": "return"}], temperature=0
    )
    expected = served.client.post(
        "/v1/completions",
        json={"prompt": tokenizer(prompt)["input_ids"], "max_tokens": 12, "temperature": 0},
    )
    assert found["content"][0]["text"] == expected.json()["choices"][0]["text"]


def test_tokens_are_counted_with_system_and_tools(served: Served) -> None:
    body: dict[str, Any] = {"messages": [USER], "system": "def stack():", "tools": [WEATHER]}
    counts = [
        served.client.post(f"{PATH}/count_tokens", json=body | {"model": "tiny"}).json()[
            "input_tokens"
        ]
    ]
    for name in ("tools", "system"):
        del body[name]
        counts.append(served.client.post(f"{PATH}/count_tokens", json=body).json()["input_tokens"])
    assert counts == sorted(set(counts), reverse=True)
    usage = create(served.client)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counts[-1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content"),
    ({"messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://elsewhere"}}]}]}, "source"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop"),
    ({"container": "x"}, "container"),
    ({"output_config": {"effort": 3}}, "effort"),
    ({"slo_tpot": -1}, "slo_tpot"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_served_is_refused_by_name(
    served: Served, body: dict[str, Any], named: str
) -> None:
    answer = served.client.post(PATH, json=ASKED | body)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert (
        answer.json()["error"]["type"] == "invalid_request_error"
        and named in answer.json()["error"]["message"]
    )


def test_errors_have_anthropics_form(served: Served) -> None:
    client = served.client
    for status, kind, answer in (
        (404, "not_found_error", client.post(PATH, json=ASKED | {"model": "other"})),
        (405, "invalid_request_error", client.get(PATH)),
        (415, "invalid_request_error", client.post(PATH, content="{}")),
        (413, "request_too_large", client.post(PATH, json=ASKED | {"system": "x" * 2**23})),
    ):
        found = answer.json()
        assert (
            answer.status_code == status
            and found["type"] == "error"
            and found["error"]["type"] == kind
        )
    assert (
        anthropic_error(error_body("x", "service_unavailable_error"))["error"]["type"]
        == "overloaded_error"
    )
    assert client.get("/v1/no_messages").json()["error"]["param"] is None


def test_error_within_a_stream_is_its_last_event(generator: SLOSpecGenerator) -> None:
    class Failing(Scripted):
        async def submit(self, order: Any) -> Any:
            decoding = await super().submit(order)
            decoding.tokens = None  # type: ignore[attr-defined]
            return decoding

    app = make_app(Failing(generator, ANSWER), ServerSettings(model_name="tiny"))
    with listening(app) as url, httpx.Client(base_url=url, timeout=120.0) as client:
        *_, last = streamed(client)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_key_may_be_in_anthropics_header(guarded: Served) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        body = ASKED if path == PATH else {"messages": [USER]}
        for headers, status in (
            ({"x-api-key": KEY}, 200),
            ({"Authorization": f"Bearer {KEY}"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ):
            answer = guarded.client.post(path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"


def test_slos_are_told_and_measured(served: Served) -> None:
    assert create(served.client, slo_tpot=5.0)["usage"]["metrics"]["slo_tpot"] == 5.0
    answer = served.client.post(PATH, json=ASKED, headers={"x-slo-tpot-ms": "5000"})
    assert answer.headers["x-slo-guaranteed"] in ("true", "false")
