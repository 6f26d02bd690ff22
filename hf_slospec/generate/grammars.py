"""Outputs that follow a JSON schema, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation import LogitsProcessor

from hf_slospec.errors import InvalidInputError

KEPT = 8  # compiled schemas, for the choices of a request and for the next request with the same schema
# Whitespace is bounded, as models get lost in it.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,24}"}


class Grammars:
    """Processors that keep outputs to JSON schemas, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]):
        """``vocab_size``: width of the logits; ``end_tokens``: those that end an output which is complete."""
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._known: Any = None
        self._lock = threading.Lock()
        self._matchers: dict[str, Any] = {}  # at the beginning of an output, by schema; the oldest one goes first

    def processor(self, schema: dict[str, Any], prompt_len: int) -> JSONConstraint:
        """Return a processor for one output.

        Raises:
            InvalidInputError: the schema is invalid or cannot be followed, or the model has no token to end with.
        """
        if not self._end_tokens:
            raise InvalidInputError("response_format: this model has no token that ends an output")
        with self._lock:
            if self._known is None:
                self._known = self._new_tokenizer()
        matcher = self._matchers.get(key := json.dumps(schema))
        if matcher is None:
            matcher = self._compiled(schema)
            with self._lock:
                self._matchers[key] = matcher
                while len(self._matchers) > KEPT:
                    self._matchers.pop(next(iter(self._matchers)))
        return JSONConstraint(matcher.deep_copy(), prompt_len)

    def _compiled(self, schema: dict[str, Any]) -> Any:
        import llguidance

        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise InvalidInputError(f"response_format: {error}") from error
        matcher = llguidance.LLMatcher(self._known, grammar)
        if matcher.is_error():
            raise InvalidInputError(f"response_format: the schema cannot be followed: {matcher.get_error()}")
        return matcher

    def _new_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens)
        except ValueError as error:
            raise InvalidInputError(f"response_format cannot be followed with this tokenizer: {error}") from error


class JSONConstraint(LogitsProcessor):
    """Processor that makes every token impossible after which an output would not follow its schema.

    It keeps up with one text, which may be cut back in between.
    """

    def __init__(self, matcher: Any, prompt_len: int):
        """``matcher``: llguidance's, at the beginning of the output; ``prompt_len``: tokens before it."""
        self._matcher, self._prompt_len = matcher, prompt_len
        self._consumed: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for tokens that are not allowed, [1, vocab]; ``input_ids`` [1, length] int64.

        Raises:
            InvalidInputError: llguidance cannot follow the schema further.
        """
        (text,) = input_ids[:, self._prompt_len :].tolist()
        if text[: len(self._consumed)] != self._consumed:
            self._matcher.reset()
            self._consumed = []
        new = text[len(self._consumed) :]
        self._matcher.consume_tokens(new)
        self._consumed = text
        allowed = torch.from_numpy(np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) > 0)
        if self._matcher.is_error():
            raise InvalidInputError(f"response_format: the schema cannot be followed: {self._matcher.get_error()}")
        return scores.masked_fill(~allowed.to(scores.device)[None, : scores.shape[-1]], float("-inf"))
