"""Past answers, which drafters look into: bounded, by prompt, and saved with checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

TREE_DEPTH = 64  # depth of suffix trees: tokens of context and continuation together
# Last tokens of a prompt that precede an answer where only answers to that prompt are searched
CONTEXT = 16
MIN_PATH_PROB = 0.02  # share of the matches; rarer continuations are not proposed
ANY_LENGTH = (
    1e6  # limit of continuation per matched token; trees are limited by their probabilities instead
)
READER = -1  # key in suffix caches of a request that only reads
END = -1  # no token: the end of an answer


def suffix_decoding() -> ModuleType:
    """Return the module that has the suffix trees."""
    need("suffix", "the drafter suffix")
    return import_module("arctic_inference.suffix_decoding")


def new_cache(max_outputs: int) -> SuffixDecodingCache:
    """Return an empty cache that shares at most ``max_outputs`` outputs between requests; -1: all."""
    cache: SuffixDecodingCache = suffix_decoding().SuffixDecodingCache(TREE_DEPTH, max_outputs)
    return cache


def speculated(
    cache: SuffixDecodingCache, key: int, context: list[int], max_nodes: int
) -> SuffixDecodingDraft:
    """Return the tree of continuations of a context in a cache."""
    return cache.speculate(
        key, context, max_nodes, ANY_LENGTH, 0.0, MIN_PATH_PROB, use_tree_spec=True
    )


class _Group(NamedTuple):
    """Answers that are searched together."""

    salt: str
    prompt: str  # digest of the prompt's tokens; "": answers to any prompt


@dataclass(eq=False)
class _Answer:
    """An answer, whose tokens follow the last ones of its prompt."""

    salt: str
    prompt: str  # digest of the prompt's tokens
    context: list[int]  # last tokens of the prompt
    tokens: array[int] = field(default_factory=lambda: array("i"))
    is_open: bool = True  # its request is running

    @property
    def groups(self) -> tuple[_Group, _Group]:
        """Return the answers to the same prompt and those to any prompt."""
        return _Group(self.salt, self.prompt), _Group(self.salt, "")


@dataclass(eq=False)
class Copied:
    """Progress of copying a growing list of tokens, which notices when the list was rolled back."""

    num_tokens: int = 0
    tail: list[int] = field(default_factory=list)  # the last TREE_DEPTH of these tokens

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Return whether the tokens begin with the copied ones, compared by the last ``TREE_DEPTH``
        of them.
        """
        return self.tail == tokens[self.num_tokens - len(self.tail) : self.num_tokens]

    def append(self, tokens: list[int]) -> None:
        """Count new tokens as copied."""
        self.num_tokens += len(tokens)
        self.tail = [*self.tail, *tokens][-TREE_DEPTH:]


@dataclass(eq=False, kw_only=True)
class _Running(Copied):
    """Part of a running request's output that was appended to its answer."""

    key: int
    groups: tuple[_Group, _Group]  # Those of the answer, which may have been dropped.
    is_over: bool = False


