"""What common clients send beside the plain fields: hints, marks for caches, dumped items, tiny
temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.model.sampling import TokenLogprobs
from hf_slospec.server.answers import Answer
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.choices import Piece
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.messages import Parts
from hf_slospec.server.responses import ResponseAnswer, ResponsesBody
from tests.server.conftest import Served, listening
from tests.server.test_completions import alone, complete, text_of
from tests.server.test_messages import ANSWER, Scripted

USER: dict[str, Any] = {"role": "user", "content": "pass"}
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CACHED = {"cache_control": {"type": "ephemeral"}}
EFFORT_TEMPLATE = (
    "{% if reasoning_effort is defined %}# effort {{ reasoning_effort }}\n{% endif %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n"
    "{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}# assistant\n"
)


@pytest.fixture(scope="module")
def with_effort() -> Iterator[Served]:
    """A server whose chat template has a variable reasoning_effort, and shows tools and calls."""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    tokenizer.chat_template = EFFORT_TEMPLATE
    with SLOSpecGenerator(
        target, draft, tokenizer, SLOSpecConfig(kv_tokens=2000, compile=False)
    ) as generator:
        app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
        with listening(app) as url, httpx.Client(base_url=url, timeout=120.0) as client:
            yield Served(generator, url, client)


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"messages": [USER], "max_tokens": 4, "temperature": 0} | fields
    answer = served.client.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def num_tokens(served: Served, text: str) -> int:
    return len(served.generator.tokenizer(text)["input_ids"])


def input_tokens(served: Served, path: str, **fields: Any) -> int:
    """Number of tokens of the prompt that the template makes."""
    content = {"input": "pass"} if path == RESPONSES else {"messages": [USER]}
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2}
    answer = served.client.post(path, json=content | limit | fields)
    assert answer.status_code == 200, answer.text
    usage: dict[str, int] = answer.json()["usage"]
    if path == MESSAGES:
        return usage["input_tokens"] + usage["cache_read_input_tokens"]
    return usage["prompt_tokens" if path == CHATS else "input_tokens"]


EFFORTS: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"reasoning_effort": "low"}),
    (RESPONSES, {"reasoning": {"effort": "low"}}),
    (MESSAGES, {"output_config": {"effort": "low"}}),
]


@pytest.mark.parametrize(("path", "fields"), EFFORTS)
def test_effort_is_the_templates_variable_or_has_no_effect(
    served: Served, with_effort: Served, path: str, fields: dict[str, Any]
) -> None:
    shown = num_tokens(with_effort, "# effort low\n# user\npass\n# assistant")
    assert input_tokens(with_effort, path, **fields) == shown
    assert input_tokens(with_effort, path) == num_tokens(with_effort, "# user\npass\n# assistant")
    of_variables = fields | {"chat_template_kwargs": {"reasoning_effort": "a longer effort"}}
    assert (
        input_tokens(with_effort, path, **of_variables) > shown
    )  # what is said twice is said by the variables
    assert input_tokens(served, path, **fields) == input_tokens(served, path)


def test_no_calls_are_the_same_as_none(served: Served, with_effort: Served) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "return"}
    for each in (served, with_effort):
        expected = chat(each, messages=[USER, turn, USER])["choices"]
        for fields in (
            {"tool_calls": []},
            {"tool_calls": None, "refusal": None, "audio": None, "annotations": []},
        ):
            assert chat(each, messages=[USER, turn | fields, USER])["choices"] == expected
        assert chat(each, messages=[USER, turn, USER], tools=[])["choices"] == expected


def test_marks_for_caches_are_not_shown(with_effort: Served) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
    text: dict[str, Any] = {"type": "text", "text": "pass"}
    expected = input_tokens(with_effort, CHATS, tools=[tool])
    marked = [tool | CACHED, tool | {"function": tool["function"] | CACHED}]
    for tools in ([marked[0]], [marked[1]]):
        messages = [USER | CACHED | {"content": [text | CACHED]}]
        assert input_tokens(with_effort, CHATS, tools=tools, messages=messages) == expected
    block = text | CACHED
    of_anthropic = {"name": "f", "input_schema": PARAMETERS}
    body: dict[str, Any] = {
        "system": [text],
        "messages": [USER | {"content": [text]}],
        "tools": [of_anthropic],
    }
    with_marks = {
        "system": [block],
        "messages": [USER | {"content": [block]}],
        "tools": [of_anthropic | CACHED],
    }
    assert input_tokens(with_effort, MESSAGES, **body) == input_tokens(
        with_effort, MESSAGES, **with_marks, **CACHED
    )


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8, 9.9e-6])
def test_temperatures_below_vllms_least_are_greedy(served: Served, temperature: float) -> None:
    (choice,) = complete(served, temperature=temperature, max_tokens=12, top_p=0.9, seed=3)[
        "choices"
    ]
    expected = alone(served, "def main():", do_sample=False, max_new_tokens=12)
    assert choice["text"] == complete(served, temperature=0, max_tokens=12)["choices"][0]["text"]
    (choice,) = complete(served, prompt="def main():", temperature=temperature, max_tokens=12)[
        "choices"
    ]
    assert choice["text"] == text_of(served, expected)


@pytest.mark.parametrize("temperature", [1e-5, 9e-4])
def test_small_temperatures_are_those_of_generate(served: Served, temperature: float) -> None:
    (choice,) = complete(
        served, prompt="def main():", temperature=temperature, seed=7, max_tokens=12
    )["choices"]
    options = dict(do_sample=True, temperature=temperature, top_k=0, max_new_tokens=12)
    assert choice["text"] == text_of(served, alone(served, "def main():", 7, **options))


def test_dumped_items_may_be_sent_back(generator: SLOSpecGenerator) -> None:
    engine = Scripted(generator, ANSWER)
    tokenizer = load_tiny_pair(torch.float32)[2]
    tokenizer.chat_template = EFFORT_TEMPLATE
    engine.tokenizer = tokenizer
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    app = make_app(engine, ServerSettings(model_name="tiny"))
    with (
        listening(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = client.responses.create(model="tiny", input="Weather?", tools=[tool])
        items: list[Any] = [item.model_dump() for item in first.output]
        assert {"reasoning", "message", "function_call"} == {item["type"] for item in items}
        assert any(item.get("phase", "") is None for item in items)
        results = [
            {
                "type": "function_call_output",
                "call_id": item["call_id"],
                "output": "sunny",
                "id": None,
                "status": None,
            }
            for item in items
            if item["type"] == "function_call"
        ]
        begin = {"role": "user", "content": "Weather?", "type": "message", "phase": None}
        again: Any = [begin, *items, *results]
        assert client.responses.create(model="tiny", input=again, tools=[tool]).output
        again[2] = items[1] | {"phase": "final_answer"}
        assert client.responses.create(model="tiny", input=again, tools=[tool]).output


def test_truncation_is_accepted_where_the_input_fits(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(
            model="tiny", input="pass", max_output_tokens=3, truncation="auto"
        )
        assert answer.truncation == "auto" and answer.output_text is not None
        assert (
            client.responses.create(model="tiny", input="pass", max_output_tokens=3).truncation
            == "disabled"
        )


def test_responses_have_the_log_probabilities_of_chats(served: Served) -> None:
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    options: dict[str, Any] = dict(
        model="tiny", input="pass", max_output_tokens=9, temperature=0, include=include
    )
    expected = chat(served, max_tokens=9, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"][
        "content"
    ]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**options, top_logprobs=2)
        events = list(client.responses.create(**options, top_logprobs=2, stream=True))
        without_top = client.responses.create(**options)
        plain = client.responses.create(**options | {"include": ["reasoning.encrypted_content"]})
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.responses.create(**options | {"include": None}, top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.responses.create(**options, top_logprobs=1000)

    def entries(response: Any) -> list[dict[str, Any]]:
        (item,) = response.output
        (part,) = item.content
        return [each.model_dump() for each in part.logprobs]

    assert len(expected) == 9 and whole.top_logprobs == 2
    assert [each["token"] for each in entries(whole)] == [each["token"] for each in expected]
    for found, each in zip(entries(whole), expected, strict=True):
        assert (
            found["logprob"] == pytest.approx(each["logprob"], abs=1e-4)
            and found["bytes"] == each["bytes"]
        )
        assert [top["token"] for top in found["top_logprobs"]] == [
            top["token"] for top in each["top_logprobs"]
        ]
    assert [each["top_logprobs"] for each in entries(without_top)] == [[]] * 9 and entries(
        plain
    ) == []
    tokens = [
        each.token
        for event in events
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert tokens == [each.token for each in done.logprobs] == [each["token"] for each in expected]
    assert events[-1].type == "response.incomplete" and len(entries(events[-1].response)) == 9


def test_log_probabilities_of_a_response_are_those_of_its_text() -> None:
    chat_form = Answer(
        "tiny", True, lambda token: b"abcdefgh"[token : token + 1], wants_logprobs=True
    )
    body = ResponsesBody.model_validate({"input": "x", "include": ["message.output_text.logprobs"]})
    answer = ResponseAnswer(body, chat_form)

    def add(tokens: list[int], parts: Parts, reason: str | None = None) -> None:
        logprobs: list[Any] = [TokenLogprobs(-1.0, ()) for _ in tokens]
        answer.chunk(Piece(0, "", tokens, logprobs, reason, parts), (), False)

    add([0, 1], Parts(reasoning="ab"))
    add([2, 3, 4], Parts(content="de", reasoning="c"))
    add([5], Parts())  # held back, as it may begin a stop string
    add([6], Parts(content="fg"))
    add(
        [7],
        Parts(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        "tool_calls",
    )
    _, message, call = answer.blocks
    assert message["content"][0]["text"] == "defg" and call["type"] == "function_call"
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["d", "e", "f", "g"]
