"""Tables of HTTP requests that are refused: endpoint, fields, and the field that the error names."""

from __future__ import annotations

import openai
import pytest

from hf_slospec.server.reading import FAIRNESS_ID, OBJECTIVE
from tests.server.protocols import USER

WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}
COMPLETIONS = "completions"
CHATS = "chat/completions"
RESPONSES = "responses"
MESSAGES = "messages"
VALID = {
    COMPLETIONS: {"prompt": "x"},
    CHATS: {"messages": [USER], "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    MESSAGES: {"messages": [USER], "max_tokens": 2},
    "messages/count_tokens": {"messages": [USER]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [5]},
}


def part(kind, **fields):
    return [{"role": "user", "content": [{"type": kind} | fields]}]


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}},
    }


FORCED = {"tools": [TOOL], "tool_choice": "required"}
NONSENSE = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
ASSISTANT = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
}
HUGE = 10**30
# Field that the message or param names (and more words), the endpoint, and fields of the body.
REFUSED = [
    *(("prompt", COMPLETIONS, {"prompt": value}) for value in ("", [], [-1], 7, None, [HUGE], [True] * 500_000)),
    ("10000", COMPLETIONS, {"prompt": [10**6]}),
    ("prompt.1.1", COMPLETIONS, {"prompt": [[5], [6, "x"]]}),
    *(("temperature", COMPLETIONS, {"temperature": value}) for value in (-1, "hot", 1e300)),
    ("repetition_penalty", COMPLETIONS, {"repetition_penalty": 1e-300}),
    ("top_p", COMPLETIONS, {"top_p": 0}),
    *(("n", COMPLETIONS, {"n": value}) for value in (0, 1000)),
    ("best_of", COMPLETIONS, {"n": 2, "best_of": 5}),
    ("suffix", COMPLETIONS, {"suffix": "y"}),
    ("logprobs", COMPLETIONS, {"logprobs": 1000}),
    *(("max_tokens", COMPLETIONS, {"max_tokens": value}) for value in (10**6, 0)),
    ("min_tokens", COMPLETIONS, {"max_tokens": 4, "min_tokens": 5}),
    *(("stop", COMPLETIONS, {"stop": value}) for value in ([""], 3)),
    ("stop_token_ids", COMPLETIONS, {"stop_token_ids": [HUGE]}),
    *(("logit_bias", COMPLETIONS, {"logit_bias": {name: value}})
      for name, value in (("99999999", 1), ("a", 1), ("1", 1000), ("-1", 1), (str(HUGE), 1))),
    *(("slo_tpot", COMPLETIONS, {"slo_tpot": value}) for value in (0, 5e-324, -1.5, [], "fast")),
    ("slo_ttft", COMPLETIONS, {"slo_ttft": 5e-324}),
    ("slo_e2e", COMPLETIONS, {"slo_e2e": 1.0, "slo_ttft": 2.0}),
    ("slo_tpot.0.slo_tpot", COMPLETIONS, {"slo_tpot": [{"slo_tpot": "fast"}]}),
    ("slo_tpot", COMPLETIONS, {"slo_tpot": [{"slo_tpot": -1.0}]}),
    ("slo_ttft", COMPLETIONS, {"slo_tpot": [{"slo_tpot": 1.0, "slo_ttft": 0}]}),
    ("slo_tpot", COMPLETIONS, {"slo_tpot": [{"slo_tpot": 1.0}, {"slo_tpot": 1.0}]}),
    ("slo_tpot", COMPLETIONS, {"slo_tpot": [{"slo_tpot": 1.0, "until": "x", "tokens": 1}]}),
    ("stream_options", COMPLETIONS, {"stream_options": {"include_usage": True}}),
    ("guided_json", COMPLETIONS, {"guided_json": {}}),
    ("response_format", COMPLETIONS, {"response_format": {"type": "json_object"}, "ignore_eos": True}),
    *(("messages", CHATS, {"messages": value}) for value in ([], None)),
    ("image_url.url", CHATS, {"messages": part("image_url", image_url={})}),
    ("type", CHATS, {"messages": part("video_url")}),
    ("response_format", CHATS, {"response_format": {"type": "json_schema"}}),
    ("top_logprobs", CHATS, {"top_logprobs": 2}),
    ("chat_template", CHATS, {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}),
    ("add_special_tokens", CHATS, {"add_special_tokens": True}),
    *(("generation_config", CHATS, {"generation_config": value}) for value in ("{", '{"num_beams": 4}', "[]")),
    ("tool_calls", CHATS, {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}),
    *(("tool_choice", CHATS, FORCED | {"tools": tools}) for tools in (None, [])),
    *(("tool_choice", CHATS, FORCED | {"tool_choice": choice})
      for choice in ("any", {"type": "function", "function": {"name": "other"}})),
    ("tool_choice names 'other'", CHATS, allowed("auto", "weather", "other")),
    ("tool_choice", CHATS, allowed("auto")),
    ("tool_choice", CHATS, allowed("none", "weather")),
    ("tools", CHATS, FORCED | {"tools": [{"type": "function", "function": {"parameters": {}}}]}),
    ("tools: the schema cannot be followed", CHATS, FORCED | {"tools": [NONSENSE]}),
    ("tools ends the output", CHATS, FORCED | {"ignore_eos": True}),
    ("stores no responses", RESPONSES, {"store": True}),
    ("send the earlier items as input", RESPONSES, {"previous_response_id": "resp_1"}),
    ("background", RESPONSES, {"background": True}),
    ("truncation", RESPONSES, {"truncation": "middle"}),
    ("include", RESPONSES, {"include": ["web_search_call.results"]}),
    ("top_logprobs", RESPONSES, {"top_logprobs": 2}),
    ("top_logprobs", RESPONSES, {"top_logprobs": 1000, "include": ["message.output_text.logprobs"]}),
    ("tools", RESPONSES, {"tools": [{"type": "web_search"}]}),
    ("tool_choice", RESPONSES, {"tool_choice": "required"}),
    *(("input", RESPONSES, {"input": value}) for value in (None, [], [{"type": "item_reference", "id": "msg_1"}])),
    ("image_url", RESPONSES, {"input": part("input_image", image_url="http://elsewhere/x.png")}),
    ("reasoning.summary", RESPONSES, {"reasoning": {"summary": "detailed"}}),
    ("json_schema", RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
    ("temperature", RESPONSES, {"temperature": -1}),
    ("max_output_tokens", RESPONSES, {"max_output_tokens": 0}),
    *(("max_tokens", MESSAGES, {"max_tokens": value}) for value in (0, None)),
    *(("messages", MESSAGES, {"messages": value}) for value in ([], None)),
    ("role", MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}),
    ("content", MESSAGES, {"messages": part("document")}),
    ("messages", MESSAGES, {"messages": [USER, ASSISTANT]}),
    ("source", MESSAGES, {"messages": part("image", source={"type": "url", "url": "http://elsewhere"})}),
    ("tools", MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tool_choice", MESSAGES, {"tool_choice": {"type": "any"}}),
    ("tool_choice", MESSAGES, {"tool_choice": {"type": "tool", "name": "other"},
                               "tools": [{"name": "f", "input_schema": {}}]}),
    ("temperature", MESSAGES, {"temperature": -1}),
    ("stop", MESSAGES, {"stop_sequences": [""]}),
    ("container", MESSAGES, {"container": "x"}),
    ("effort", MESSAGES, {"output_config": {"effort": 3}}),
    ("slo_tpot", MESSAGES, {"slo_tpot": -1}),
    ("messages", "messages/count_tokens", {"messages": None}),
    ("prompt", "tokenize", {"prompt": None}),
    ("add_generation_prompt", "tokenize", {"add_generation_prompt": True}),
    ("add_special_tokens", "tokenize", {"prompt": None, "messages": [USER], "add_special_tokens": True}),
    *(("tokens", "detokenize", {"tokens": value}) for value in (None, [HUGE])),
]  # fmt: skip


def post(served, endpoint, **request):
    path = endpoint if "tokenize" in endpoint else f"v1/{endpoint}"
    return served.client.post(f"/{path}", **request)


@pytest.mark.parametrize(
    ("named", "endpoint", "fields"), REFUSED, ids=[f"{row[1]}-{row[0]}" for row in REFUSED]
)
def test_bad_fields_are_named(served, named, endpoint, fields):
    answer = post(served, endpoint, json=VALID[endpoint] | fields)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1000
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in f"{error.get('param')}: {error['message']}"
    assert not any(
        name in error["message"] for name in ("constrained", "list[", "SLOStage", ".str")
    ), error
    assert (
        ("param" in error)
        != (answer.json().get("type") == "error")
        == endpoint.startswith("messages")
    )


@pytest.mark.parametrize("endpoint", VALID)
def test_valid_bodies_are_served(served, endpoint):
    assert (
        post(
            served, endpoint, json=VALID[endpoint] | {"a_field_of_later_versions": None}
        ).status_code
        == 200
    )


NO_JSON = [
    b"", b"{", b"[1]", b"null", b'{"prompt": "x"' + b"}" * 9, b"[" * 100_000, b'{"prompt": "\xff\xfe"}',
    b'{"prompt": NaN}', b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("content", NO_JSON, ids=lambda content: repr(content[:16]))
def test_invalid_json_is_refused(served, content):
    for endpoint in VALID:
        answer = post(
            served, endpoint, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


STATUSES = [
    *((404, "'tiny'", "POST", f"/v1/{path}", {"json": VALID[path] | {"model": "other"}})
      for path in (COMPLETIONS, CHATS, RESPONSES, MESSAGES)),
    (404, "", "GET", "/v1/nothing", {}),
    (404, "", "GET", "/v1/models/org/other", {}),
    (404, "--tokenizer-info", "GET", "/tokenizer_info", {}),
    (404, "", "POST", "/load_model", {"json": {"model": "other"}}),
    (405, "", "GET", "/v1/completions", {}),
    (405, "", "GET", "/v1/messages", {}),
    (413, "", "POST", "/v1/messages", {"json": VALID[MESSAGES] | {"system": "x" * 2**23}}),
    (415, "", "POST", "/v1/messages", {"content": "{}"}),
    *((400, header, "POST", "/v1/completions", {"json": VALID[COMPLETIONS], "headers": {header: value}})
      for header, values in ((OBJECTIVE, ["", "two words", "x" * 254]), (FAIRNESS_ID, ["", "two words", "x" * 254]),
                             ("x-slo-tpot-ms", ["soon"]))
      for value in values),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said", "method", "path", "request_"), STATUSES, ids=lambda value: str(value)[:30]
)
def test_status_and_message_of_other_refusals(served, status, said, method, path, request_):
    answer = served.client.request(method, path, **request_)
    error = answer.json()["error"]
    assert answer.status_code == status and said in error["message"] != ""
    if path == "/v1/messages":
        kinds = {404: "not_found_error", 413: "request_too_large"}
        assert error["type"] == kinds.get(status, "invalid_request_error")


def test_openais_client_raises_its_own_errors(served):
    with served.openai as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="x", temperature=-3)
        with pytest.raises(openai.NotFoundError, match="other"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as caught:
            client.responses.create(model="tiny", input="def main():\n" * 3000, truncation="auto")
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        # litellm and pydantic-ai look for these words, inspect-ai and dspy for the code, langchain for the code
        # in the message.
        assert "This model's maximum context length is " in caught.value.message
