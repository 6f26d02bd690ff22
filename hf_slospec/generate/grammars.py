"""Outputs that follow a JSON schema, by llguidance, and drafts that follow it as well."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation import LogitsProcessor

from hf_slospec.errors import InvalidInputError
from hf_slospec.forks import Lock
from hf_slospec.generate.json_schemas import to_follow
from hf_slospec.model.kept_prefixes import num_common
from hf_slospec.tree.tree import BoolArray

KEPT = 8  # compiled schemas; the choices of a request, and later requests, share one
# A space, or a new line with its indentation, as small models would never end whitespace.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,8}|\n\t{0,4})?"}
BLANKS = b" \n\t"
MAX_EXPECTED = 64  # bytes that are expected at once; a bound on the time
MAX_WAYS = 3  # characters that may come next; if there are more, none is expected
MAX_ALLOWED = 4096  # tokens; among more, as within strings, are more characters than that
# in place of the first byte of tokens that end an output, and of whitespace
END = 256
BLANK = 257


class TokenBytes:
    """Bytes of the tokens of an llguidance tokenizer."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]):
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        self.of_byte = {text[0]: token for token, text in enumerate(texts) if len(text) == 1}
        # First byte of each token behind whitespace, [vocab] int64.
        self._first = np.array(
            [text.lstrip(BLANKS)[0] if text.strip(BLANKS) else BLANK for text in texts]
        )
        self._first[[token for token in range(len(texts)) if tokenizer.is_special_token(token)]] = (
            END
        )
        self._first[list(end_tokens)] = END

    def next_bytes(self, is_allowed: BoolArray) -> list[int]:
        """Return the bytes that may come next behind whitespace, or ``END``; none if they are many.

        ``is_allowed``: [vocab] bool.
        """
        allowed = np.flatnonzero(is_allowed)
        if len(allowed) > MAX_ALLOWED:
            return []
        found: list[int] = np.flatnonzero(
            np.bincount(self._first[allowed], minlength=BLANK + 1)[:BLANK]
        ).tolist()
        return found if len(found) <= MAX_WAYS else []


class Grammars:
    """Processors that keep outputs to JSON schemas, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]):
        """``vocab_size``: width of the logits; ``end_tokens``: tokens that may end a complete
        output.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._vocabulary: TokenBytes | None = None
        self._lock = Lock()
        # By schema, at the beginning of an output; the oldest is dropped first.
        self._matchers: dict[str, Any] = {}

    def processor(self, schema: dict[str, Any], prompt_len: int) -> JSONConstraint:
        """Return a processor for the outputs of one call.

        Raises:
            InvalidInputError: the schema is invalid or cannot be followed, or the model has no
                token to end with.
        """
        if not self._end_tokens:
            raise InvalidInputError(
                "output in JSON needs a token that ends an output; set the model's eos_token_id"
            )
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = TokenBytes(self._new_tokenizer(), self._end_tokens)
        matcher = self._matchers.get(key := json.dumps(schema))
        if matcher is None:
            matcher = self._compiled(schema)
            with self._lock:
                self._matchers[key] = matcher
                while len(self._matchers) > KEPT:
                    self._matchers.pop(next(iter(self._matchers)))
        return JSONConstraint(matcher.deep_copy(), prompt_len, self._vocabulary)

    def _compiled(self, schema: dict[str, Any]) -> Any:
        import llguidance

        assert self._vocabulary is not None
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                to_follow(schema), overrides=JSON_OPTIONS
            )
        except ValueError as error:
            raise InvalidInputError(f"response_format or tools: {error}") from error
        matcher = llguidance.LLMatcher(self._vocabulary.tokenizer, grammar)
        if matcher.is_error():
            raise InvalidInputError(
                f"response_format or tools: the schema cannot be followed: {matcher.get_error()}"
            )
        return matcher

    def _new_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens
            )
        except ValueError as error:
            raise InvalidInputError(
                f"output in JSON cannot be followed with this tokenizer: {error}"
            ) from error


