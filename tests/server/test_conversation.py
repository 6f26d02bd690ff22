"""One conversation through chat completions, responses and Anthropic's messages, against ``generate``."""

from __future__ import annotations

import base64
import json

import httpx
import pytest
import torch

from hf_slospec import QueueFull, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.server.chats import Message
from tests.server.conftest import CHAT_TEMPLATE, KEY, serving
from tests.server.hostile.clients import wait_until_idle
from tests.server.protocols import (
    CHAT,
    MESSAGES,
    PROTOCOLS,
    RESPONSES,
    USER,
    Messages,
    Reply,
)
from tests.server.scripted import ANSWER, REASONING, Scripted
from tests.server.test_completions import alone, text_of

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object", "$defs": {"City": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "properties": {"city": {"$ref": "#/$defs/City"}}, "additionalProperties": False,
    },
}  # fmt: skip
NOW = {
    "name": "now",
    "parameters": {"properties": {}, "additionalProperties": False},
}
LATER = NOW | {"name": "later"}
SYSTEM = "def stack():"
PROMPT = f"# system\n{SYSTEM}\n# user\npass\n# assistant\n"
GREEDY = {"temperature": 0}
SHOWING = (
    "{% if reasoning_effort is defined %}# effort {{ reasoning_effort }}\n{% endif %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n"
    "{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}# assistant\n"
)  # all that a conversation may have

each_protocol = pytest.mark.parametrize(
    "protocol", PROTOCOLS, ids=lambda protocol: type(protocol).__name__
)


@pytest.fixture
def scripted(generator):
    """Server whose model writes reasoning, a text and two tool calls."""
    engine = Scripted(generator, ANSWER)
    engine.tokenizer = load_tiny_pair(torch.float32)[2]
    engine.tokenizer.chat_template = SHOWING
    with serving(engine) as made:
        yield made, engine


@pytest.fixture(scope="module")
def showing():
    """Server whose chat template shows effort, tools and calls."""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    tokenizer.chat_template = SHOWING
    with (
        SLOSpecGenerator(
            target, draft, tokenizer, SLOSpecConfig(kv_tokens=2000, compile=False)
        ) as generator,
        serving(generator) as made,
    ):
        yield made


TURNS = [
    (GREEDY, {}),
    (GREEDY | {"messages": [USER | {"content": [{"type": "text", "text": "pass"}]}]}, {}),
    (
        dict(temperature=0.8, top_p=0.9, seed=3),
        dict(do_sample=True, temperature=0.8, top_p=0.9, top_k=0),
    ),
    (dict(seed=5, top_k=9), dict(do_sample=True, top_k=9)),
    (GREEDY | {"min_tokens": 12}, {"min_new_tokens": 12}),
]


