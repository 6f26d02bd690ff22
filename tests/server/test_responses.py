"""OpenAI's Responses API through OpenAI's client, against the chat endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from hf_slospec import SLOSpecGenerator
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.responses import ResponsesBody
from tests.server.conftest import Served, listening
from tests.server.test_messages import ANSWER, Scripted

WEATHER: Any = {
    "type": "function", "name": "weather", "strict": True, "description": "Weather of a city.",
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def scripted(generator: SLOSpecGenerator) -> Iterator[openai.OpenAI]:
    """A client of a server whose model reasons, writes and calls two tools."""
    app = make_app(Scripted(generator, ANSWER), ServerSettings(model_name="tiny"))
    with (
        listening(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def chat_text(client: openai.OpenAI, messages: Any, **options: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=messages, **options)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize(
    "options", [dict(temperature=0), dict(temperature=0.8, top_p=0.9, extra_body={"seed": 3})]
)
def test_output_is_that_of_the_chat(client: openai.OpenAI, options: dict[str, Any]) -> None:
    text = chat_text(
        client,
        [{"role": "system", "content": "def stack():"}, {"role": "user", "content": "pass"}],
        max_tokens=15,
        **options,
    )
    inputs: list[Any] = [
        "pass",
        [{"role": "user", "content": "pass"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "pass"}]}],
    ]
    for given in inputs:
        body: dict[str, Any] = dict(
            model="tiny", input=given, instructions="def stack():", max_output_tokens=15
        )
        whole = client.responses.create(**body, **options)
        assert whole.output_text == text and whole.object == "response" and whole.store is False
        (item,) = whole.output
        assert item.type == "message" and item.status == whole.status
        assert whole.usage is not None and whole.usage.input_tokens + whole.usage.output_tokens == (
            whole.usage.total_tokens
        )
        if whole.usage.output_tokens == 15:
            assert whole.status == "incomplete" and whole.incomplete_details is not None
            assert whole.incomplete_details.reason == "max_output_tokens"


def test_stream_has_the_documented_events(client: openai.OpenAI) -> None:
    body: dict[str, Any] = dict(model="tiny", input="pass", temperature=0, max_output_tokens=9)
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
    with client.responses.stream(**body) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_end_of_a_stream_is_completed(scripted: openai.OpenAI) -> None:
    with scripted.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.status == "completed"
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [kind for kind in kinds if "reasoning" in kind][-1] == "response.reasoning_text.done"
    assert kinds.count("response.function_call_arguments.done") == 2
    whole = scripted.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
    (*_, last) = scripted.responses.create(
        model="tiny", input="Weather?", tools=[WEATHER], stream=True
    )
    assert last.type == "response.completed"
    for item, again in zip(whole.output, last.response.output, strict=True):
        ids = {"id": None, "call_id": None}
        assert again.to_dict() | ids == item.to_dict() | ids
    reasoning = whole.output[0]
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "\nA city is\nneeded.\n"
    assert (
        whole.usage is not None
        and 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    )


@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param({"type": "function", "name": "weather"}, marks=pytest.mark.nightly)],
)
def test_forced_function_calls(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = dict(
        model="tiny", input="Weather?", tools=[WEATHER], tool_choice=choice, max_output_tokens=400, temperature=0,
        parallel_tool_calls=False,
    )  # fmt: skip
    whole = client.responses.create(**body)
    (call,) = whole.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    *_, last = client.responses.create(**body, stream=True)
    assert last.type == "response.completed" and last.response.output[0].type == "function_call"


def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    answer = client.responses.create(
        model="tiny", input="x", max_output_tokens=80,
        text={"format": {"type": "json_schema", "name": "found", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert isinstance(json.loads(answer.output_text)["ok"], bool)
    assert (
        answer.text is not None
        and answer.text.format is not None
        and answer.text.format.type == "json_schema"
    )


def test_output_may_be_sent_back_with_what_functions_returned(scripted: openai.OpenAI) -> None:
    first = scripted.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    again = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_unset=True) for item in first.output),
    ]
    chat = ResponsesBody.model_validate({"input": [*again, *results]}).chat
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    turn = chat.messages[1].for_template()
    assert turn["content"] == "I look.\n" or turn["content"] == "I look."
    assert turn["reasoning_content"] == "\nA city is\nneeded.\n"
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}}
    ] * 2
    assert [call["id"] for call in turn["tool_calls"]] == [call.call_id for call in calls]
    assert [message.for_template()["tool_call_id"] for message in chat.messages[2:]] == [
        call.call_id for call in calls
    ]  # the template of these tests drops calls, so this text is refused rather than answered
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        scripted.responses.create(model="tiny", input=[*again, *results])  # type: ignore[list-item]


def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=match):
            client.responses.create(**dict(model="tiny", input="x") | options)

    refused("store.*stores no responses", store=True)
    refused("previous_response_id.*stores no responses", previous_response_id="resp_1")
    refused("background", background=True)
    refused("truncation", truncation="middle")
    refused("include", include=["web_search_call.results"])
    refused("top_logprobs", top_logprobs=2)
    refused("tools", tools=[{"type": "web_search"}])
    refused("tool_choice", tool_choice="required")
    refused("input", input=[])
    refused("input", input=[{"type": "item_reference", "id": "msg_1"}])
    refused("image_url", input=[{"role": "user", "content": [
        {"type": "input_image", "image_url": "http://elsewhere/x.png", "detail": "auto"}]}])  # fmt: skip
    refused("reasoning.summary", reasoning={"summary": "detailed"})
    refused("temperature", temperature=-1)
    refused("max_output_tokens", max_output_tokens=0)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    body = ResponsesBody.model_validate(
        {"input": "x", "reasoning": {"effort": "low", "summary": "auto"}}
    )
    assert body.chat.reasoning_effort == "low"
    with pytest.raises(ValidationError, match="json_schema"):
        _ = ResponsesBody.model_validate(
            {"input": "x", "text": {"format": {"type": "json_schema"}}}
        ).chat


def test_slos_are_told_and_measured(served: Served, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="x", max_output_tokens=4, extra_body={"slo_tpot": 5.0, "priority": 1}
    )
    assert answer.usage is not None and answer.usage.metrics["slo_tpot"] == 5.0  # type: ignore[attr-defined]
    raw = httpx.post(
        f"{served.url}/v1/responses",
        json={"input": "x", "max_output_tokens": 4},
        headers={"x-slo-tpot-ms": "5000"},
    )
    assert raw.json()["usage"]["metrics"]["slo_tpot"] == 5.0 and raw.headers[
        "x-slo-guaranteed"
    ] in ("true", "false")


def test_error_within_a_stream_is_its_last_event(generator: SLOSpecGenerator) -> None:
    class Failing(Scripted):
        async def submit(self, order: Any) -> Any:
            decoding = await super().submit(order)
            decoding.tokens = None  # type: ignore[attr-defined]
            return decoding

    app = make_app(Failing(generator, ANSWER), ServerSettings(model_name="tiny"))
    with (
        listening(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        *_, last = made.responses.create(model="tiny", input="x", stream=True)
        assert last.type == "response.failed" and last.response.error is not None
        assert last.response.error.code == "server_error"