class SchemaFollower:
    """Matcher of one schema that goes from output to output, by rolling back to the tokens that
    both begin with.
    """

    def __init__(
        self, matcher: Any, prompt_len: int, vocabulary: TokenBytes, token_ids: Sequence[int] = ()
    ):
        """Take llguidance's matcher.

        Args:
            matcher: llguidance's.
            prompt_len: tokens of ``input_ids`` before an output.
            vocabulary: bytes of the matcher's tokens.
            token_ids: the output that the matcher is behind.
        """
        self._matcher = matcher
        self._prompt_len = prompt_len
        self._vocabulary = vocabulary
        self._token_ids = list(token_ids)

    def __deepcopy__(self, memo: Any) -> SchemaFollower:
        """Return a copy that goes on by itself."""
        return self._copied(type(self))

    def _copied(self, kind: type[SchemaFollower]) -> SchemaFollower:
        return kind(self._matcher.deep_copy(), self._prompt_len, self._vocabulary, self._token_ids)

    def _follow(self, token_ids: Sequence[int]) -> bool:
        """Advance the matcher to the end of an output; return False if the schema forbids it."""
        num_same = num_common(self._token_ids, token_ids)
        if num_more := len(self._token_ids) - num_same:
            self._matcher.rollback(num_more)
            del self._token_ids[num_same:]
        new = list(token_ids[num_same:])
        num_taken = self._matcher.try_consume_tokens(new) if new else 0
        self._token_ids += new[:num_taken]
        return num_taken == len(new)

    def _allowed(self) -> BoolArray:
        """Return which tokens may come next.  -> [vocab] bool"""
        return np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) > 0

    @property
    def _size(self) -> int:
        return int(self._vocabulary.tokenizer.vocab_size)