@each_protocol
@pytest.mark.parametrize(
    ("turn", "options"), TURNS, ids=["greedy", "parts", "top_p", "top_k", "min_tokens"]
)
def test_replies_are_those_of_generate_whole_and_streamed(served, protocol, turn, options):
    if protocol is RESPONSES and isinstance(turn.get("messages", [USER])[0]["content"], list):
        turn = turn | {"messages": [{"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "pass"}]}]}  # fmt: skip
    new = alone(
        served, PROMPT, turn.get("seed"), max_new_tokens=15, **{"do_sample": False} | options
    )
    num_input = len(served.generator.tokenizer(PROMPT)["input_ids"])
    expected = Reply(
        text_of(served, new), "length" if len(new) == 15 else "stop", num_input, len(new)
    )
    for ask in (protocol.ask, protocol.stream):
        assert ask(served.client, system=SYSTEM, max_tokens=15, **turn) == expected


@pytest.mark.parametrize("protocol", [CHAT, MESSAGES])
def test_stop_strings_end_replies(served, protocol):
    whole = protocol.ask(served.client, max_tokens=30, **GREEDY)
    text = whole.text
    stop = whole.text[5:8]
    no_stops = ["\n" + text[:2], "\n" + stop]  # the first begins in the prompt
    for stops, end in ((no_stops, None), ([*no_stops, stop], text.index(stop))):
        for ask in (protocol.ask, protocol.stream):
            reply = ask(served.client, max_tokens=30, stop=stops, **GREEDY)
            assert (reply.text, reply.end) == (text[:end], whole.end if end is None else "stop")
            if protocol is MESSAGES:
                expected = (
                    ("stop_sequence", stop) if end is not None else (whole.raw["stop_reason"], None)
                )
                assert (reply.raw["stop_reason"], reply.raw["stop_sequence"]) == expected


@each_protocol
def test_reasoning_text_and_calls_are_separated(scripted, protocol):
    client = scripted[0].client
    whole = protocol.ask(client, tools=[WEATHER])
    assert (whole.reasoning, whole.text.strip(), whole.end) == (REASONING, "I look.", "tool_calls")
    assert whole.calls == [("weather", {"city": "Paris"})] * 2
    assert 0 < whole.num_reasoning < whole.num_output
    assert protocol.stream(client, tools=[WEATHER]) == whole
    assert len(protocol.ask(client, tools=[WEATHER], parallel=False).calls) == 1


def test_replies_and_tool_results_can_be_sent_back(scripted):
    served, engine = scripted
    for protocol in PROTOCOLS:
        reply = protocol.ask(served.client, tools=[WEATHER])
        messages = [USER, *protocol.returned(reply, "sunny", "rainy")]
        body = protocol.kind.model_validate(protocol.body(messages))
        _, turn, *results = [
            message.for_template(int) for message in getattr(body, "chat", body).messages
        ]
        content = turn["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        assert (text.strip(), turn["reasoning_content"]) == ("I look.", REASONING)
        calls = turn["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "weather", "arguments": {"city": "Paris"}}
        ] * 2
        assert len({call["id"] for call in calls}) == 2
        assert results == [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call, content in zip(calls, ("sunny", "rainy"), strict=True)
        ]
        protocol.ask(served.client, messages=messages, tools=[WEATHER])
        prompt = engine.tokenizer.decode(engine.orders[-1].prompt)
        assert "sunny" in prompt and "Paris" in prompt
    items = [
        {"type": "message", "phase": "final_answer", "role": "assistant", "content": "x"},
        USER,
    ]
    assert served.client.post(RESPONSES.path, json={"input": items}).status_code == 200


FORCED = [
    ("required", [WEATHER], "weather"),
    ("weather", [WEATHER, NOW], "weather"),
    ("required", [NOW, LATER], "now later"),
    (["now", "later"], [WEATHER, NOW, LATER], "now later"),
]


@pytest.mark.parametrize(
    ("protocol", "choice", "tools", "names"),
    [
        (protocol, *case)
        for protocol in PROTOCOLS
        for case in FORCED
        if protocol is not MESSAGES or case != FORCED[-1]
    ],
)  # messages cannot allow some tools only
def test_tool_choice_forces_calls(served, protocol, choice, tools, names):
    turn = dict(tools=tools, choice=choice, parallel=False, seed=1, max_tokens=400)
    whole = protocol.ask(served.client, **turn)
    ((name, arguments),) = whole.calls
    assert name in names.split() and (whole.text, whole.end) == ("", "tool_calls")
    assert arguments["city"] in ("Paris", "Rome") if name == "weather" else arguments == {}
    assert protocol.stream(served.client, **turn) == whole


@each_protocol
def test_schemas_are_followed(served, protocol):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    reply = protocol.ask(served.client, schema=schema, max_tokens=80, **GREEDY)
    assert isinstance(json.loads(reply.text)["ok"], bool) and reply.end == "stop"


@each_protocol
def test_effort_tools_and_marks_for_caches_reach_the_template(served, showing, protocol):
    def num_input(**turn):
        return protocol.ask(showing.client, max_tokens=2, **turn).num_input

    def num_tokens(text):
        return len(showing.generator.tokenizer(text)["input_ids"])

    assert num_input() == num_tokens("# user\npass\n# assistant")
    assert num_input(effort="low") == num_tokens("# effort low\n# user\npass\n# assistant")
    variables = {"chat_template_kwargs": {"reasoning_effort": "a longer effort"}}
    assert num_input(effort="low", **variables) > num_input(effort="low"), (
        "chat_template_kwargs take precedence"
    )
    of_plain = [
        protocol.ask(served.client, max_tokens=2, **turn).num_input
        for turn in ({}, {"effort": "low"})
    ]
    assert of_plain[0] == of_plain[1]
    assert num_input(tools=[WEATHER]) > num_input(tools=[NOW]) > num_input()
    if protocol is not RESPONSES:
        cached = {"cache_control": {"type": "ephemeral"}}
        body = protocol.body(
            [USER | {"content": [{"type": "text", "text": "pass"} | cached]}], tools=[WEATHER]
        )
        body["tools"] = [tool | cached for tool in body["tools"]]
        reply = protocol.reply(
            showing.client.post(protocol.path, json=body | {"max_tokens": 2}).json()
        )
        assert reply.num_input == num_input(tools=[WEATHER])


@each_protocol
def test_slos_of_body_and_header_are_measured(served, protocol):
    for ask in (protocol.ask, protocol.stream):
        assert ask(served.client, max_tokens=4, slo_tpot=5.0, priority=1).metrics["slo_tpot"] == 5.0
    answer = served.client.post(
        protocol.path, json=protocol.body(max_tokens=4), headers={"x-slo-tpot-ms": "5000"}
    )
    assert protocol.reply(answer.json()).metrics["slo_tpot"] == 5.0
    assert answer.headers["x-slo-guaranteed"] in ("true", "false")


@each_protocol
def test_an_error_is_the_last_event_of_a_stream(scripted, protocol):
    served, engine = scripted
    engine.fault = RuntimeError("a fault of its own")
    *_, last = protocol.events(served.client)
    error = last["response"]["error"]["code"] if protocol is RESPONSES else last["error"]["type"]
    assert (
        error
        == {CHAT: "internal_error", RESPONSES: "server_error", MESSAGES: "api_error"}[protocol]
    )
    assert served.client.post(protocol.path, json=protocol.body()).status_code == 500
    engine.fault = None
    assert protocol.ask(served.client, tools=[WEATHER]).calls


@each_protocol
def test_a_full_queue_is_refused_before_a_stream_begins(served, protocol, monkeypatch):
    def full(*_, **__):
        raise QueueFull("full")

    monkeypatch.setattr(served.generator, "submit", full)
    for status, error in protocol.failures(served.client):
        assert (status, error["type"]) == (429, "rate_limit_error")
    assert int(served.client.post(protocol.path, json=protocol.body()).headers["Retry-After"]) > 0


@each_protocol
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_request(served, protocol, stream):
    num_cancelled = served.generator.stats().finished.get("cancelled", 0)
    body = protocol.body(max_tokens=400, ignore_eos=True, stream=stream)
    if stream:
        with served.client.stream("POST", protocol.path, json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            served.client.post(protocol.path, json=body, timeout=0.3)
    wait_until_idle(served.client)
    assert served.generator.stats().finished["cancelled"] == num_cancelled + 1


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        *((protocol.path, protocol.body(max_tokens=2), "Authorization") for protocol in PROTOCOLS),
        *((path, {"messages": [USER]} | more, "x-api-key") for path, more in
          ((MESSAGES.path, {"max_tokens": 2}), (f"{MESSAGES.path}/count_tokens", {}))),
    ],
)  # fmt: skip
def test_api_keys_are_read_from_the_headers_of_either_client(guarded, path, body, headers):
    prefix = "Bearer " * (headers == "Authorization")
    for key, status in ((KEY, 200), ("wrong", 401), (None, 401)):
        sent = {} if key is None else {headers: prefix + key}
        answer = guarded.client.post(path, json=body, headers=sent)
        assert answer.status_code == status, answer.text
        assert KEY not in answer.text
        error = "invalid_api_key" if "messages" not in path else "authentication_error"
        assert status == 200 or error in answer.text


@pytest.fixture(scope="module")
def small():
    """Server with fewer K/V slots than the model has positions."""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = SLOSpecConfig(kv_tokens=512, compile=False)
    with (
        SLOSpecGenerator(target, draft, tokenizer, config) as generator,
        serving(generator) as made,
    ):
        yield made


@each_protocol
@pytest.mark.parametrize("is_small", [False, True])
def test_context_overflow_is_reported_in_the_words_that_clients_parse(
    served, small, protocol, is_small
):
    server = small if is_small else served
    max_len = (
        server.generator.max_len
        if is_small
        else server.generator.model.config.max_position_embeddings
    )
    long = {"messages": [USER | {"content": "def main():\n" * (400 if is_small else 3000)}]}
    for turn, words, words_of_messages in (
        (long, "resulted in ", "maximum"),
        (long | {"max_tokens": 8}, "resulted in ", "maximum"),
        (
            {"max_tokens": max_len},
            f", {max_len} in the completion)",
            f" + {max_len} > {max_len}, decrease input",
        ),
        ({"messages": [USER | {"content": "x" * 2**20}]}, "bytes", "bytes"),
    ):
        for status, error in protocol.failures(server.client, **turn):
            message = error["message"]
            assert (status, error["type"]) == (400, "invalid_request_error")
            if protocol is MESSAGES:
                assert message.startswith("prompt is too long: ") and words_of_messages in message
                continue
            assert (error["code"], error["param"]) == ("context_length_exceeded", protocol.messages)
            assert message.startswith(
                f"This model's maximum context length is {max_len} tokens. However, "
            )
            assert (
                words in message
                and f"Please reduce the length of the {protocol.messages}" in message
            )


# ---- of one protocol


def test_responses_have_the_log_probabilities_of_chats(served):
    include = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    chat = CHAT.ask(served.client, max_tokens=9, logprobs=True, top_logprobs=2, **GREEDY).raw
    expected = chat["choices"][0]["logprobs"]["content"]

    def entries(ask, **turn):
        (item,) = ask(served.client, max_tokens=9, **GREEDY, **turn).raw["output"]
        return item["content"][0]["logprobs"]

    for ask in (RESPONSES.ask, RESPONSES.stream):
        logprobs = entries(ask, top_logprobs=2, **include)
        assert len(logprobs) == len(expected) == 9
        for entry, of_chat in zip(logprobs, expected, strict=True):
            assert entry["logprob"] == pytest.approx(of_chat["logprob"], abs=1e-4)
            assert entry["bytes"] == of_chat["bytes"]
            assert [top["token"] for top in entry["top_logprobs"]] == [
                top["token"] for top in of_chat["top_logprobs"]
            ]
        assert [each["top_logprobs"] for each in entries(ask, **include)] == [[]] * 9 and entries(
            ask
        ) == []
    events = RESPONSES.events(served.client, max_tokens=9, top_logprobs=2, **include, **GREEDY)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert [each for delta in deltas for each in delta["logprobs"]] == done["logprobs"]


def test_responses_echo_the_options_of_the_request(served):
    turn = {
        "truncation": "auto",
        "choice": "now",
        "tools": [NOW, LATER],
        "metadata": {"a": "b"},
        "effort": "low",
    }
    raw = RESPONSES.ask(served.client, max_tokens=200, system=SYSTEM, **turn).raw
    sent = RESPONSES.body(max_tokens=200, system=SYSTEM, **turn)
    for name in ("truncation", "tool_choice", "metadata", "instructions", "max_output_tokens"):
        assert raw[name] == sent[name]
    assert raw["reasoning"]["effort"] == "low" and [tool["name"] for tool in raw["tools"]] == [
        "now",
        "later",
    ]
    assert RESPONSES.ask(served.client, max_tokens=2).raw["truncation"] == "disabled"
    assert served.client.get(f"{RESPONSES.path}/resp_1").status_code == 404  # nothing is stored


def test_blocks_become_messages_of_the_chat():
    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
    messages = [
        {"role": "user", "content": [{"type": "image", "source": image}, {"type": "text", "text": "Where?"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "Well?"},
            {"type": "tool_result", "tool_use_id": "call_2", "is_error": True,
             "content": [{"type": "text", "text": "which city?"}]},
        ]},
    ]  # fmt: skip
    more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "adaptive"}}
    body = MESSAGES.kind.model_validate(
        MESSAGES.body(messages, tools=[WEATHER], choice="none", **more)
    )
    user, result, last = body.chat.messages
    assert user.num_images == 1
    assert result.for_template(int) == {
        "role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "which city?"}],
        "is_error": True,
    }  # fmt: skip
    assert last == Message(role="user", content=[{"type": "text", "text": "Well?"}])
    assert body.chat.shown_tools is None


def test_a_last_message_of_the_assistant_is_continued_and_counted(served):
    messages = [USER, {"role": "assistant", "content": "return"}]
    tokens = served.generator.tokenizer("# user\npass\n# assistant\nreturn")["input_ids"]
    expected = text_of(served, alone(served, tokens, do_sample=False, max_new_tokens=12))
    prefill = {"continue_final_message": True, "add_generation_prompt": False}
    for protocol, more in ((MESSAGES, {}), (CHAT, prefill)):
        assert (
            protocol.ask(served.client, messages=messages, max_tokens=12, **GREEDY, **more).text
            == expected
        )
    counts = []
    for body in (
        {"messages": messages},
        {"system": SYSTEM},
        {"system": SYSTEM, "tools": [WEATHER]},
    ):
        sent = MESSAGES.body(**body)
        del sent["max_tokens"]
        answer = served.client.post(f"{Messages.path}/count_tokens", json=sent | {"model": "tiny"})
        counts.append(answer.json()["input_tokens"])
    assert counts[0] == len(tokens)
    assert counts[1:] == [
        MESSAGES.ask(served.client, **{"max_tokens": 2, "system": SYSTEM}).num_input,
        counts[2],
    ]
    assert counts[1] < counts[2]


def test_only_allowed_tools_are_shown_to_the_model(served):
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "later")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[:1]}}
    few = CHAT.ask(served.client, tools=[NOW], max_tokens=8, **GREEDY)
    body = CHAT.body(tools=[NOW, LATER], max_tokens=8, **GREEDY) | {"tool_choice": choice}
    assert CHAT.reply(served.client.post(CHAT.path, json=body).json()) == few
