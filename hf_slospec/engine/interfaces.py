"""Interfaces between the engine and its target, drafter, policy and scheduler, and the data that
they exchange in a step.
"""

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
Clock = Callable[[], float]  # returns monotonic seconds


@dataclass(frozen=True)
class Plan:
    """Drafting plan of one step: depth, width, requests, and rules to stop early.

    Drafters that draft level by level stop early for each request that meets one of these rules or,
    if requests cannot leave a draft batch, once all requests have met one. The gain of a request is
    the sum, over the nodes of the last drafted level, of what the path probability times the
    request's weight exceeds ``min_path_prob`` by. With ``min_gain`` and ``min_request_gain`` 0,
    gains do not stop drafting.

    ``goes_on`` is a rule of the policy. It is called after each level but the last planned one,
    with the level's path probabilities, [num_rows, beam] f64, and the indices of the rows' requests
    among the requests that are drafted for, [num_rows] int64. It returns the rows for which the
    next level is drafted, [num_rows] bool. Drafters that do not draft level by level need not call
    it; if requests cannot leave a draft batch, it may be called again with rows that it has ended.
    """

    depth: int  # levels to draft; 0: plain decoding
    width: int  # nodes per request and level (beam width)
    # A node of lower path probability is not worth the time of verifying it.
    min_path_prob: float = 0.0
    # Stop once the sum over all requests of (gain - min_request_gain) is less than this.
    min_gain: float = 0.0
    # Stop for a request once every path has a token whose probability is less than this.
    min_confidence: float = 0.0
    goes_on: Callable[[FloatArray, IntArray], BoolArray] | None = None  # None: no such rule
    drafting: Sequence[Request] | None = None  # requests to draft for; None: all
    # Maximum levels of single requests, at most `depth`; a request without entry has `depth`.
    depths: Mapping[Request, int] | None = None
    # Requests that take part in this step; the engine skips all other ones. None: all take part.
    decoding: Sequence[Request] | None = None
    min_request_gain: float = 0.0  # stop for a request once its gain is not larger than this
    # Factors on path probabilities in gains; a request without entry has 1.
    weights: Mapping[Request, float] | None = None

    def levels_of(self, request: Request) -> int:
        """Return the maximum number of levels to draft for a request."""
        return self.depth if self.depths is None else self.depths.get(request, self.depth)

    def weight_of(self, request: Request) -> float:
        """Return the factor on the path probabilities of a request's nodes when its gain is
        computed.
        """
        return 1.0 if self.weights is None else self.weights.get(request, 1.0)


# Tokens per prefill chunk of a prompt whose log probabilities were requested. Small, as each token
# needs logits and so costs as much as a verified node.
READ_CHUNK = 64


@dataclass(frozen=True)
class Chunk:
    """Consecutive uncached tokens of one request that a step prefills."""

    request: Request
    num_tokens: int
    is_last: bool  # the chunk ends the request's tokens, so this step chooses the next token

    @classmethod
    def of(cls, request: Request, limit: int) -> Chunk:
        """Return the request's next prefill chunk: at most ``limit`` tokens, or the whole prompt if
        it cannot be split.
        """
        if request.params.prefill is not None and not request.kv.num_cached:
            limit = request.num_uncached
        if request.num_unread:
            limit = min(limit, READ_CHUNK)
        return cls(request, min(request.num_uncached, limit), request.num_uncached <= limit)


@dataclass(frozen=True)
class Schedule:
    """The requests that decode in one step, and the chunks of other requests that it prefills."""

    decoding: Sequence[Request]
    chunks: Sequence[Chunk] = ()  # prefill chunks of other requests

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prefill tokens in all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_keys(self) -> int:
        """Number of tokens of all decoding requests together, to which their nodes attend."""
        return sum(len(request.tokens) for request in self.decoding)

    @property
    def finishing_prefill(self) -> list[Request]:
        """Requests whose prefill ends in this step, so that the step chooses their next token."""
        return [chunk.request for chunk in self.chunks if chunk.is_last]

    @property
    def partial_chunks(self) -> list[Chunk]:
        """Chunks after which their request has more tokens to prefill."""
        return [chunk for chunk in self.chunks if not chunk.is_last]

    @property
    def choosing(self) -> list[Request]:
        """Requests for which this step chooses tokens: the decoding requests, then those whose
        prefill ends.
        """
        return [*self.decoding, *self.finishing_prefill]