class PastAnswers:
    """Answers to past requests and the running ones', for drafters of requests with the same
    ``cache_salt``.

    It is passed as ``share_texts`` to :func:`load_drafter`, and used by ``generate`` (whose salt is
    ``""``) and ``submit``. ``"suffix"`` drafts from all answers, ``"lookup"`` from those to the
    same prompt. Times and acceptance then leak information about answers to all requests with the
    same salt. All methods may be called from any thread.
    """

    def __init__(self, *, max_tokens: int = 1_000_000, max_per_prompt: int = 32):
        """Set the bounds; the oldest answers are dropped first.

        A token takes 4 bytes, and about 400 bytes in each suffix tree, which is built when a
        request first needs it.

        Args:
            max_tokens: maximum number of tokens of all answers together, those of running requests
                included.
            max_per_prompt: maximum number of answers to one prompt; fewer favour those of recent
                weights.

        Raises:
            InvalidInputError: a bound is below 1.
        """
        if min(max_tokens, max_per_prompt) < 1:
            raise InvalidInputError(
                f"max_tokens and max_per_prompt must be at least 1, got {max_tokens} and {max_per_prompt}"
            )
        self.max_tokens = max_tokens
        self.max_per_prompt = max_per_prompt
        self.num_tokens = 0  # Tokens of all answers; prompts do not count.
        self._answers: dict[int, _Answer] = {}  # by key, the oldest first
        self._to: defaultdict[_Group, dict[int, None]] = defaultdict(
            dict
        )  # keys of the answers to a prompt, in order
        self._trees: dict[_Group, SuffixDecodingCache] = {}
        self._running: WeakKeyDictionary[Request, _Running] = WeakKeyDictionary()
        self._keys = itertools.count()
        self._lock = Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Keep the answers, end those of running requests, and forget what was made of them, as for
        loaded answers.
        """
        self._to.clear()
        self._trees.clear()
        self._running.clear()
        for key, answer in self._answers.items():
            answer.is_open = False
            self._to[answer.groups[0]][key] = None
        self.num_tokens = sum(len(answer.tokens) for answer in self._answers.values())

    def __len__(self) -> int:
        return len(self._answers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all answers to a file for :meth:`load`."""
        with self._lock:
            rows = [
                [each.salt, each.prompt, each.context, each.tokens.tolist()]
                for each in self._answers.values()
            ]
        Path(path).write_text(json.dumps(rows), encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the answers of a file that :meth:`save` wrote, as the newest ones.

        Raises:
            InvalidInputError: it is another file.
        """
        try:
            rows = [
                (_Answer(salt, prompt, array("i", context).tolist()), array("i", tokens).tolist())
                for salt, prompt, context, tokens in json.loads(
                    Path(path).read_text(encoding="utf-8")
                )
            ]
        except (ValueError, TypeError) as error:
            raise InvalidInputError(
                f"{path} was not written by PastAnswers.save: {error}"
            ) from error
        with self._lock:
            for answer, answer_tokens in rows:
                key = self._begin(answer)
                self._append(key, answer_tokens)
                self._close(key)

    # ---- for drafters

    def update(self, request: Request) -> None:
        """Append the new tokens of a running request to its answer."""
        with self._lock:
            running = self._running.get(request)
            output = request.tokens[request.prompt_len :]
            # new, seen again after its end, or rolled back
            if running is None or running.is_over or not running.is_prefix_of(output):
                if running is not None:
                    self._drop(running.key)
                params = request.params
                digest = hashlib.blake2b(
                    array("i", params.prompt).tobytes(), digest_size=16
                ).hexdigest()
                answer = _Answer(params.cache_salt, digest, list(params.prompt[-CONTEXT:]))
                running = self._running[request] = _Running(
                    key=self._begin(answer), groups=answer.groups
                )
            new = output[running.num_tokens :]
            running.append(new)
            self._append(running.key, new)

    def end(self, request: Request) -> None:
        """Keep the answer of an ended request as it is, or drop it if the request failed."""
        with self._lock:
            running = self._running.get(request)
            if (running is not None and running.is_over) or (
                running is None and not request.num_emitted
            ):
                return
            self.update(request)
            running = self._running[request]
            running.is_over = True
            if running.num_tokens and request.error is None:
                self._close(running.key)
            else:
                self._drop(running.key)

    def continuations(self, request: Request, max_nodes: int) -> list[SuffixDecodingDraft]:
        """Return the continuations of a running request's last tokens in answers to its prompt and
        in all answers.
        """
        self.update(request)
        with self._lock:
            same, every = self._running[request].groups
            groups = [same, every] if self._siblings(request) else [every]
            context = request.tokens[-TREE_DEPTH:]
            return [speculated(self._tree(group), READER, context, max_nodes) for group in groups]

    def before(self, request: Request) -> IntArray:
        """Return the other answers to a running request's prompt, the oldest first, each with
        ``END`` behind it.

        Returns:
            [num_tokens] int64; each answer follows the last tokens of the prompt.
        """
        self.update(request)
        with self._lock:
            parts = [
                part
                for each in self._siblings(request)
                for part in (each.context, each.tokens, [END])
            ]
            return np.concatenate([np.array(part, np.int64) for part in ([], *parts)])

    def _siblings(self, request: Request) -> list[_Answer]:
        """Return the other answers to a running request's prompt."""
        running = self._running[request]
        return [
            self._answers[key] for key in self._to.get(running.groups[0], ()) if key != running.key
        ]

    def _begin(self, answer: _Answer) -> int:
        key = next(self._keys)
        self._answers[key] = answer
        for group in answer.groups:
            if group in self._trees:
                _begin_in(self._trees[group], group, key, answer)
        siblings = self._to[answer.groups[0]]
        siblings[key] = None
        if len(siblings) > self.max_per_prompt:
            self._drop(next(iter(siblings)))
        return key

    def _append(self, key: int, tokens: Sequence[int]) -> None:
        """Append tokens to an answer, if it is kept, and drop the oldest answers beyond the bounds."""
        if not tokens or (answer := self._answers.get(key)) is None:
            return
        answer.tokens.extend(tokens)
        for group in answer.groups:
            if group in self._trees:
                self._trees[group].add_active_response(key, tokens)
        self.num_tokens += len(tokens)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._answers)))

    def _close(self, key: int) -> None:
        """End an answer, if it is kept."""
        if (answer := self._answers.get(key)) is None:
            return
        answer.is_open = False
        for group in answer.groups:
            if group in self._trees:
                self._trees[group].stop_request(key)
        if not any(self._answers[sibling].is_open for sibling in self._to[answer.groups[0]]):
            self._trees.pop(
                answer.groups[0], None
            )  # it is built again for the next request with this prompt

    def _drop(self, key: int) -> None:
        """Drop an answer, if it is kept."""
        if (answer := self._answers.pop(key, None)) is None:
            return
        self.num_tokens -= len(answer.tokens)
        for group in answer.groups:
            if (tree := self._trees.get(group)) is not None:
                if answer.is_open:
                    tree.stop_request(key)
                tree.evict_cached_response(key)
                if len(tree.cached_requests) == 1:  # only the reader is left
                    del self._trees[group]
        siblings = self._to[answer.groups[0]]
        del siblings[key]
        if not siblings:
            del self._to[answer.groups[0]]

    def _tree(self, group: _Group) -> SuffixDecodingCache:
        """Return the suffix tree of a group of answers, which is built if there is none."""
        if (tree := self._trees.get(group)) is None:
            tree = self._trees[group] = new_cache(-1)
            tree.start_request(READER, [])
            for key in self._to[group] if group.prompt else self._answers:
                if group in (answer := self._answers[key]).groups:
                    _begin_in(tree, group, key, answer)
                    if not answer.is_open:
                        tree.stop_request(key)
        return tree


def _begin_in(tree: SuffixDecodingCache, group: _Group, key: int, answer: _Answer) -> None:
    """Begin an answer in a tree with the tokens it has; prompts are not shown to requests with
    other prompts.
    """
    tree.start_request(key, [])
    tree.add_active_response(key, [*(answer.context if group.prompt else []), *answer.tokens])