class JSONConstraint(SchemaFollower, LogitsProcessor):
    """Processor that excludes every token after which an output would not follow its schema."""

    per_row = True  # rows do not depend on each other

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for tokens that are not allowed, [batch, vocab];
        ``input_ids`` [batch, length].

        Raises:
            InvalidInputError: llguidance cannot follow the schema further.
        """
        outputs = input_ids[:, self._prompt_len :].tolist()
        return _masked(scores, [self._allowed_after(token_ids) for token_ids in outputs])

    def _allowed_after(self, token_ids: Sequence[int]) -> BoolArray:
        if any(token in token_ids for token in self._vocabulary.end_tokens):
            return np.ones(self._size, dtype=np.bool_)  # stock generate pads rows that have ended
        is_followed = self._follow(token_ids)
        allowed = self._allowed()
        if not is_followed or self._matcher.is_error():
            fault = (
                self._matcher.get_error() or "the output so far is no beginning of one that does"
            )
            raise InvalidInputError(
                f"response_format or tools: the schema cannot be followed: {fault}"
            )
        return allowed

    def for_drafts(self) -> DraftGrammar:
        """Return the grammar for the drafts of one output, with a matcher of its own."""
        grammar = self._copied(DraftGrammar)
        assert isinstance(grammar, DraftGrammar)
        return grammar


class DraftGrammar(SchemaFollower):
    """Grammar of a request's drafts (:class:`~hf_slospec.request.params.Grammar`), and processor
    of their scores.

    Where llguidance can follow the schema no further, everything is allowed and nothing expected.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for tokens that are not allowed, [num_nodes, vocab]."""
        return self.masked(input_ids[:, self._prompt_len :].tolist(), scores)

    def allows(self, token_ids: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """Return for each proposed token whether it may follow the others."""
        is_followed = self._follow(token_ids)
        if self._matcher.is_error() or not is_followed:
            return [self._matcher.is_error()] * len(proposed)
        if self._matcher.is_stopped():
            return [token in self._vocabulary.end_tokens for token in proposed]
        if forced := self._matcher.compute_ff_tokens():
            return [token == forced[0] for token in proposed]
        return [self._matcher.validate_tokens([token]) == 1 for token in proposed]

    def masked(self, token_ids: Sequence[Sequence[int]], scores: torch.Tensor) -> torch.Tensor:
        """Return a draft's scores with -inf for tokens that may not follow, [num_nodes, vocab]."""
        allowed = list[BoolArray]()
        for path in token_ids:
            allowed.append(
                self._allowed() if self._follow(path) else np.zeros(self._size, dtype=np.bool_)
            )
            if self._matcher.is_error():
                return scores
        return _masked(scores, allowed)

    def expected(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return likely continuations of an output.

        They consist of the bytes that the schema forces and, between them, of the only characters
        that it allows after whitespace, with the whitespace that the output had between the same
        characters before. Where few characters are allowed, there is one continuation for each, but
        they branch only once. Texts are tokenized as by the tokenizer."""
        if not self._follow(token_ids):
            return []
        before = self._vocabulary.tokenizer.decode_bytes(list(token_ids))
        text, after = self._continued(token_ids, before, self._next(before))
        found = [(text, after)]
        if len(after) > 1:
            found = [
                self._continued(token_ids, before, [text + way]) if way else (text, [b""])
                for way in after
            ]
        ways = [self._split(text, is_end=after == [b""]) for text, after in found]
        return [way for way in ways if way]

    def _next(self, text: bytes) -> list[bytes]:
        """Return what may follow the text that was matched, if few things may; b"" is its end."""
        if forced := self._matcher.compute_ff_bytes():
            return [forced]
        found = self._vocabulary.next_bytes(self._allowed())
        return [b"" if byte == END else _behind_whitespace(bytes([byte]), text) for byte in found]

    def _continued(
        self, token_ids: Sequence[int], before: bytes, after: list[bytes]
    ) -> tuple[bytes, list[bytes]]:
        """Return the text that must follow an output, and what may follow that text.

        Args:
            token_ids: the output.
            before: its text.
            after: what may follow it.
        """
        path = list(token_ids)
        text = b""
        while len(after) == 1 and after[0] and len(text) < MAX_EXPECTED:
            of_bytes = [self._vocabulary.of_byte.get(byte, -1) for byte in after[0]]
            if -1 in of_bytes or not self._follow([*path, *of_bytes]):
                return text, []
            path = path + of_bytes
            text = text + after[0]
            after = self._next(before + text)
        return text, after

    def _split(self, text: bytes, is_end: bool) -> list[int]:
        """Return the tokens of a text and, if the output ends there, its end."""
        tokenizer = self._vocabulary.tokenizer
        split: list[int] = tokenizer.tokenize_bytes(text) if text else []
        if tokenizer.decode_bytes(split) != text:
            return []
        return [*split, *self._vocabulary.end_tokens[:1]] if is_end else split


def _masked(scores: torch.Tensor, allowed: Sequence[BoolArray]) -> torch.Tensor:
    """Return scores with -inf where a token is not allowed; ``allowed`` is [vocab] per row."""
    mask = torch.from_numpy(np.stack(allowed)).to(scores.device)[:, : scores.shape[-1]]
    return scores.masked_fill(
        ~torch.nn.functional.pad(mask, (0, scores.shape[-1] - mask.shape[1])), float("-inf")
    )


def _behind_whitespace(character: bytes, text: bytes) -> bytes:
    """Return the character that follows a text, behind the whitespace that is likely there.

    It is what the text has had between the same two characters last; else a space after colons and
    commas."""
    before = text.rstrip(BLANKS)
    pattern = re.escape(before[-1:]) + rb"([ \n\t]*)" + re.escape(character)
    usual = [b" " if before[-1:] in (b",", b":") else b"", *re.findall(pattern, before)][-1]
    written = text[len(before) :]
    return (usual[len(written) :] if usual.startswith(written) else b"") + character