@dataclass(frozen=True)
class Selection:
    """The draft trees to verify in a step, and the policy's predictions."""

    trees: Sequence[TokenTree]
    expected: Sequence[float]  # expected number of committed tokens, per request
    step_s: float = 0.0  # predicted seconds of the step, drafting included; 0: no prediction

    @classmethod
    def of_roots(cls, trees: Sequence[TokenTree]) -> Selection:
        """Return a selection for plain decoding, which commits one token per request."""
        return cls(trees, [1.0] * len(trees))

    def with_roots(self, requests: Sequence[Request]) -> Selection:
        """Return this selection with further requests appended that decode plainly."""
        roots = [TokenTree.root_only(request.tokens[-1]) for request in requests]
        return Selection([*self.trees, *roots], [*self.expected, *[1.0] * len(roots)], self.step_s)


class Target(ABC):
    """The target model. Methods that are not abstract do nothing by default."""

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards so far that had one-off costs, such as the capture of a CUDA graph."""
        return 0

    @property
    def path(self) -> str:
        """Name of the implementation that computes forwards at present. Times measured on one path
        do not predict times on another.
        """
        return ""

    @abstractmethod
    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        """Run the verification forward: every request's uncached tokens and its draft tree, and
        prefill chunks of other requests.

        A request's ``prompt_reader`` gets the logits of its prompt's positions.

        Args:
            requests: requests that choose tokens in this step.
            trees: one draft tree per request.
            chunks: chunks after which their request has more tokens to prefill; :meth:`commit`
                keeps their K/V.

        Returns:
            One chooser per request. A chooser reads the request's ``tokens`` when it is called, so
            that logits processors see the accepted path.

        Raises:
            MemoryError: memory does not suffice for the step; no state has changed.
        """

    @abstractmethod
    def commit(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        """Keep the K/V of committed tokens and of prefill chunks, and drop the K/V of rejected
        nodes.

        Args:
            requests: requests that chose tokens.
            accepted: accepted nodes of each request.
            chunks: the chunks that were passed to :meth:`verify`.

        Raises:
            MemoryError: memory does not suffice; every request has the K/V that it had before the
                step.
        """

    @abstractmethod
    def release(self, request: Request) -> None:
        """Free the K/V of a finished, cancelled or preempted request, or keep it for reuse. Unknown
        requests are ignored.
        """

    def reuse(self, request: Request) -> int:
        """Let a request without K/V use the cached K/V of the longest common prefix with a running
        or finished request, if there is any.

        Returns:
            The number of the request's tokens whose K/V is now cached; never all of them.
        """
        return request.kv.num_cached

    def num_reusable(self, request: Request) -> int:
        """Return the number of tokens whose K/V :meth:`reuse` would provide now; 0 for a request
        that has K/V.
        """
        return 0

    @property
    def num_kept(self) -> int:
        """Number of tokens of finished requests whose K/V is kept for reuse."""
        return 0

    def close(self) -> None:
        """Free all K/V; called when the engine that uses the target ends."""

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless exactly these requests hold K/V and all other slots are
        free.
        """


class Scheduler(Protocol):
    """Holds the unfinished requests and chooses the requests of each step."""

    running: list[Request]  # admitted requests, which may hold K/V

    def enter(self, now_s: float) -> Sequence[Request]:
        """Give K/V slots to waiting requests before a step, and return the requests that were
        preempted for them.
        """

    def schedule(self, now_s: float) -> Schedule:
        """Return the requests that decode and the chunks that are prefilled in the step that begins
        now.
        """

    def observe(self, step: StepEvent) -> None:
        """Update estimates from a finished step."""

    def remove(self, request: Request) -> None:
        """Remove a finished request."""


