"""Store of past answers, from which prompt lookup and suffix trees draft: bounded in size, grouped
by prompt, and saved to files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.errors import InvalidInputError
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray

NUM_COMPARED = 64  # number of last tokens that are compared to notice that a list was rolled back
# Number of a prompt's last tokens that are searched in front of each past answer to that prompt
CONTEXT = 16
END = -1  # no token: the end of an answer


class AnswerGroup(NamedTuple):
    """Key of the answers that are searched together."""

    salt: str
    prompt: str  # digest of the prompt's tokens; "": the group of answers to any prompt


@dataclass(eq=False)
class PastAnswer:
    """One answer, and the last tokens of the prompt that it follows."""

    salt: str
    prompt: str  # digest of the prompt's tokens
    context: list[int]  # last tokens of the prompt
    tokens: array[int] = field(default_factory=lambda: array("i"))
    is_open: bool = True  # its request is running

    @property
    def groups(self) -> tuple[AnswerGroup, AnswerGroup]:
        """Groups that the answer belongs to: the answers to the same prompt, and those to any
        prompt.
        """
        return AnswerGroup(self.salt, self.prompt), AnswerGroup(self.salt, "")


Index = TypeVar("Index")


@dataclass(eq=False)
class Copied:
    """Progress of copying a growing list of tokens, which notices when the list was rolled back."""

    num_tokens: int = 0
    tail: list[int] = field(default_factory=list)  # the last NUM_COMPARED of these tokens

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Return whether the tokens begin with the copied ones, compared by the last
        ``NUM_COMPARED`` of them.
        """
        return self.tail == tokens[self.num_tokens - len(self.tail) : self.num_tokens]

    def append(self, tokens: list[int]) -> None:
        """Count new tokens as copied."""
        self.num_tokens += len(tokens)
        self.tail = [*self.tail, *tokens][-NUM_COMPARED:]


@dataclass(eq=False, kw_only=True)
class _Running(Copied):
    """Progress of copying a running request's output to its answer."""

    key: int
    groups: tuple[AnswerGroup, AnswerGroup]  # groups of the answer, which may have been dropped
    is_over: bool = False


