"""Chat completions, responses and Anthropic messages behind one interface: turns become bodies, answers replies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hf_slospec.server.anthropic import MessagesBody
from hf_slospec.server.chats import ChatBody
from hf_slospec.server.responses import ResponsesBody

TRANSLATED = (
    "choice",
    "parallel",
    "schema",
    "effort",
    "stop",
)  # fields of a turn that protocols name otherwise
USER = {"role": "user", "content": "pass"}
EVENT = TypeAdapter(ResponseStreamEvent)


@dataclass
class Reply:
    text: str
    end: str  # length, stop or tool_calls
    num_input: int
    num_output: int
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)  # names and arguments
    num_reasoning: int = field(default=0, compare=False)
    num_cached: int = field(default=0, compare=False)
    metrics: dict[str, Any] = field(default_factory=dict, compare=False)
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Protocol:
    """What a protocol adds: ``system``, ``schema``, ``effort``, ``tool``, ``allowed`` (a choice among some
    tools, which messages do not have), ``reply`` of a whole answer, ``joined`` of the events of a stream,
    and ``returned``, the messages to append for the next turn.
    """

    max_tokens = "max_tokens"
    messages = "messages"

    def body(
        self,
        messages=(USER,),
        system=None,
        tools=(),
        max_tokens=None,
        **turn,
    ):
        """Return the body of a turn; ``tools`` are functions with parameters.

        ``choice`` is a mode, the name of a tool or a list of allowed ones; other fields are
        ``parallel``, ``schema``, ``effort``, and those that all protocols have.
        """
        made = {self.messages: [*messages]}
        for name, value in turn.items():
            translate = getattr(self, name, None) if name in TRANSLATED else None
            made |= translate(value) if translate is not None else {name: value}
        if system is not None:
            made |= self.system(system, made)
        if tools:
            made["tools"] = [self.tool(tool) for tool in tools]
        return made if max_tokens is None else made | {self.max_tokens: max_tokens}

    def choice(self, choice):
        if isinstance(choice, str):
            return {
                "tool_choice": choice
                if choice in ("required", "auto", "none")
                else self.tool({"name": choice})
            }
        return {"tool_choice": self.allowed([self.tool({"name": name}) for name in choice])}

    def parallel(self, is_allowed):
        return {"parallel_tool_calls": is_allowed}

    def ask(self, client, **turn):
        answer = client.post(self.path, json=self.body(**turn))
        assert answer.status_code == 200, answer.text
        return self.reply(answer.json())

    def stream(self, client, **turn):
        return self.reply(self.joined(self.events(client, **turn)))

    def events(self, client, **turn):
        with client.stream("POST", self.path, json=self.body(**turn) | self.streamed) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = list(answer.iter_lines())
        events = [
            json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
        ]
        assert ("data: [DONE]" in lines[-2:]) == isinstance(self, Chat)
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        assert names == [event["type"] for event in events if "type" in event]
        return events

    def failures(self, client, **turn):
        """Return status and error of a refused turn, without and with streaming."""
        answers = [
            client.post(self.path, json=self.body(**turn) | more) for more in ({}, self.streamed)
        ]
        return [(answer.status_code, answer.json()["error"]) for answer in answers]

    streamed: ClassVar[dict[str, Any]] = {"stream": True}


class Chat(Protocol):
    path = "/v1/chat/completions"
    kind = ChatBody
    streamed: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def system(self, text, body):
        return {"messages": [{"role": "system", "content": text}, *body["messages"]]}

    def schema(self, schema):
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        }

    def effort(self, effort):
        return {"reasoning_effort": effort}

    def allowed(self, tools):
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}

    def tool(self, function):
        return {"type": "function", "function": function}

    def reply(self, whole):
        ChatCompletion.model_validate(whole)
        (choice,), usage = whole["choices"], whole["usage"]
        message, details = choice["message"], usage["completion_tokens_details"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return Reply(
            message["content"] or "", choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"],
            message.get("reasoning_content") or "", [(call["name"], json.loads(call["arguments"])) for call in calls],
            details["reasoning_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["metrics"], whole,
        )  # fmt: skip

    def joined(self, events):
        state = ChatCompletionStreamState()
        for event in events:
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        return state.current_completion_snapshot.model_dump()

    def returned(self, reply, *results):
        message = ChatCompletion.model_validate(reply.raw).choices[0].message.model_dump()
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        return [message, *({"role": "tool", "tool_call_id": id, "content": result}
                           for id, result in zip(ids, results, strict=True))]  # fmt: skip


class Responses(Protocol):
    path = "/v1/responses"
    kind = ResponsesBody
    max_tokens = "max_output_tokens"
    messages = "input"

    def system(self, text, body):
        return {"instructions": text}

    def schema(self, schema):
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}

    def effort(self, effort):
        return {"reasoning": {"effort": effort}}

    def allowed(self, tools):
        return {"type": "allowed_tools", "mode": "required", "tools": tools}

    def tool(self, function):
        return {"type": "function", **function}

    def reply(self, whole):
        response, usage = Response.construct(**whole), whole["usage"]  # as the client does
        assert (
            usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            and whole["store"] is False
        )
        items = whole["output"]
        calls = [
            (item["name"], json.loads(item["arguments"]))
            for item in items
            if item["type"] == "function_call"
        ]
        reasoning = [
            part["text"]
            for item in items
            if item["type"] == "reasoning"
            for part in item["content"]
        ]
        if response.incomplete_details is not None:
            assert (response.status, response.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
        else:
            assert response.status == "completed"
        return Reply(
            response.output_text, "length" if response.incomplete_details else "tool_calls" if calls else "stop",
            usage["input_tokens"], usage["output_tokens"], "".join(reasoning), calls,
            usage["output_tokens_details"]["reasoning_tokens"], usage["input_tokens_details"]["cached_tokens"],
            usage["metrics"], whole,
        )  # fmt: skip

    def joined(self, events):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            assert "response" in event or EVENT.validate_python(event)
        kinds = [event["type"].removeprefix("response.") for event in events]
        whole = events[-1]["response"]
        assert [*kinds[:2], kinds[-1]] == ["created", "in_progress", whole["status"]]
        for kind in ("output_item", "content_part"):
            assert kinds.count(f"{kind}.added") == kinds.count(f"{kind}.done")
        if [item["type"] for item in whole["output"]] == ["message"]:
            deltas = [event["delta"] for event in events if "delta" in event]
            assert "".join(deltas) == Response.construct(**whole).output_text
            assert kinds[2:-1] == [
                "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
                "output_text.done", "content_part.done", "output_item.done",
            ]  # fmt: skip
        assert [event["item"] for event in events if event["type"].endswith("item.done")] == whole[
            "output"
        ]
        return whole

    def returned(self, reply, *results):
        items = [
            item.model_dump() for item in Response.construct(**reply.raw).output
        ]  # nulls among their fields
        ids = [item["call_id"] for item in items if item["type"] == "function_call"]
        return [*items, *({"type": "function_call_output", "call_id": id, "output": result, "status": None}
                          for id, result in zip(ids, results, strict=True))]  # fmt: skip


class Messages(Protocol):
    path = "/v1/messages"
    kind = MessagesBody

    def body(
        self,
        messages=(USER,),
        *arguments,
        max_tokens=100,
        parallel=True,
        **turn,
    ):
        made = super().body(
            messages, *arguments, max_tokens=max_tokens, **turn
        )  # which is required
        if not parallel:
            made["tool_choice"] = made.get("tool_choice", {"type": "auto"}) | {
                "disable_parallel_tool_use": True
            }
        return made

    def system(self, text, body):
        return {"system": [{"type": "text", "text": part} for part in (text[:4], text[4:])]}

    def stop(self, strings):
        return {"stop_sequences": strings}

    def choice(self, choice):
        kinds = {"required": "any", "auto": "auto", "none": "none"}
        return {
            "tool_choice": {"type": kinds[choice]}
            if choice in kinds
            else {"type": "tool", "name": choice}
        }

    def schema(self, schema):
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def effort(self, effort):
        return {"output_config": {"effort": effort}}

    def tool(self, function):
        return {"name": function["name"], "input_schema": function["parameters"]}

    def reply(self, whole):
        assert (whole["type"], whole["role"], whole["id"][:4]) == ("message", "assistant", "msg_")
        usage, blocks = whole["usage"], whole["content"]
        assert all(block.get("signature", "") == "" for block in blocks)
        texts = {
            kind: [block[kind] for block in blocks if block["type"] == kind]
            for kind in ("text", "thinking")
        }
        return Reply(
            "".join(texts["text"]),
            {"max_tokens": "length", "tool_use": "tool_calls"}.get(whole["stop_reason"], "stop"),
            usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"],
            "".join(texts["thinking"]),
            [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
            usage["output_tokens_details"]["thinking_tokens"], usage["cache_read_input_tokens"], usage["metrics"],
            whole,
        )  # fmt: skip

    def joined(self, events):
        begin, ping, *events, end = events
        assert (begin["type"], ping, end) == (
            "message_start",
            {"type": "ping"},
            {"type": "message_stop"},
        )
        message = begin["message"]
        assert (
            message["content"] == []
            and message["stop_reason"] is None
            and "metrics" not in message["usage"]
        )
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append(event["content_block"])
                case "content_block_delta":
                    block, delta = message["content"][event["index"]], event["delta"]
                    if delta["type"] == "input_json_delta":
                        block["input"] = json.loads(delta["partial_json"])
                    else:
                        name = delta["type"].removesuffix("_delta")
                        block[name] += delta[name]
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        return message

    def returned(self, reply, *results):
        blocks = reply.raw["content"]
        ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
        made = [{"role": "assistant", "content": blocks}]
        if ids:
            found = zip(ids, results, strict=True)
            given = [
                {"type": "tool_result", "tool_use_id": id, "content": result}
                for id, result in found
            ]
            made.append({"role": "user", "content": given})
        return made


CHAT = Chat()
RESPONSES = Responses()
MESSAGES = Messages()
PROTOCOLS = [CHAT, RESPONSES, MESSAGES]