class Drafter(ABC):
    """Proposes candidate trees: an assistant model, prompt lookup, or a user's object
    (``drafter=``).

    Proposals never change the output, only the speed. Several threads may call one drafter at the
    same time. Methods that are not abstract do nothing by default. A user's drafter need not
    inherit from this class, and may define only the methods that it needs.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that the drafter reads, numbered as in
        ``output_hidden_states``.
        """
        return ()

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards so far that had one-off costs, such as the capture of a CUDA graph."""
        return 0

    @property
    def num_feature_bytes(self) -> int:
        """Bytes of hidden states that the drafter has received and not processed yet."""
        return 0

    @abstractmethod
    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """Propose continuations of each request.

        Args:
            requests: decoding requests. ``request.tokens`` holds prompt and output so far;
                ``request.noise`` is the noise that will choose the next tokens, or None if it is
                not known.
            plan: a tree may be at most ``plan.depth`` deep, with at most ``plan.width`` nodes per
                level on average.

        Returns:
            One tree per request, whose root is the request's last token. ``TokenTree.chain`` makes
            a tree with a single path, ``TokenTree.root_only`` a tree without proposals.
            ``path_probs`` are the predicted probabilities that paths are accepted: nodes are
            verified in descending order of them, and nodes that are not worth their time are not
            verified.
        """

    def release(self, request: Request) -> None:
        """Free the state of a request that has finished, was cancelled, or was preempted and will
        be drafted for again.

        The request may be unknown to the drafter.
        """

    def take_features(self, request: Request, begin: int, features: Any) -> None:
        """Take the target's hidden states of committed tokens: each token once, in order, after
        the step that processed it.

        If a request's K/V was loaded or reused, the hidden states begin after the reused tokens.

        Args:
            request: the request.
            begin: index in ``request.tokens`` of the first token. The token after the last one is
                already in ``request.tokens``, too.
            features: [num_tokens, len(feature_layers) * hidden] tensor, the layers' hidden states
                concatenated.
        """

    def read_kv_of(self, sequences: Any) -> None:
        """Take the target's sequences, for drafters that read the target's K/V."""

    def reuse(self, request: Request) -> int:
        """Let a request use the drafter's state of a common prefix; return the number of the
        request's tokens that are processed then.
        """
        return 0

    def relieve(self) -> bool:
        """Free memory whose contents can be recomputed; return whether any was freed."""
        return False

    def close(self) -> None:
        """Free all state; called when the engine that uses the drafter ends."""


class Policy:
    """Decides what a step drafts and which nodes it verifies.

    The engine calls ``plan``, ``select`` and ``observe`` once per step, in this order; if the step
    fails, the remaining calls are left out. A policy may keep state between these calls in
    attributes.
    """

    # True: drafts only as much as the time limit of `StepCosts.first_tokens` permits, and decodes
    # plainly where it permits no draft. The scheduler relies on it when it guarantees SLOs.
    falls_back = False

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        """Return the depth and width to draft for these requests.

        Args:
            requests: the requests that may decode in the step.
            begun_s: time at which the step began, on the engine's clock.
            num_prefill_tokens: tokens of other requests that are prefilled in the same forward.
        """
        raise NotImplementedError

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        """Return the draft trees to verify: subtrees of the candidate trees, with unchanged path
        probabilities.

        Args:
            requests: the requests that decode in the step: ``plan.decoding`` in the order of the
                step, or all if it is None.
            candidates: one candidate tree per request.
            plan: the plan; its depth is 0 if the engine has paused drafting.
        """
        raise NotImplementedError

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        """Update estimates from the result of a step. The parameter ``plan`` may be omitted.

        Args:
            requests: the requests that decoded.
            accepted: accepted nodes of each request's draft tree.
            phases: seconds that the step took, by phase.
            plan: the plan of the step.
        """
