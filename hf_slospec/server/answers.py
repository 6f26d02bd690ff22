"""Responses in the format of OpenAI's chats and completions, whole or as chunks of a stream, and
the base class of other APIs' responses.

They are plain dicts, as OpenAI's types would take a millisecond per chunk. The tests parse every
response with OpenAI's types."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.server.bodies import SamplingBody, StreamOptions
from hf_slospec.server.chats import ChatBody
from hf_slospec.server.choices import Choice, Piece
from hf_slospec.server.tool_calls import AnswerParts

# With these options, json.dumps would make a new encoder for every event
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
SLO_ANSWER_HEADERS = ("x-slo-guaranteed", "x-slo-attained")
IMPOSSIBLE = -9999.0  # log probability in place of -inf, as in OpenAI's responses


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event without a name."""
    return f"data: {_encode(body)}\n\n"


def named_event(body: dict[str, Any]) -> str:
    """Return a server-sent event whose name is the ``type`` of its body."""
    return f"event: {body['type']}\n{event(body)}"


DONE = "data: [DONE]\n\n"


class Answer:
    """Response to a completion or chat in OpenAI's format."""

    def __init__(self, model: str, body: SamplingBody, token_bytes: Callable[[int], bytes]):
        """``token_bytes`` returns a token's UTF-8 bytes, which may be only part of a character."""
        self.model = model
        self.is_chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.wants_logprobs = body.num_top_logprobs is not None
        self._created_s = int(time.time())
        self._token_bytes = token_bytes
        options = body.stream_options or StreamOptions()
        self._has_continuous_usage = options.continuous_usage_stats
        self._includes_usage = options.include_usage or options.continuous_usage_stats

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of a response that is not streamed; ``pieces`` has the complete output of
        each choice.
        """
        entries = [
            self._choice(
                piece, "message", {"role": "assistant", "refusal": None} | _message(piece.parts)
            )
            for piece in pieces
        ]
        name = "chat.completion" if self.is_chat else "text_completion"
        return self._head(name) | {"choices": entries} | self._totals(choices)

    def begin(self, choices: Sequence[Choice]) -> str:
        """Return the events to send before the first piece of output."""
        return ""

    def chunk(self, piece: Piece, choices: Sequence[Choice], is_first: bool) -> str:
        """Return the event for a piece; ``is_first`` if its choice has sent none before."""
        role = {"role": "assistant"} if is_first else {}
        body: dict[str, Any] = {
            "choices": [self._choice(piece, "delta", role | _delta(piece.parts))]
        }
        if self._includes_usage:
            body["usage"] = usage(choices) if self._has_continuous_usage else None
        return event(self._chunk(body))

    def end(self, choices: Sequence[Choice]) -> str:
        """Return the events that end a stream: the usage if it was requested, and ``[DONE]``."""
        if not self._includes_usage:
            return DONE
        return event(self._chunk({"choices": []} | self._totals(choices))) + DONE

    def failed(self, error: dict[str, Any], choices: Sequence[Choice]) -> str:
        """Return the events that end a stream with an error, which is given in OpenAI's format."""
        return event(error) + DONE

    def token_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the log probabilities of a piece's tokens in the format of chats; an empty list
        unless they were requested.
        """
        entries: list[dict[str, Any]] = (self._chat_logprobs(piece) or {"content": []})["content"]
        return entries

    def _totals(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the final usage, and its metrics again as a field of the body, as vLLM does."""
        final = whole_usage(choices)
        return {"usage": final, "metrics": final["metrics"]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created_s, "model": self.model}

    def _chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion") | body

    def _choice(self, piece: Piece, field: str, message: dict[str, Any]) -> dict[str, Any]:
        """Return one of the body's ``choices``: in a chat, with the message under the key
        ``field``; in a completion, with the text.
        """
        entry: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason}
        if self.is_chat:
            return entry | {field: message, "logprobs": self._chat_logprobs(piece)}
        return entry | {"text": piece.text, "logprobs": self._logprobs(piece)}

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return {
            "content": [
                self._token(token, scores.logprob)
                | {"top_logprobs": [self._token(*each) for each in scores.top]}
                for token, scores in pairs
                if scores is not None
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token)
        return {
            "token": data.decode(errors="backslashreplace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Return the field ``logprobs`` of a completion, in OpenAI's legacy format."""
        if not self.wants_logprobs:
            return None
        return {
            "tokens": [self._name(token) for token in piece.tokens],
            "text_offset": piece.offsets,
            "token_logprobs": [
                None if scores is None else _finite(scores.logprob) for scores in piece.logprobs
            ],
            "top_logprobs": [
                None if scores is None else self._top(token, scores)
                for token, scores in zip(piece.tokens, piece.logprobs, strict=True)
            ],
        }

    def _name(self, token: int) -> str:
        """Return a token's text, or ``bytes:`` and the escaped bytes of part of a character."""
        data = self._token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode(errors="backslashreplace")

    def _top(self, token: int, scores: TokenLogprobs) -> dict[str, float]:
        """Return the log probabilities of a token and of the top tokens at its position, by text.

        If several tokens have the same text, all except the first are named by id, as in vLLM.
        """
        per_token = dict(scores.top) | {token: scores.logprob}
        names: dict[str, int] = {}
        for each in (token, *per_token):
            names.setdefault(self._name(each), each)
        by_id = {each: name for name, each in names.items()}
        return {
            by_id.get(each, f"token_id:{each}"): _finite(value) for each, value in per_token.items()
        }


Events = Iterator[dict[str, Any]]


class BlockAnswer(ABC):
    """Response with one choice as a list of blocks: sections of reasoning, of text, and tool calls,
    in the order of the output.

    The methods that yield the events of a stream also build ``blocks``. Responses that are not
    streamed use the same methods and drop the events.
    """

    wants_logprobs = False

    def __init__(self, model: str, id: str):
        self.model = model
        self.id = id
        self.blocks: list[dict[str, Any]] = []
        self._kind: str | None = None  # kind of the last block; None: it has ended
        self.finish_reason: str | None = None

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of a response that is not streamed; ``pieces[0]`` is all output."""
        self.chunk(pieces[0], choices, is_first=True)
        return self.body(choices)

    def chunk(self, piece: Piece, choices: Sequence[Choice], is_first: bool) -> str:
        return "".join(map(named_event, self._added(piece.parts, piece.finish_reason)))

    def _added(self, parts: AnswerParts, finish_reason: str | None) -> Events:
        for kind, text in (("reasoning", parts.reasoning), ("text", parts.content)):
            if text:
                if kind != self._kind:
                    yield from self._closed()
                    self._kind = kind
                    yield from self.opened(kind)
                yield from self.extended(kind, text)
        for call in parts.tool_calls:
            yield from self._closed()
            yield from self.called(call["id"], **call["function"])
        if finish_reason is not None:
            self.finish_reason = finish_reason
            yield from self._closed()

    def _closed(self) -> Events:
        if self._kind is not None:
            yield from self.closed(self._kind)
            self._kind = None

    @abstractmethod
    def begin(self, choices: Sequence[Choice]) -> str: ...

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> str: ...

    @abstractmethod
    def failed(self, error: dict[str, Any], choices: Sequence[Choice]) -> str: ...

    @abstractmethod
    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the response body with the blocks so far."""

    @abstractmethod
    def opened(self, kind: str) -> Events:
        """Add an empty block of reasoning or text, and yield its events."""

    @abstractmethod
    def extended(self, kind: str, text: str) -> Events:
        """Add text to the last block, and yield its events."""

    @abstractmethod
    def closed(self, kind: str) -> Events:
        """End the last block, and yield its events."""

    @abstractmethod
    def called(self, id: str, name: str, arguments: str) -> Events:
        """Add a tool call, and yield its events; ``arguments`` is JSON."""


AnswerForm = Answer | BlockAnswer


def _message(parts: AnswerParts) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "content": None if parts.tool_calls and not parts.content else parts.content
    }
    if parts.reasoning:
        fields["reasoning_content"] = parts.reasoning
    if parts.tool_calls:
        fields["tool_calls"] = [
            {key: call[key] for key in ("id", "type", "function")} for call in parts.tool_calls
        ]
    return fields


def _delta(parts: AnswerParts) -> dict[str, Any]:
    """Return the field ``delta`` of a chunk of a chat."""
    fields: dict[str, Any] = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    if parts.tool_calls:
        fields["tool_calls"] = parts.tool_calls
    return fields | {"content": parts.content} if parts.content or not fields else fields


def _finite(logprob: float) -> float:
    """Return a log probability, or ``IMPOSSIBLE`` for -inf, which JSON lacks."""
    return max(logprob, IMPOSSIBLE)


def whole_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the usage of a finished response; with several choices, with the metrics of each."""
    final = usage(choices)
    if len(choices) > 1:
        final["metrics"]["choices"] = [
            measurements(choice.decoding.metrics) | _served_by(choice) for choice in choices
        ]
    return final


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the field ``usage``: counts of tokens so far, and the metrics of the first choice."""
    # the first choice of each prompt, as prompts count once
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    prompt = sum(len(choice.prompt) for choice in firsts)
    cached = sum(choice.decoding.metrics.reused for choice in firsts)
    completion = sum(len(choice.tokens) for choice in choices)
    metrics = [choice.decoding.metrics for choice in choices]
    accepted = sum(one.accepted for one in metrics)
    drafted = sum(one.drafted for one in metrics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": sum(choice.num_reasoning for choice in choices),
        },
        "metrics": measurements(metrics[0]) | _served_by(choices[0]),
    }  # fmt: skip


def _served_by(choice: Choice) -> dict[str, str]:
    replica = choice.decoding.replica
    return {} if replica is None else {"replica": replica}


def measurements(metrics: RequestMetrics) -> dict[str, Any]:
    """Return a request's measurements, where possible under vLLM's names, and its SLOs."""

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 3)

    decode_s = None if metrics.tpot_s is None else metrics.tpot_s * (metrics.tokens - 1)
    return {
        "time_to_first_token_ms": milliseconds(metrics.ttft_s),
        "generation_time_ms": milliseconds(decode_s),
        "e2e_latency_ms": milliseconds(metrics.e2e_s),
        "mean_itl_ms": milliseconds(metrics.tpot_s),
        "tokens_per_second": round(1 / metrics.tpot_s, 3) if metrics.tpot_s else None,
        "speculative_decoding": {
            "mean_acceptance_length": metrics.acceptance_length,
            "draft_acceptance_rate": metrics.accepted / max(metrics.drafted, 1),
            "acceptance_histogram": list(metrics.acceptance_histogram or (0,)),
            "num_spec_steps": metrics.steps,
            "num_accepted_draft_tokens": metrics.accepted,
            "num_draft_tokens": metrics.drafted,
        },
        "slo_tpot": metrics.tpot_slo_s,
        "slo_ttft": metrics.ttft_slo_s,
        "slo_e2e": metrics.e2e_slo_s,
        "guaranteed": metrics.guaranteed,
        "attained": metrics.attained,
        "window_guarantee": metrics.window_guarantee,
        "windows_kept": metrics.windows_kept,
        "resumed_tokens": metrics.resumed,
    }


def slo_headers(choices: Sequence[Choice]) -> dict[str, str]:
    """Return the response headers that say whether the SLOs of all choices were guaranteed, and
    whether they were attained (``none`` if there are no SLOs).
    """
    per_choice = [choice.decoding.metrics for choice in choices]
    attained = [metrics.attained for metrics in per_choice if metrics.attained is not None]
    guaranteed = all(metrics.guaranteed for metrics in per_choice)
    values = guaranteed, all(attained) if attained else None
    return {
        name: str(value).lower() for name, value in zip(SLO_ANSWER_HEADERS, values, strict=True)
    }


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Return the body of an error response in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
