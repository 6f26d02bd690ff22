"""Interfaces between the engine and its target, drafter, policy and scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray, TokenTree

# Node of the verified tree -> the token that plain decoding would choose after it.
Chooser = Callable[[int], int]
Clock = Callable[[], float]  # monotonic seconds


@dataclass(frozen=True)
class Plan:
    """The shape of one step's drafting.

    Drafters that draft level by level stop for single requests where these limits say so, or, where
    requests cannot leave a batch, once they say so for all. The gain of a request is the sum by
    which the last level's path probabilities, times the request's weight, exceed ``min_path_prob``.
    Without ``min_gain`` and ``min_request_gain``, gains are no limit.

    ``goes_on`` gets the path probabilities of each drafted level but the last planned one,
    [num_rows, beam] f64, and the indices of the rows' requests among those that are drafted for,
    [num_rows] int64. It returns the rows to draft the next level for, [num_rows] bool. Drafters
    that do not draft level by level need not ask it; where requests cannot leave a batch, rows that
    it has ended may come again."""

    depth: int  # draft levels; 0 decodes plainly
    width: int  # beam width per request
    min_path_prob: float = (
        0.0  # a node of lower path probability is not worth its share of the verify step
    )
    min_gain: float = (
        0.0  # stop once the gains of all, each less min_request_gain, sum up to less than this
    )
    min_confidence: float = (
        0.0  # stop for a request once each path holds a token that is less probable than this
    )
    goes_on: Callable[[FloatArray, IntArray], BoolArray] | None = (
        None  # see above; None: no such rule
    )
    drafting: Sequence[Request] | None = None  # requests to draft for; None: all
    depths: Mapping[Request, int] | None = None  # levels of single requests, at most
    decoding: Sequence[Request] | None = (
        None  # requests that take part, the others sit the step out; None: all
    )
    min_request_gain: float = 0.0  # stop for a request once its gain is no larger than this
    weights: Mapping[Request, float] | None = (
        None  # factors on path probabilities in gains; others: 1
    )

    def levels_of(self, request: Request) -> int:
        """Return the number of levels to draft for a request, at most."""
        return self.depth if self.depths is None else self.depths.get(request, self.depth)

    def weight_of(self, request: Request) -> float:
        """Return the factor on the path probabilities of a request's nodes in its gain."""
        return 1.0 if self.weights is None else self.weights.get(request, 1.0)


# Tokens per chunk of a prompt whose logits are read, each of which costs as much as a verified node
READ_CHUNK = 64


@dataclass(frozen=True)
class Chunk:
    """A stretch of one request's uncached tokens that a step prefills."""

    request: Request
    num_tokens: int
    is_last: bool  # the chunk ends with the root, so the next token is chosen in this step

    @classmethod
    def of(cls, request: Request, limit: int) -> Chunk:
        """Return at most ``limit`` of the request's uncached tokens; all if its prompt must be
        prefilled whole.
        """
        if request.params.prefill is not None and not request.kv.num_cached:
            limit = request.num_uncached
        if request.num_unread:
            limit = min(limit, READ_CHUNK)
        return cls(request, min(request.num_uncached, limit), request.num_uncached <= limit)


@dataclass(frozen=True)
class Schedule:
    """The requests of one step."""

    decoding: Sequence[Request]
    chunks: Sequence[Chunk] = ()  # prefill of other requests

    @property
    def num_prefill_tokens(self) -> int:
        """Prefill tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_keys(self) -> int:
        """Sum of the tokens of the decoding requests."""
        return sum(len(request.tokens) for request in self.decoding)

    @property
    def finishing_prefill(self) -> list[Request]:
        """Requests whose prefill ends in this step, so their next token is chosen."""
        return [chunk.request for chunk in self.chunks if chunk.is_last]

    @property
    def partial_chunks(self) -> list[Chunk]:
        """Chunks whose requests have more to prefill."""
        return [chunk for chunk in self.chunks if not chunk.is_last]

    @property
    def choosing(self) -> list[Request]:
        """Requests that choose tokens in this step: the decoding ones first."""
        return [*self.decoding, *self.finishing_prefill]


@dataclass(frozen=True)
class Selection:
    """The draft trees of a step, and the policy's predictions."""

    trees: Sequence[TokenTree]
    expected: Sequence[float]  # expected committed tokens per request
    step_s: float = 0.0  # predicted seconds of the step, drafting included; 0: no prediction

    @classmethod
    def of_roots(cls, trees: Sequence[TokenTree]) -> Selection:
        """Return a selection for plain decoding: one token per request."""
        return cls(trees, [1.0] * len(trees))

    def with_roots(self, requests: Sequence[Request]) -> Selection:
        """Return this selection with plain decoding of further requests."""
        roots = [TokenTree.root_only(request.tokens[-1]) for request in requests]
        return Selection([*self.trees, *roots], [*self.expected, *[1.0] * len(roots)], self.step_s)


