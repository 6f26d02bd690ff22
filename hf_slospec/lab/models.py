"""Simulated target and drafter, and oracle policies, which know what will be accepted.

Tokens come from texts.py, durations from hardware.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Chooser, Chunk, Drafter, Plan, Policy, Selection, Target
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.policies.optimal import OptimalPolicy
from hf_slospec.lab.texts import Library
from hf_slospec.policies.registry import max_useful_depth
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree


class VirtualClock:
    """Clock that advances only when ``now_s`` is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowedClock(VirtualClock):
    """Clock of a machine that runs at half speed from ``begin_s`` to ``end_s``.

    Forwards that begin in this interval take twice as long.
    """

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s
        super().__init__()

    def __setattr__(self, name: str, value: float) -> None:
        if name == "now_s":
            before_s = getattr(self, name, 0.0)
            value = before_s + (value - before_s) * (
                2.0 if self.begin_s <= before_s < self.end_s else 1.0
            )
        super().__setattr__(name, value)


class SimulatedTarget(Target):
    """Target that chooses the tokens of each request's text and advances the clock by the cost of
    each forward.

    It keeps the K/V of a finished request that a later request continues, as long as the K/V slots
    reserved for running requests leave room."""

    def __init__(
        self,
        library: Library,
        hardware: Hardware,
        clock: VirtualClock,
        kv_tokens: float = math.inf,
        continued: Mapping[int, int] | None = None,
    ):
        """Create a target with an empty K/V cache.

        ``continued`` maps the index of a request to the index of the request that it continues.
        """
        self.library = library
        self.hardware = hardware
        self.clock = clock
        self.kv_tokens = kv_tokens
        self._continued = continued or {}
        self._to_come = set(self._continued.values())
        # K/V slots reserved for running requests (their maximum lengths), by request index
        self._held: dict[int, int] = {}
        # Cached tokens of finished requests, by request index, the oldest first
        self._kept: dict[int, int] = {}

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        """Advance the clock by a forward of trees and chunks; return one chooser per request."""
        num_nodes = sum(tree.num_nodes for tree in trees)
        num_prefill_tokens = sum(r.num_uncached - 1 for r in requests) + sum(
            chunk.num_tokens for chunk in chunks
        )
        num_keys = sum(len(r.tokens) for r in requests) + sum(
            c.request.kv.num_cached + c.num_tokens for c in chunks
        )
        is_mixed = num_prefill_tokens > 0 and any(request.is_decoding for request in requests)
        seconds = float(
            self.hardware.target(
                num_nodes + num_prefill_tokens, len(requests) + len(chunks), num_keys
            )
        )
        self.clock.now_s += seconds + self.hardware.host_s + self.hardware.mixed_s * is_mixed
        return [functools.partial(self._choose, request) for request in requests]

    def _choose(self, request: Request, node: int) -> int:
        return self.library.token(request.index, request.num_emitted)

    def commit(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        """Do nothing: there is no K/V cache."""

    def release(self, request: Request) -> None:
        """Free a request's K/V slots, but keep the K/V of a finished request that a later request
        continues.
        """
        self._held.pop(request.index, None)
        if request.is_finished and request.index in self._to_come:
            self._kept[request.index] = len(request.tokens) - 1

    def reuse(self, request: Request) -> int:
        """Reserve K/V slots for a request; return the number of its tokens that are cached.

        The request takes over the kept K/V of the request that it continues. The oldest kept K/V is
        evicted until the reserved slots fit.
        """
        num_cached = request.kv.num_cached or self.num_reusable(request)
        self._kept.pop(self._continued.get(request.index, -1), None)
        self._held[request.index] = request.params.max_len
        while self._kept and sum(self._held.values()) + self.num_kept > self.kv_tokens:
            del self._kept[next(iter(self._kept))]
        return num_cached

    def num_reusable(self, request: Request) -> int:
        """Return the number of cached tokens of the request that this one continues; 0 if there is
        no such request, or its K/V was evicted.
        """
        return self._kept.get(self._continued.get(request.index, -1), 0)

    @property
    def num_kept(self) -> int:
        """Tokens of finished requests whose K/V is kept."""
        return sum(self._kept.values())


@dataclass(frozen=True)
class _Level:
    """One level of the beams of all requests; every field is [num_requests, width]."""

    path_probs: FloatArray
    min_probs: FloatArray  # conditional probability of the least probable token on the path
    is_correct: BoolArray  # the target would choose every token of the path
    tokens: IntArray
    parents: IntArray  # index of the parent node in the level above


class SimulatedDrafter(Drafter):
    """Drafter that runs beam search over the draft probabilities stored with the texts.

    Nodes whose parent is on the target's path get the probabilities stored for their position. All
    other nodes, which are never accepted, get the probabilities of a random position of the same
    text, so that wrong proposals look as probable as correct ones."""

    def __init__(self, library: Library, hardware: Hardware, clock: VirtualClock, seed: int = 0):
        self.library = library
        self.hardware = hardware
        self.clock = clock
        self._rng = np.random.default_rng(seed)
        self._num_cached: dict[Request, int] = {}  # tokens in the draft's K/V cache

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """Advance the clock by the forwards of all draft levels.  -> one candidate tree per request

        A request that reaches a limit of the plan leaves the draft's batch, as it does on a CPU; on
        other devices it would stay in the batch.
        """
        num_requests = len(requests)
        keys = np.array([len(request.tokens) for request in requests])
        num_uncached = int(keys.sum()) - sum(
            self._num_cached.get(request, 0) for request in requests
        )
        self._num_cached.update((request, len(request.tokens)) for request in requests)
        seconds = float(self.hardware.draft(num_uncached, num_requests, keys.sum()))
        limits = np.array([plan.levels_of(request) for request in requests])
        weights = np.array([[plan.weight_of(request)] for request in requests])
        num_levels = np.ones(num_requests, dtype=np.int64)
        is_drafting: BoolArray = num_levels > 0
        ones = np.ones((num_requests, 1))
        roots = np.array([[request.tokens[-1]] for request in requests])
        levels = [_Level(ones, ones, ones > 0.0, roots, np.full_like(roots, -1))]
        levels.append(self._expand(requests, levels[0], 0, plan.width))
        for depth in range(1, plan.depth):
            path_probs = levels[-1].path_probs
            if plan.goes_on is not None:
                rows = np.flatnonzero(is_drafting)
                is_drafting[rows] = plan.goes_on(path_probs[rows], rows)
            is_drafting = is_drafting & (limits > depth)
            if plan.min_confidence:
                is_drafting &= (levels[-1].min_probs > plan.min_confidence).any(axis=1)
            if plan.min_gain or plan.min_request_gain:
                gains = (
                    np.maximum(weights * path_probs - plan.min_path_prob, 0.0).sum(axis=1)
                    - plan.min_request_gain
                )
                is_drafting &= gains > 0.0
                if gains[is_drafting].sum() < plan.min_gain:
                    break
            if not is_drafting.any():
                break
            num_drafting = int(is_drafting.sum())
            num_tokens = num_drafting * levels[-1].tokens.shape[1]
            seconds += float(self.hardware.draft(num_tokens, num_drafting, keys[is_drafting].sum()))
            levels.append(self._expand(requests, levels[-1], depth, plan.width))
            num_levels += is_drafting
        self.clock.now_s += seconds + self.hardware.drafting_request_s * num_requests
        if self.library.matched < 1.0:  # no proposal, as if prompt lookup had no match
            num_levels[self._rng.random(num_requests) >= self.library.matched] = 0
        pairs = zip(self._trees(levels), num_levels.tolist(), strict=True)
        return [tree.up_to(depth) for tree, depth in pairs]

    def release(self, request: Request) -> None:
        """Drop the request's K/V from the draft's cache."""
        self._num_cached.pop(request, None)

    def _expand(self, requests: Sequence[Request], above: _Level, depth: int, width: int) -> _Level:
        """Return the next level of all beams: per request, the ``width`` most probable children of
        the nodes in ``above``, which have this depth.
        """
        library = self.library
        beam = above.tokens.shape[1]
        indices = np.array([request.index for request in requests])
        next_positions = np.array([request.num_emitted + depth for request in requests])
        random_positions = (
            self._rng.random(above.tokens.shape) * library.lengths[indices][:, None]
        ).astype(np.int64)
        positions = np.where(above.is_correct, next_positions[:, None], random_positions)
        rows = library.rows(np.repeat(indices, beam), positions.ravel())
        num_children = min(width, library.num_children)
        probs = library.child_probs[rows, :num_children].reshape(len(requests), beam, num_children)
        ranks = library.ranks[rows].reshape(len(requests), beam, 1)
        children: list[npt.NDArray[Any]] = [
            above.path_probs[..., None] * probs,
            np.minimum(above.min_probs[..., None], probs),
            above.is_correct[..., None] & (ranks == np.arange(num_children)),
        ]
        children = [values.reshape(len(requests), -1) for values in children]
        order = np.argsort(-children[0], axis=1, kind="stable")[:, :width]
        path_probs, min_probs, is_correct = (
            np.take_along_axis(values, order, axis=1) for values in children
        )
        return _Level(
            path_probs, min_probs, is_correct, order % num_children, order // num_children
        )

    def _trees(self, levels: Sequence[_Level]) -> list[TokenTree]:
        """Return one candidate tree per request, its nodes level by level, the root first."""
        widths = [level.tokens.shape[1] for level in levels]
        depths = np.repeat(np.arange(len(levels)), widths)
        # For each node, the index of the first node of the level above it
        firsts = np.repeat(np.cumsum([0, 0, *widths])[: len(levels)], widths)
        tokens = np.concatenate([level.tokens for level in levels], axis=1)
        parents = np.concatenate([level.parents for level in levels], axis=1) + firsts
        path_probs = np.concatenate([level.path_probs for level in levels], axis=1)
        rows = zip(tokens, parents, path_probs, strict=True)
        return [
            TokenTree(row_tokens, row_parents, depths, row_probs)
            for row_tokens, row_parents, row_probs in rows
        ]


class OraclePolicy(Policy):
    """Policy that knows the texts and, before every step, tries drafting with all widths on a
    separate clock.

    It drafts only for requests with tokens that will be accepted, and knows the cost of drafting.
    The draft's prefill of prompts is not counted, since it pays in later steps. It maximises the
    tokens per second of each single step and ignores SLOs and arrivals, so the gap between it and
    another policy shows what unknown acceptance costs. It is not an upper bound; one is in
    benchmarks/papers/bounds.py."""

    def __init__(self, library: Library, config: SLOSpecConfig, hardware: Hardware, trial: Drafter):
        """Create a policy. ``trial`` is a drafter with a separate clock, so that trying it takes no
        time in the simulation.
        """
        self.library = library
        self.config = config
        self.costs = hardware.costs()
        self._trial = trial

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        """Return the depth and width that commit the most tokens per second when this step's
        drafting is tried with every width.
        """
        max_depth = max_useful_depth(requests, self.config.max_depth)
        if not max_depth:
            return Plan(0, 1)
        max_width = min(max(self.config.draft_budget // len(requests), 1), self.config.max_width)
        plans = [self._best_depth(requests, max_depth, width) for width in range(1, max_width + 1)]
        return max(plans, key=lambda pair: pair[0])[1]

    def _best_depth(
        self, requests: Sequence[Request], max_depth: int, width: int
    ) -> tuple[float, Plan]:
        """Return the committed tokens per second of the best plan of this width, and that plan."""
        num_requests = len(requests)
        num_keys = sum(len(request.tokens) for request in requests)
        trees = self._trial.draft(requests, Plan(max_depth, width))
        pairs = zip(requests, trees, strict=True)
        hits = np.array([len(accepted_nodes(self.library, *pair)) - 1 for pair in pairs])
        drafting = [request for request, hit in zip(requests, hits.tolist(), strict=True) if hit]
        if not drafting:
            return num_requests / float(
                self.costs.verify_s(num_requests, num_requests, num_keys)
            ), Plan(0, 1)
        depths = np.arange(max_depth + 1)
        accepted = np.minimum(hits[:, None], depths).sum(axis=0)
        num_catch_up = sum(min(request.num_draft_behind, max_depth + 1) for request in drafting)
        draft_keys = sum(len(request.tokens) for request in drafting)
        draft_s = self.costs.draft_s(len(drafting), depths, width, draft_keys, num_catch_up)
        rates = (num_requests + accepted) / (
            draft_s + self.costs.verify_s(num_requests + accepted, num_requests, num_keys)
        )
        best = int(np.argmax(rates))
        return float(rates[best]), Plan(best, width, drafting=drafting)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        """Select exactly the candidate nodes that will be accepted."""
        pairs = zip(requests, candidates, strict=True)
        trees = [
            tree.subtree(accepted_nodes(self.library, request, tree)) for request, tree in pairs
        ]
        return Selection(trees, [float(tree.num_nodes) for tree in trees])


class AdaServeOraclePolicy(OptimalPolicy):
    """AdaServe's policy with true path probabilities: 1 for nodes that will be accepted and 0 for
    all others.

    With true probabilities the paper's Algorithm 1 is optimal: every request gets the tokens that
    it requires, and the rest of the budget is spent on as many further tokens as possible. The
    depth and width of candidate trees are AdaServe's.
    """

    is_wide = False

    def __init__(self, library: Library, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.library = library

    def _nodes(
        self,
        requests: Sequence[Request],
        candidates: Sequence[TokenTree],
        required: Sequence[float],
    ) -> list[IntArray]:
        trees = [self._with_true_probs(*pair) for pair in zip(requests, candidates, strict=True)]
        return super()._nodes(requests, trees, required)

    def _with_true_probs(self, request: Request, tree: TokenTree) -> TokenTree:
        is_accepted = np.zeros(tree.num_nodes)
        is_accepted[accepted_nodes(self.library, request, tree)] = 1.0
        return replace(tree, path_probs=is_accepted)


def accepted_nodes(library: Library, request: Request, tree: TokenTree) -> IntArray:
    """Return the nodes of a draft tree that will be accepted, the root first.  ->
    [num_accepted + 1] int64
    """
    nodes = [ROOT]
    while len(nodes) < request.num_left:
        position = request.num_emitted + len(nodes) - 1
        child = tree.child(nodes[-1], library.token(request.index, position))
        if child is None:
            break
        nodes.append(child)
    return np.array(nodes)