class PastAnswers:
    """Answers of past and running requests, from which drafters draft for other requests with the
    same ``cache_salt``.

    It is passed as ``share_texts`` to :func:`load_drafter`, and used by ``generate`` (whose salt is
    ``""``) and ``submit``. The drafter ``"suffix"`` drafts from all answers, ``"lookup"`` from
    those to the same prompt. Times and acceptance then leak information about answers to all
    requests with the same salt. All methods may be called from any thread.
    """

    def __init__(self, *, max_tokens: int = 1_000_000, max_per_prompt: int = 32):
        """Create an empty store; beyond the bounds, the oldest answers are dropped.

        A token takes 4 bytes, and about 400 bytes in each suffix tree, which is built when a
        request first needs it.

        Args:
            max_tokens: maximum number of tokens of all answers together, including answers of
                running requests.
            max_per_prompt: maximum number of answers to one prompt; a small number favours answers
                of the latest weights if the model is trained meanwhile.

        Raises:
            InvalidInputError: a bound is below 1.
        """
        if min(max_tokens, max_per_prompt) < 1:
            raise InvalidInputError(
                f"max_tokens and max_per_prompt must be at least 1, got {max_tokens} and {max_per_prompt}"
            )
        self.max_tokens = max_tokens
        self.max_per_prompt = max_per_prompt
        self.num_tokens = 0  # tokens of all answers; prompts do not count
        self.answers: dict[int, PastAnswer] = {}  # by key, the oldest first
        # keys of the answers to each prompt, the oldest first
        self._keys_to: defaultdict[AnswerGroup, dict[int, None]] = defaultdict(dict)
        # search indices over the answers, by the class of the index
        self._indices: dict[Any, Any] = {}
        self.running: WeakKeyDictionary[Request, _Running] = WeakKeyDictionary()
        self._keys = itertools.count()
        self.lock = Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """End the answers of running requests in a forked process, and drop the search indices; all
        answers are kept, as if they were loaded.
        """
        self._keys_to.clear()
        self._indices.clear()
        self.running.clear()
        for key, answer in self.answers.items():
            answer.is_open = False
            self._keys_to[answer.groups[0]][key] = None
        self.num_tokens = sum(len(answer.tokens) for answer in self.answers.values())

    def __len__(self) -> int:
        return len(self.answers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all answers to a file for :meth:`load`."""
        with self.lock:
            rows = [
                [each.salt, each.prompt, each.context, each.tokens.tolist()]
                for each in self.answers.values()
            ]
        Path(path).write_text(json.dumps(rows), encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the answers of a file that :meth:`save` wrote, as the newest ones.

        Raises:
            InvalidInputError: the file was not written by :meth:`save`.
        """
        try:
            rows = [
                (
                    PastAnswer(salt, prompt, array("i", context).tolist()),
                    array("i", tokens).tolist(),
                )
                for salt, prompt, context, tokens in json.loads(
                    Path(path).read_text(encoding="utf-8")
                )
            ]
        except (ValueError, TypeError) as error:
            raise InvalidInputError(
                f"{path} was not written by PastAnswers.save: {error}"
            ) from error
        with self.lock:
            for answer, answer_tokens in rows:
                key = self._begin(answer)
                self._append(key, answer_tokens)
                self._close(key)

    # ---- for drafters

    def update(self, request: Request) -> None:
        """Append the new tokens of a running request to its answer."""
        with self.lock:
            running = self.running.get(request)
            output = request.tokens[request.prompt_len :]
            # a new request, one that comes again after its end, or one whose output was rolled back
            if running is None or running.is_over or not running.is_prefix_of(output):
                if running is not None:
                    self._drop(running.key)
                params = request.params
                digest = hashlib.blake2b(
                    array("i", params.prompt).tobytes(), digest_size=16
                ).hexdigest()
                answer = PastAnswer(params.cache_salt, digest, list(params.prompt[-CONTEXT:]))
                running = self.running[request] = _Running(
                    key=self._begin(answer), groups=answer.groups
                )
            new = output[running.num_tokens :]
            running.append(new)
            self._append(running.key, new)

    def end(self, request: Request) -> None:
        """Keep the answer of an ended request as it is, or drop it if the request failed or emitted
        nothing.
        """
        with self.lock:
            running = self.running.get(request)
            if (running is not None and running.is_over) or (
                running is None and not request.num_emitted
            ):
                return
            self.update(request)
            running = self.running[request]
            running.is_over = True
            if running.num_tokens and request.error is None:
                self._close(running.key)
            else:
                self._drop(running.key)

    def index(self, kind: Callable[[PastAnswers], Index]) -> Index:
        """Return the search index of class ``kind``, which is created from the answers so far on
        first use.

        Later changes are passed on to the ``begin``, ``append``, ``close`` and ``drop`` of the
        index, with the lock held.
        """
        with self.lock:
            if kind not in self._indices:
                self._indices[kind] = kind(self)
            index: Index = self._indices[kind]
            return index

    def before(self, request: Request) -> IntArray:
        """Return the other answers to a running request's prompt, the oldest first, each with
        ``END`` behind it.

        Returns:
            [num_tokens] int64; each answer follows the last tokens of the prompt.
        """
        self.update(request)
        with self.lock:
            parts = [
                part
                for each in self.siblings(request)
                for part in (each.context, each.tokens, [END])
            ]
            return np.concatenate([np.array(part, np.int64) for part in ([], *parts)])

    def answers_to(self, group: AnswerGroup) -> dict[int, PastAnswer]:
        """Return the answers of a group by key, the oldest first."""
        if not group.prompt:
            return {k: answer for k, answer in self.answers.items() if answer.salt == group.salt}
        return {key: self.answers[key] for key in self._keys_to.get(group, ())}

    def siblings(self, request: Request) -> list[PastAnswer]:
        """Return the other answers to a running request's prompt."""
        running = self.running[request]
        answers = self.answers_to(running.groups[0])
        return [answer for key, answer in answers.items() if key != running.key]

    def _begin(self, answer: PastAnswer) -> int:
        key = next(self._keys)
        self.answers[key] = answer
        for index in self._indices.values():
            index.begin(key, answer)
        siblings = self._keys_to[answer.groups[0]]
        siblings[key] = None
        if len(siblings) > self.max_per_prompt:
            self._drop(next(iter(siblings)))
        return key

    def _append(self, key: int, tokens: Sequence[int]) -> None:
        """Append tokens to an answer that was not dropped, and drop the oldest answers beyond the
        bounds.
        """
        if not tokens or (answer := self.answers.get(key)) is None:
            return
        answer.tokens.extend(tokens)
        for index in self._indices.values():
            index.append(key, answer, tokens)
        self.num_tokens += len(tokens)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self.answers)))

    def _close(self, key: int) -> None:
        """End an answer, unless it was dropped."""
        if (answer := self.answers.get(key)) is None:
            return
        answer.is_open = False
        for index in self._indices.values():
            index.close(key, answer)

    def _drop(self, key: int) -> None:
        """Drop an answer, unless it was dropped before."""
        if (answer := self.answers.pop(key, None)) is None:
            return
        self.num_tokens -= len(answer.tokens)
        for index in self._indices.values():
            index.drop(key, answer)
        siblings = self._keys_to[answer.groups[0]]
        del siblings[key]
        if not siblings:
            del self._keys_to[answer.groups[0]]