class Target(ABC):
    """The target model; the methods that are not abstract do nothing by default."""

    @property
    def num_one_off_forwards(self) -> int:
        """Forwards so far with one-off costs, such as the capture of a CUDA graph."""
        return 0

    @property
    def path(self) -> str:
        """Name of the way in which forwards are computed now; times of one say nothing about
        another.
        """
        return ""

    @abstractmethod
    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        """Forward every request's uncached tokens and its draft tree, and some chunks.  -> one
        chooser per request.

        The ``prompt_reader`` of a request gets the logits of the prompt's positions. A chooser
        reads the request's ``tokens`` when it is called, so that processors see the accepted path.

        Args:
            chunks: prefill of other requests, not up to the ends of their prompts; :meth:`commit`
                keeps its K/V.

        Raises:
            MemoryError: memory does not suffice for the step; nothing has changed.
        """

    @abstractmethod
    def commit(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        """Keep the K/V of committed tokens and of chunks, and drop that of rejected nodes.

        Raises:
            MemoryError: memory does not suffice; every request has the K/V that it had before the
                step.
        """

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release the K/V of a finished, cancelled or preempted request, for reuse or for good;
        ignore unknown ones.
        """

    def reuse(self, request: Request) -> int:
        """Give a request without K/V the K/V of the longest common prefix with a kept or running
        request, if any.

        Returns:
            The number of the request's tokens whose K/V is cached now; never all.
        """
        return request.kv.num_cached

    def num_reusable(self, request: Request) -> int:
        """Return the number of tokens whose K/V ``reuse`` would give now; 0 for a request that has
        K/V.
        """
        return 0

    @property
    def num_kept(self) -> int:
        """Tokens of finished requests whose K/V is kept for reuse."""
        return 0

    def close(self) -> None:
        """Release all K/V."""

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless exactly these requests hold K/V and the rest is free."""


class Scheduler(Protocol):
    """Holds the unfinished requests and picks those of each step."""

    running: list[Request]  # requests that may hold K/V

    def enter(self, now_s: float) -> Sequence[Request]:
        """Give slots to waiting requests before a step; return the requests that are preempted."""

    def schedule(self, now_s: float) -> Schedule:
        """Return which requests decode and which prompts are prefilled in the step that begins now."""

    def observe(self, step: StepEvent) -> None:
        """Learn from what a step did."""

    def remove(self, request: Request) -> None:
        """Remove a request that has finished."""


class Drafter(ABC):
    """Proposes candidate trees: an assistant model, prompt lookup, or a user's object
    (``drafter=``).

    The output is always what the target would have written; good proposals make it faster. Several
    threads may call one drafter at the same time. The methods that are not abstract do nothing by
    default. A user's drafter need not inherit from this class; it may define only the methods that
    it needs."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the drafter reads, numbered as in the model's
        ``output_hidden_states``.
        """
        return ()

    @property
    def num_one_off_forwards(self) -> int:
        """Forwards so far with one-off costs, such as the capture of a CUDA graph."""
        return 0

    @property
    def num_feature_bytes(self) -> int:
        """Bytes of features that are not processed yet."""
        return 0

    @abstractmethod
    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """Propose continuations of each request.

        Args:
            requests: decoding requests; ``request.tokens`` holds prompt and output so far, and
                ``request.noise`` the noise that will choose the next tokens, if it is known.
            plan: trees may be at most ``plan.depth`` deep, with ``plan.width`` nodes per level on
                average.

        Returns:
            One tree per request, its root the request's last token. ``TokenTree.chain`` makes a
            tree of one path, ``TokenTree.root_only`` one without proposals. A node's ``path_probs``
            entry is the probability that the path to it is accepted: nodes are verified in
            descending order, and nodes that cannot pay are left out.
        """

    def release(self, request: Request) -> None:
        """Free the state of a request that has finished, was cancelled, or has lost its K/V and
        will come again.

        The request may be unknown to the drafter.
        """

    def take_features(self, request: Request, begin: int, features: Any) -> None:
        """Take the hidden states of committed tokens, each token once, in order, after the step
        that processed them.

        For a request whose K/V was loaded or reused, they begin after the reused tokens.

        Args:
            begin: index in ``request.tokens`` of the first token; the token after the last one is
                known as well.
            features: [num_tokens, len(feature_layers) * hidden] tensor, the layers' states
                concatenated.
        """

    def read_kv_of(self, sequences: Any) -> None:
        """Take the target's sequences, for drafters that read its K/V."""

    def reuse(self, request: Request) -> int:
        """Give a request the state kept for a common prefix; return the number of its tokens
        processed then.
        """
        return 0

    def relieve(self) -> bool:
        """Free memory whose content can be computed again; return whether there was any."""
        return False

    def close(self) -> None:
        """Release all state, when an engine that used the drafter ends."""


class Policy:
    """Decides how a step's token budget is spent.

    The engine calls ``plan``, ``select`` and ``observe`` once per step, in this order, and leaves
    out the rest if the step fails. What a later method needs of the plan is kept in attributes.
    """

    # Steps draft no more than `StepCosts.first_tokens` leaves time for, and nothing if it must be
    falls_back = False

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        """Return how deep and wide to draft for these requests, in a step that began at
        ``begun_s``.

        ``num_prefill_tokens`` tokens of other requests are prefilled in the same forward.
        """
        raise NotImplementedError

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        """Return the draft trees to verify: subtrees of the candidate trees, with unchanged path
        probabilities.

        ``requests`` are those of ``plan.decoding`` if that is given, in their order in the step.
        The plan has depth 0 if the engine has paused drafting.
        """
        raise NotImplementedError

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        """Learn which nodes of the verified draft trees were accepted, and how long the step took.

        The parameter ``plan`` may be omitted.
        """
