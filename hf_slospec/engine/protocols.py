"""What the engine asks of models and policies. Real models, toy models and simulated ones all fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.engine.request import Request

Chooser = Callable[[int], int]  # node of the verified tree -> the token plain decoding would choose after it
Clock = Callable[[], float]  # monotonic seconds


@dataclass(frozen=True)
class Plan:
    """The shape of one step."""

    depth: int  # draft levels; 0 decodes plainly
    width: int  # beam width per request
    min_path_prob: float = 0.0  # below this a node is not worth its share of the verify step
    min_gain: float = 0.0  # stop drafting once the last level's nodes exceed min_path_prob by less than this in all
    min_confidence: float = 0.0  # stop drafting once no path has all its tokens more probable than this
    drafting: Sequence[Request] | None = None  # requests to draft for; None: all
    state: Any = None  # what the policy wants handed back in select and observe; nothing else reads it


@dataclass(frozen=True)
class Chunk:
    """A stretch of one request's uncached tokens that a step feeds."""

    request: Request
    num_tokens: int
    is_last: bool  # it ends with the root, so the next token is chosen in this step

    @classmethod
    def of(cls, request: Request, limit: int) -> Chunk:
        """As much as there is, ``limit`` tokens at most."""
        return cls(request, min(request.num_uncached, limit), request.num_uncached <= limit)


@dataclass(frozen=True)
class Schedule:
    """Whose turn it is in a step."""

    decoding: Sequence[Request]
    chunks: Sequence[Chunk] = ()  # of those in prefill
    preempted: Sequence[Request] = ()  # those that lose their K/V before the step

    @property
    def num_prefill_tokens(self) -> int:
        """Prefill tokens."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def finishing_prefill(self) -> list[Request]:
        """Requests whose next token is chosen right after the last of what they are fed."""
        return [chunk.request for chunk in self.chunks if chunk.is_last]

    @property
    def partial_chunks(self) -> list[Chunk]:
        """Chunks with more to come."""
        return [chunk for chunk in self.chunks if not chunk.is_last]


@dataclass(frozen=True)
class Selection:
    """What a step verifies, and what is expected of it."""

    trees: Sequence[TokenTree]
    expected: Sequence[float]  # tokens each request should commit
    step_s: float = 0.0  # seconds the step should take, drafting included; 0: nothing is expected

    @classmethod
    def of_roots(cls, trees: Sequence[TokenTree]) -> Selection:
        """Plain decoding: one token each."""
        return cls(trees, [1.0] * len(trees))

    def with_roots(self, trees: Sequence[TokenTree]) -> Selection:
        """And trees of other requests that are roots only."""
        return Selection([*self.trees, *trees], [*self.expected, *[1.0] * len(trees)], self.step_s)


class Target(Protocol):
    """The model whose output is wanted."""

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        """Forward every request's uncached tokens and its draft tree, and some chunks.  -> one chooser per request.

        A chooser reads the request's ``tokens`` as they stand when it is called, so that processors see the path.

        Args:
            chunks: of other requests, whose prompts do not end with them; what they compute stays cached.

        Raises:
            MemoryError: there is no memory for so much at a time; nothing has changed.
        """

    def commit(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], chunks: Sequence[Chunk] = ()
    ) -> None:
        """Keep the K/V of what was committed and of chunks, and forget the rest of the verified trees."""

    def release(self, request: Request) -> None:
        """Forget a request that finished, was abandoned or lost its K/V to another, if it is known at all."""

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless exactly what these hold is taken, and all else is free."""


class Scheduler(Protocol):
    """Knows the requests that are not finished, and whose turn it is."""

    running: list[Request]  # those that may hold K/V

    def schedule(self, now_s: float) -> Schedule:
        """Who decodes and who is fed how much in the step that begins now."""

    def observe(self, step: StepEvent) -> None:
        """Take in what the step did."""

    def remove(self, request: Request) -> None:
        """Forget a request that has finished."""


class Drafter(Protocol):
    """Proposes candidate trees: an assistant model, prompt lookup, or an object of your own (``drafter=``).

    Whatever is proposed, the output stays what the target would have written; good proposals make it faster. One
    drafter may serve calls of several threads at once.
    """

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """Guess how each text goes on.

        Args:
            requests: those that decode in this step; ``request.tokens`` is the text so far, prompt included.
            plan: trees may be at most ``plan.depth`` deep, with ``plan.width`` nodes per level on average.

        Returns:
            One tree per request, its root the request's last token. ``TokenTree.chain`` makes one of a single guess,
            ``TokenTree.root_only`` one of none. A node's ``path_probs`` entry is the probability you give to the path
            that ends there: nodes are verified in the order of these, and those that cannot pay are left out.
        """

    def release(self, request: Request) -> None:
        """Forget a request, which has finished, was abandoned or lost its K/V to another and will be seen again.

        It may be one that was never drafted for.
        """


class Policy(Protocol):
    """Decides what a step spends and on whom. Its methods are called in this order, once each per step."""

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        """How deep and wide to draft for these requests, in a step that began at ``begun_s``.

        ``num_prefill_tokens`` prefill tokens of others go through the same forward.
        """

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        """The draft trees to verify, out of the candidate trees and with the draft's own path probabilities."""

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        """Learn which nodes of the verified draft trees were accepted, and what the step took.

        A policy of your own may leave ``plan`` out.
        """
