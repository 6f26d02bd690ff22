"""Answers in OpenAI's form, whole and as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.server.choices import Choice, Piece


@dataclass
class Answer:
    """One answer: its identity, and how tokens are written."""

    model: str
    is_chat: bool
    token_text: Callable[[int], str]  # of a single token
    wants_logprobs: bool = False
    includes_usage: bool = False  # in a stream
    has_continuous_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of a request that is not streamed; ``pieces`` has each choice in full."""
        own = [self._whole_choice(piece) for piece in pieces]
        usage = self.usage(choices)
        kind, name = (ChatCompletion, "chat.completion") if self.is_chat else (Completion, "text_completion")
        return _dump(kind, self._head(name) | {"choices": own, "usage": usage})

    def chunk(self, piece: Piece, choices: Sequence[Choice], is_first: bool, offset: int) -> dict[str, Any]:
        """Return the chunk of a piece; ``offset`` is the length of the choice's text before it."""
        if self.is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
            own = {
                "index": piece.index, "delta": delta | {"content": piece.text}, "finish_reason": piece.finish_reason,
                "logprobs": self._chat_logprobs(piece),
            }  # fmt: skip
        else:
            own = {
                "index": piece.index, "text": piece.text, "finish_reason": piece.finish_reason,
                "logprobs": self._logprobs(piece.tokens, piece.logprobs, offset),
            }  # fmt: skip
        body = self._stream_head() | {"choices": [own]}
        if self.includes_usage:
            body["usage"] = self.usage(choices) if self.has_continuous_usage else None
        return _dump(ChatCompletionChunk if self.is_chat else Completion, body)

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the last chunk of a stream with ``include_usage``."""
        kind = ChatCompletionChunk if self.is_chat else Completion
        return _dump(kind, self._stream_head() | {"choices": [], "usage": self.usage(choices)})

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return counts of tokens and the measurements of the first choice."""
        prompt = sum({id(choice.prompt): len(choice.prompt) for choice in choices}.values())
        completion = sum(len(choice.tokens) for choice in choices)
        accepted = sum(choice.decoding.metrics.accepted for choice in choices)
        drafted = sum(choice.decoding.metrics.drafted for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            },
            "metrics": measurements(choices[0]),
        }  # fmt: skip

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _stream_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        own: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason}
        if self.is_chat:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            return own | {"message": message, "logprobs": self._chat_logprobs(piece)}
        return own | {"text": piece.text, "logprobs": self._logprobs(piece.tokens, piece.logprobs, 0)}

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return {
            "content": [
                self._token(token, own.logprob) | {"top_logprobs": [self._token(*each) for each in own.top]}
                for token, own in pairs
                if own is not None
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, Any] | None:
        """Return log probabilities of a completion's tokens in the legacy form."""
        if not self.wants_logprobs:
            return None
        texts, offsets = [self.token_text(token) for token in tokens], list[int]()
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [None if own is None else max(own.logprob, -9999.0) for own in logprobs],
            "top_logprobs": [
                None if own is None else {self.token_text(token): max(value, -9999.0) for token, value in own.top}
                for own in logprobs
            ],
        }


def measurements(choice: Choice) -> dict[str, Any]:
    """Return the measurements of a choice, under the names that vLLM's clients read, and of its SLOs."""
    metrics = choice.decoding.metrics

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 3)

    decode_s = None if metrics.tpot_s is None else metrics.tpot_s * (metrics.tokens - 1)
    return {
        "time_to_first_token_ms": milliseconds(metrics.ttft_s),
        "generation_time_ms": milliseconds(decode_s),
        "mean_itl_ms": milliseconds(metrics.tpot_s),
        "tokens_per_second": round(1 / metrics.tpot_s, 3) if metrics.tpot_s else None,
        "speculative_decoding": {
            "mean_acceptance_length": metrics.acceptance_length,
            "draft_acceptance_rate": metrics.accepted / metrics.drafted if metrics.drafted else None,
            "num_spec_steps": metrics.steps,
            "num_accepted_draft_tokens": metrics.accepted,
            "num_draft_tokens": metrics.drafted,
        },
        "slo_tpot": metrics.tpot_slo_s,
        "slo_ttft": metrics.ttft_slo_s,
        "guaranteed": metrics.guaranteed,
        "attained": metrics.attained,
    }


def _dump(kind: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body as OpenAI's own type writes it, which keeps further fields."""
    # Not validated: in chunks and before a prompt's first token there is nothing where the types want something.
    made: dict[str, Any] = kind.construct(**body).model_dump(mode="json", exclude_unset=True, warnings=False)
    return made


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
