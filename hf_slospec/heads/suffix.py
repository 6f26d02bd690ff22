"""Suffix decoding: drafting from suffix trees of the request's tokens and, optionally, of past
answers.

The suffix trees are those of ``arctic-inference``; ``drafters/past_answers.py`` holds the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.drafters.lookup import ProbGivenNoise, prob_given_noise
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.drafters.past_answers import (
    NUM_COMPARED,
    AnswerGroup,
    Copied,
    PastAnswer,
    PastAnswers,
)
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.extras import need
from hf_slospec.forks import Lock
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import Request
from hf_slospec.tree.merge import merge_trees
from hf_slospec.tree.tree import TokenTree

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

# Depth of suffix trees in tokens, which the matched context and its continuation share.
TREE_DEPTH = NUM_COMPARED
# Continuations that followed fewer than this share of the matches are not proposed.
MIN_PATH_PROB = 0.02
# Arctic's limit on proposed tokens per matched token, set so high that it never applies;
# MIN_PATH_PROB and max_nodes limit trees instead.
ANY_LENGTH = 1e6
# Key in a suffix cache of past answers under which running requests query it. The cache requires a
# started request; this one never adds tokens.
READER = -1
MAX_MATCHES = 8.0  # number of matches beyond which further ones add no confidence
TEXT = 0  # key in a request's suffix cache under which its tokens are added and queried


def new_cache(max_outputs: int) -> SuffixDecodingCache:
    """Return an empty suffix cache that keeps the outputs of at most ``max_outputs`` requests for
    others to match; -1: no limit.

    Raises:
        MissingExtraError: arctic-inference is not installed.
    """
    need("suffix", "the drafter suffix")
    module = import_module("arctic_inference.suffix_decoding")
    return module.SuffixDecodingCache(TREE_DEPTH, max_outputs)


def speculated(
    cache: SuffixDecodingCache, key: int, context: list[int], max_nodes: int
) -> SuffixDecodingDraft:
    """Return a tree of what followed earlier occurrences of the context in a suffix cache.

    Args:
        cache: the suffix cache to search.
        key: a started request of the cache.
        context: last tokens of the request, at most ``TREE_DEPTH``.
        max_nodes: maximum number of proposed tokens.
    """
    return cache.speculate(
        key, context, max_nodes, ANY_LENGTH, 0.0, MIN_PATH_PROB, use_tree_spec=True
    )


class AnswerTrees:
    """Index of past answers: a suffix cache per group of answers, built when first needed.

    :class:`PastAnswers` calls ``begin``, ``append``, ``close`` and ``drop`` when answers change.
    """

    def __init__(self, past: PastAnswers):
        self._past = past
        self._trees: dict[AnswerGroup, SuffixDecodingCache] = {}

    def continuations(self, request: Request, max_nodes: int) -> list[SuffixDecodingDraft]:
        """Return what followed a running request's last tokens in past answers.

        Returns:
            One draft from the other answers to the same prompt, if there are any, and one from all
            answers with the same salt.
        """
        past = self._past
        past.update(request)
        with past.lock:
            same, every = past.running[request].groups
            groups = [same, every] if past.siblings(request) else [every]
            context = request.tokens[-TREE_DEPTH:]
            return [speculated(self._tree(group), READER, context, max_nodes) for group in groups]

    def _tree(self, group: AnswerGroup) -> SuffixDecodingCache:
        if (tree := self._trees.get(group)) is None:
            tree = self._trees[group] = new_cache(-1)
            tree.start_request(READER, [])
            for key, answer in self._past.answers_to(group).items():
                self._begin_in(group, key, answer)
                if not answer.is_open:
                    tree.stop_request(key)
        return tree

    def _begin_in(self, group: AnswerGroup, key: int, answer: PastAnswer) -> None:
        """Add an answer to the suffix cache of a group.

        The end of its prompt is included only in groups of one prompt, so that requests with other
        prompts cannot draft from it.
        """
        tree = self._trees[group]
        tree.start_request(key, [])
        tree.add_active_response(key, [*(answer.context if group.prompt else []), *answer.tokens])

    def begin(self, key: int, answer: PastAnswer) -> None:
        """Add an answer to the suffix caches of its groups that have been built."""
        for group in self._trees.keys() & answer.groups:
            self._begin_in(group, key, answer)

    def append(self, key: int, answer: PastAnswer, tokens: Sequence[int]) -> None:
        """Add tokens of an answer to the suffix caches of its groups."""
        for group in self._trees.keys() & answer.groups:
            self._trees[group].add_active_response(key, tokens)

    def close(self, key: int, answer: PastAnswer) -> None:
        """End an answer in the suffix caches of its groups; it stays available for matching.

        The suffix cache of its prompt is dropped when no request with that prompt is running.
        """
        for group in self._trees.keys() & answer.groups:
            self._trees[group].stop_request(key)
        same = answer.groups[0]
        if not any(sibling.is_open for sibling in self._past.answers_to(same).values()):
            self._trees.pop(same, None)  # rebuilt when the next request with this prompt drafts

    def drop(self, key: int, answer: PastAnswer) -> None:
        """Remove an answer from the suffix caches of its groups, and drop caches left empty."""
        for group in self._trees.keys() & answer.groups:
            tree = self._trees[group]
            if answer.is_open:
                tree.stop_request(key)
            tree.evict_cached_response(key)
            if len(tree.cached_requests) == 1:  # only READER is left
                del self._trees[group]


@dataclass(eq=False)
class _RequestTree(Copied):
    """Suffix tree of one request's prompt and output."""

    cache: SuffixDecodingCache = field(default_factory=lambda: new_cache(0))

    def __post_init__(self) -> None:
        self.cache.start_request(TEXT, [])

    def append(self, tokens: list[int]) -> None:
        self.cache.add_active_response(TEXT, tokens)
        super().append(tokens)


