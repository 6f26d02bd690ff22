"""Requests that ask for too much: each is refused by name before any work, and counted."""

from __future__ import annotations

import pytest

from tests.server.hostile.clients import CHAT, HARD_SCHEMA, SMALL, metrics_of, with_schema

IDS = [5, 6, 7]
DEEP = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(4000)},
}
HARD_OBJECT = {"type": "object", "properties": {"x": HARD_SCHEMA}, "required": ["x"]}
COMPLETION = "/v1/completions"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
FORCED = CHAT | {"tool_choice": {"type": "any"}}
TOO_MUCH = [
    ("stop_strings", COMPLETION, SMALL | {"stop": [f"{i:040d}" for i in range(200)]}, "stop"),
    ("stop_chars", COMPLETION, SMALL | {"stop": "x" * 10_000}, "stop"),
    ("stop_token_ids", COMPLETION, SMALL | {"stop_token_ids": list(range(1000))}, "stop_token_ids"),
    (
        "logit_bias",
        COMPLETION,
        SMALL | {"logit_bias": {str(i): 1 for i in range(2000)}},
        "logit_bias",
    ),
    ("salt_chars", COMPLETION, SMALL | {"cache_salt": "x" * 10_000}, "cache_salt"),
    ("salt_chars", CHATS, CHAT | {"cache_salt": "x" * 10_000}, "cache_salt"),
    ("prompts", COMPLETION, SMALL | {"prompt": [IDS] * 20_000}, "prompt"),
    ("prompts", COMPLETION, SMALL | {"prompt": ["x"] * 20_000}, "prompt"),
    ("choices", COMPLETION, SMALL | {"prompt": [IDS] * 100, "n": 100}, "n"),
    ("choices", CHATS, CHAT | {"n": 10**9}, "n"),
    ("top_logprobs", COMPLETION, SMALL | {"logprobs": 10**6}, "logprobs"),
    ("top_logprobs", CHATS, CHAT | {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ("prompt_bytes", COMPLETION, SMALL | {"prompt": "x " * 10**6}, "prompt"),
    ("prompt_bytes", COMPLETION, SMALL | {"prompt": ["x", "€" * 10**6]}, "prompt"),
    (
        "prompt_bytes",
        CHATS,
        CHAT | {"messages": [{"role": "user", "content": "x" * 10**6}]},
        "messages",
    ),
    (
        "prompt_bytes",
        CHATS,
        CHAT | {"messages": [{"role": "user", "content": "x"}] * 20_000},
        "messages",
    ),
    ("prompt_bytes", CHATS, CHAT | {"tools": [{"name": "x" * 1000}] * 1000}, "messages"),
    ("prompt_bytes", "/tokenize", {"prompt": "x " * 10**6}, "prompt"),
    ("prompt_bytes", "/detokenize", {"tokens": [5] * 900_000}, "tokens"),
    ("schema_bytes", CHATS, with_schema(DEEP), "response_format"),
    ("prompt_bytes", RESPONSES, {"input": "x" * 10**6}, "input"),
    ("prompt_bytes", RESPONSES, {"input": [{"role": "user", "content": "x"}] * 20_000}, "input"),
    ("prompt_bytes", MESSAGES, CHAT | {"system": "x" * 10**6}, "messages"),
    (
        "prompt_bytes",
        f"{MESSAGES}/count_tokens",
        {"messages": CHAT["messages"], "system": "x" * 10**6},
        "messages",
    ),
    ("stop_strings", MESSAGES, CHAT | {"stop_sequences": ["x"] * 1000}, "stop"),
    (
        "schema_s",
        MESSAGES,
        FORCED | {"tools": [{"name": "f", "input_schema": HARD_OBJECT}]},
        "tools",
    ),
    ("schema_s", CHATS, with_schema(HARD_SCHEMA), "response_format"),
    ("json_containers", COMPLETION, SMALL | {"prompt": [[5]] * 100_000}, "arrays"),
    ("json_containers", CHATS, CHAT | {"metadata": {"x": [{}] * 100_000}}, "arrays"),
    ("json_values", COMPLETION, SMALL | {"prompt": [5] * 1_100_000}, "values"),
]


@pytest.mark.parametrize(
    ("limit", "path", "body", "named"), TOO_MUCH, ids=[case[0] for case in TOO_MUCH]
)
def test_what_is_too_much_is_refused_and_counted(served, limit, path, body, named):
    counter = f'requests_refused_total{{limit="{limit}"}}'
    before = metrics_of(served.client).get(counter, 0)
    answer = served.client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert (
        named in error["message"] and "this server takes at most" in error["message"]
    ) or limit == "schema_s"
    assert len(answer.content) < 1000
    assert metrics_of(served.client)[counter] == before + 1


def test_a_body_that_is_too_large_is_counted(served):
    content = b" " * (2**23 + 1)
    json_type = {"Content-Type": "application/json"}
    before = metrics_of(served.client).get('requests_refused_total{limit="body_bytes"}', 0)
    assert (
        served.client.post("/v1/completions", content=content, headers=json_type).status_code == 413
    )
    assert metrics_of(served.client)['requests_refused_total{limit="body_bytes"}'] == before + 1


def test_brackets_in_a_text_are_no_arrays(served):
    answer = served.client.post("/v1/completions", json=SMALL | {"user": "[{," * 400_000 + '\\"['})
    assert answer.status_code == 200, answer.text


def test_stop_strings_up_to_the_limit_are_served(served):
    stops = [f"{i:0200d}" for i in range(31)] + ["("]
    found = served.client.post(
        "/v1/completions", json=SMALL | {"prompt": "def main", "stop": stops}
    ).json()
    assert found["choices"][0]["finish_reason"] == "stop" and "(" not in found["choices"][0]["text"]
