"""More tokens than the context has: every API says so in the words by which its clients recognize
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from tests.server.conftest import CHAT_TEMPLATE, Served, listening

WORDS = (
    "def main():\n" * 400
)  # far more than the small pool has, and less than the model has positions
FITS = "def main():"
OF_ANTHROPIC = "/v1/messages"
FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server whose K/V slots hold far fewer tokens than the model has positions."""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = SLOSpecConfig(kv_tokens=512, compile=False)
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
        with listening(app) as url, httpx.Client(base_url=url, timeout=120.0) as client:
            yield Served(generator, url, client)


def body(path: str, text: str, max_tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}]}
    made: dict[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
    }.get(path, chat)
    if path == OF_ANTHROPIC:  # which requires it
        max_tokens = max_tokens or 4
    if max_tokens is not None:
        made["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = max_tokens
    return made | fields


def refused(served: Served, path: str, sent: dict[str, Any]) -> dict[str, Any]:
    answer = served.client.post(path, json=sent)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"  # before a stream begins
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def check(error: dict[str, Any], path: str, max_len: int, told: str) -> None:
    if path == OF_ANTHROPIC:
        assert error["message"].startswith("prompt is too long: ")
        return
    assert (error["code"], error["param"]) == ("context_length_exceeded", FIELDS[path])
    message = error["message"]
    assert message.startswith(f"This model's maximum context length is {max_len} tokens. However, ")
    assert told in message and f"Please reduce the length of the {FIELDS[path]}" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*FIELDS, OF_ANTHROPIC])
def test_prompt_that_is_too_long(small: Served, path: str, stream: bool) -> None:
    max_len = small.generator.max_len
    assert max_len < 512
    for max_tokens in (None, 8):
        error = refused(small, path, body(path, WORDS, max_tokens, stream=stream))
        check(error, path, max_len, "resulted in ")
        if path == OF_ANTHROPIC:
            number, _, rest = error["message"].removeprefix("prompt is too long: ").partition(" ")
            assert int(number) > max_len and rest == f"tokens > {max_len} maximum"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*FIELDS, OF_ANTHROPIC])
def test_prompt_that_leaves_no_room_for_max_tokens(small: Served, path: str, stream: bool) -> None:
    max_len = small.generator.max_len
    error = refused(small, path, body(path, FITS, max_len, stream=stream))
    check(error, path, max_len, f", {max_len} in the completion)")
    if path == OF_ANTHROPIC:
        assert "input length and `max_tokens` exceed context limit: " in error["message"]
        assert (
            f" + {max_len} > {max_len}, decrease input length or `max_tokens`" in error["message"]
        )


def test_prompt_of_as_many_tokens_as_fit(small: Served) -> None:
    max_len = small.generator.max_len
    for prompt in ([5] * max_len, [[5], [5] * max_len]):
        check(
            refused(small, "/v1/completions", {"prompt": prompt}),
            "/v1/completions",
            max_len,
            "1 in the completion",
        )
    sent = {"prompt": [5] * (max_len - 1), "temperature": 0}
    answer = small.client.post("/v1/completions", json=sent)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1


def test_longest_context_is_the_models(served: Served) -> None:
    positions = served.generator.model.config.max_position_embeddings
    error = refused(served, "/v1/completions", {"prompt": [5] * (positions + 1)})
    check(error, "/v1/completions", positions, f"resulted in {positions + 1} tokens")
    error = refused(
        served,
        "/v1/chat/completions",
        body("/v1/chat/completions", FITS, max_completion_tokens=positions),
    )
    check(error, "/v1/chat/completions", positions, f", {positions} in the completion)")


@pytest.mark.parametrize("path", [*FIELDS, OF_ANTHROPIC, f"{OF_ANTHROPIC}/count_tokens"])
def test_prompt_that_is_too_long_to_be_tokenized(small: Served, path: str) -> None:
    sent = body(path, "x" * 2**20)
    error = refused(small, path, sent)
    check(error, path.removesuffix("/count_tokens"), small.generator.max_len, "bytes")


def test_counted_with_the_limits(small: Served) -> None:
    refused(small, "/v1/completions", {"prompt": WORDS})
    lines = small.client.get("/metrics").text.splitlines()
    (count,) = (
        line
        for line in lines
        if line.startswith("hf_slospec:requests_refused_total") and '"context"' in line
    )
    assert float(count.split()[-1]) >= 1


def test_openais_client_has_code_and_field(small: Served) -> None:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client:
        calls: dict[str, Any] = {
            "messages": lambda: client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": WORDS}], stream=True
            ),
            "prompt": lambda: client.completions.create(model="tiny", prompt=WORDS),
            "input": lambda: client.responses.create(model="tiny", input=WORDS, truncation="auto"),
        }
        for field, call in calls.items():
            with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as caught:
                call()
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)
            # litellm and pydantic-ai look for these words, inspect-ai and dspy for the code,
            # langchain for the code in the message.
            assert "This model's maximum context length is " in caught.value.message
            assert ("drops no items" in caught.value.message) == (field == "input")