class SuffixDrafter(Drafter):
    """Drafter that proposes what followed earlier occurrences of a request's last tokens.

    Suffix trees of Snowflake's ``arctic-inference`` count what followed every earlier occurrence of
    up to ``TREE_DEPTH`` last tokens (SuffixDecoding, arXiv 2411.04975). A child's conditional
    probability is its share of its parent's occurrences, times a confidence that rises with the
    matched tokens and the number of matches. For a sampled request whose sampling noise is known,
    that probability is conditioned on the noise.

    It searches the request's prompt and output, and past answers if ``past`` is set.
    """

    def __init__(self, past: PastAnswers | None = None):
        """Make a drafter that has no requests yet.

        Args:
            past: past answers to draft from, to which the drafter adds its requests' answers; a
                token takes about 400 bytes in each suffix tree. None: draft from the request only.

        Raises:
            MissingExtraError: arctic-inference is not installed.
        """
        new_cache(0)  # raises at once if the package is missing
        self.past = past
        self._trees: WeakKeyDictionary[Request, _RequestTree] = WeakKeyDictionary()
        self._lock = Lock()

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with self._lock:
            drafts = [self._continuations(request, plan.depth * plan.width) for request in requests]
        proposed = [
            _trees(request, plan, per_tree)
            for request, per_tree in zip(requests, drafts, strict=True)
        ]
        return merge_trees(proposed, plan.depth * plan.width)

    def release(self, request: Request) -> None:
        """Drop the request's suffix tree, and end its answer in the past answers."""
        with self._lock:
            self._trees.pop(request, None)
            if self.past is not None:
                self.past.end(request)

    def _continuations(self, request: Request, max_nodes: int) -> list[SuffixDecodingDraft]:
        """Return what followed the request's last tokens before: in its prompt and output, and in
        past answers.
        """
        tokens = request.tokens
        tree = self._trees.get(request)
        # The tree is built (again) for a new or preempted request, or one that was rolled back.
        if tree is None or not tree.is_prefix_of(tokens):
            tree = self._trees[request] = _RequestTree()
        tree.append(tokens[tree.num_tokens :])
        of_text = speculated(tree.cache, TEXT, tokens[-TREE_DEPTH:], max_nodes)
        if self.past is None:
            return [of_text]
        return [of_text, *self.past.index(AnswerTrees).continuations(request, max_nodes)]


def _trees(request: Request, plan: Plan, drafts: Sequence[SuffixDecodingDraft]) -> list[TokenTree]:
    """Return a request's drafts as token trees, cut to the planned depth."""
    depths = [_depths(draft) for draft in drafts]
    levels: list[set[int]] = [set() for _ in range(min(plan.depth, max(map(max, depths))))]
    for draft, token_depths in zip(drafts, depths, strict=True):
        for token, depth in zip(draft.token_ids, token_depths[1:], strict=True):
            if depth <= plan.depth:
                levels[depth - 1].add(token)
    given_noise = prob_given_noise(request, levels)
    root = request.tokens[-1]
    return [
        _converted(root, *pair, given_noise).up_to(plan.depth)
        for pair in zip(drafts, depths, strict=True)
    ]


def _depths(draft: SuffixDecodingDraft) -> list[int]:
    """Return the depth of each node of a draft, the root (depth 0) first.  -> [1 + num_tokens]"""
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def _converted(
    root: int, draft: SuffixDecodingDraft, depths: Sequence[int], given_noise: ProbGivenNoise
) -> TokenTree:
    """Return a draft as a token tree whose probabilities rise with the length of the match.

    A draft's path probability of a token is its share of the matches. The end of the request's
    tokens counts as an occurrence without a continuation, so that the shares of the root's children
    after n matches sum to n / (n + 1)."""
    total = sum(prob for prob, parent in zip(draft.probs, draft.parents, strict=True) if parent < 0)
    num_matches = min(total / (1.0 - total), MAX_MATCHES) if total < 1.0 else MAX_MATCHES
    shares = [total, *draft.probs]
    path_probs = [1.0]
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True), 1):
        # One match of one token gives a child of the root evidence 1, hence confidence 0.5.
        evidence = draft.match_len + num_matches + depths[node] - 2.0
        prob = min(shares[node] / shares[parent + 1], 1.0) * (
            1.0 - 1.0 / (1.0 + max(evidence, 0.0))
        )
        path_probs.append(path_probs[parent + 1] * given_noise(prob, depths[node], token))
    return TokenTree(
        np.array([root, *draft.token_ids]),
        np.array([-1, *(parent + 1 for parent in draft.parents)]),
        np.array(depths),
        np.array(path_probs),
    )


class SuffixMethod(DraftMethod):
    """Drafting method ``"suffix"``; see :class:`SuffixDrafter`."""

    kind = "suffix trees"

    def __init__(self, past: PastAnswers | None = None):
        """Make the one drafter that all engines share; see :class:`SuffixDrafter`."""
        self._drafter = SuffixDrafter(past)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return self._drafter
