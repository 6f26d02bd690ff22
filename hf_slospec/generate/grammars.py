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

KEPT = 8  # compiled schemas; the choices of a request, and later requests, share one
# Whitespace is bounded, as some models would never end it.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,24}"}


class Grammars:
    """Processors that keep outputs to JSON schemas, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]):
        """``vocab_size``: width of the logits; ``end_tokens``: tokens that may end a complete output."""
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._ll_tokenizer: Any = None
        self._lock = threading.Lock()
        self._matchers: dict[str, Any] = {}  # by schema, at the beginning of an output; the oldest is dropped first

    def processor(self, schema: dict[str, Any], prompt_len: int) -> JSONConstraint:
        """Return a processor for one output.

        Raises:
            InvalidInputError: the schema is invalid or cannot be followed, or the model has no token to end with.
        """
        if not self._end_tokens:
            raise InvalidInputError("output in JSON needs a token that ends an output; set the model's eos_token_id")
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = self._new_tokenizer()
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
            raise InvalidInputError(f"response_format or tools: {error}") from error
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar)
        if matcher.is_error():
            raise InvalidInputError(f"response_format or tools: the schema cannot be followed: {matcher.get_error()}")
        return matcher

    def _new_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens)
        except ValueError as error:
            raise InvalidInputError(f"output in JSON cannot be followed with this tokenizer: {error}") from error


class JSONConstraint(LogitsProcessor):
    """Processor that excludes every token after which an output would not follow its schema.

    It serves one output, which may be truncated between calls.
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
        (token_ids,) = input_ids[:, self._prompt_len :].tolist()
        if token_ids[: len(self._consumed)] != self._consumed:
            self._matcher.reset()
            self._consumed = []
        self._matcher.consume_tokens(token_ids[len(self._consumed) :])
        self._consumed = token_ids
        allowed = torch.from_numpy(np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) > 0)
        if self._matcher.is_error():
            fault = self._matcher.get_error()
            raise InvalidInputError(f"response_format or tools: the schema cannot be followed: {fault}")
        return scores.masked_fill(~allowed.to(scores.device)[None, : scores.shape[-1]], float("-inf"))
