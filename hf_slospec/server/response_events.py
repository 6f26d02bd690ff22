"""Responses and stream events of OpenAI's Responses API; request bodies are in ``responses.py``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hf_slospec.server.answers import Answer, BlockAnswer, Events, named_event, whole_usage
from hf_slospec.server.choices import Choice, Piece

if TYPE_CHECKING:
    from hf_slospec.server.responses import ResponsesBody

# Types of content parts and of their events, by kind of block.
TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}
ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
# Fields of a request that the response repeats, with the values for those left out.
ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "metadata": {}, "user": None,
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
    "temperature": None, "top_p": None, "truncation": "disabled", "top_logprobs": 0,
}  # fmt: skip


class ResponseAnswer(BlockAnswer):
    def __init__(self, body: ResponsesBody, chat: Answer):
        super().__init__(chat.model, f"resp_{uuid.uuid4().hex}")
        self._request = body
        self._created_s = int(time.time())
        self._number = 0
        self._chat = chat
        self.wants_logprobs = chat.wants_logprobs
        self._logprobs = list[dict[str, Any]]()  # one per token of the last text
        self._num_sent = 0  # number of these log probabilities that events have sent

    def begin(self, choices: Sequence[Choice]) -> str:
        response = self._response("in_progress")
        return "".join(
            named_event(self._numbered(f"response.{kind}", response=response))
            for kind in ("created", "in_progress")
        )

    def end(self, choices: Sequence[Choice]) -> str:
        response = self.body(choices)
        return named_event(self._numbered(f"response.{response['status']}", response=response))

    def failed(self, error: dict[str, Any], choices: Sequence[Choice]) -> str:
        message, code = (
            error["error"]["message"],
            ERROR_CODES.get(error["error"]["type"], "server_error"),
        )
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return named_event(self._numbered("response.failed", response=response))

    def chunk(self, piece: Piece, choices: Sequence[Choice], is_first: bool) -> str:
        if self.wants_logprobs:
            added = self._chat.token_logprobs(piece)
            if piece.parts.reasoning or piece.parts.tool_calls:
                # keep only the last tokens, whose texts make up the content
                lengths = accumulate(len(each["token"]) for each in reversed(added))
                num_text = sum(length <= len(piece.parts.content) for length in lengths)
                added = added[len(added) - num_text :]
            self._logprobs += added
        return super().chunk(piece, choices, is_first)

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        usage = whole_usage(choices)
        response = self._response("incomplete" if self._is_cut else "completed")
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "metrics": usage["metrics"],
        }
        return response

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason == "length"

    def _response(self, status: str) -> dict[str, Any]:
        names = {*ECHOED, "tools", "tool_choice"}
        echoed = self._request.model_dump(by_alias=True, exclude_none=True, include=names)
        return {
            "id": self.id, "object": "response", "created_at": self._created_s, "model": self.model,
            "status": status, "error": None, "incomplete_details": None, "output": list(self.blocks),
            "store": False, "previous_response_id": None, "background": False, "usage": None,
        } | ECHOED | echoed  # fmt: skip

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        index = len(self.blocks) - 1
        return self._numbered(kind, item_id=self.blocks[index]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event for the only content part of the last item."""
        return self._of_item(kind, content_index=0, **fields)

    def _added_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(item)
        return self._numbered(
            "response.output_item.added", output_index=len(self.blocks) - 1, item=item
        )

    def _done_item(self, **fields: Any) -> dict[str, Any]:
        self.blocks[-1] |= fields
        return self._numbered(
            "response.output_item.done", output_index=len(self.blocks) - 1, item=self.blocks[-1]
        )

    def opened(self, kind: str) -> Events:
        if kind == "reasoning":
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        else:
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        yield self._added_item(item | {"status": "in_progress", "content": []})
        self._text = ""
        yield self._of_part("response.content_part.added", part=self._part(kind, is_empty=True))

    def extended(self, kind: str, text: str) -> Events:
        self._text += text
        fields: dict[str, Any] = {}
        if kind == "text":
            fields["logprobs"], self._num_sent = (
                self._logprobs[self._num_sent :],
                len(self._logprobs),
            )
        yield self._of_part(f"response.{TEXTS[kind]}.delta", delta=text, **fields)

    def closed(self, kind: str) -> Events:
        part = self._part(kind)
        fields = {"logprobs": part["logprobs"]} if kind == "text" else {}
        yield self._of_part(f"response.{TEXTS[kind]}.done", text=self._text, **fields)
        yield self._of_part("response.content_part.done", part=part)
        yield self._done_item(status="incomplete" if self._is_cut else "completed", content=[part])
        if kind == "text":
            self._logprobs = []
            self._num_sent = 0

    def called(self, id: str, name: str, arguments: str) -> Events:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": id,
            "name": name,
        }
        yield self._added_item(item | {"arguments": "", "status": "in_progress"})
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        yield self._done_item(status="completed", arguments=arguments)

    def _part(self, kind: str, is_empty: bool = False) -> dict[str, Any]:
        """Return the only content part of the last item, with its text so far."""
        part: dict[str, Any] = {"type": TEXTS[kind], "text": "" if is_empty else self._text}
        if kind == "text":  # reasoning has no log probabilities
            part |= {"annotations": [], "logprobs": [] if is_empty else self._logprobs}
        return part
