"""Drafting from suffix trees of the request's own text, and of other requests' outputs where that is allowed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Conditionals
from hf_slospec.algo.merge import merge_forests
from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.drafters.foreseen import ForeseenNoise
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

TREE_DEPTH = 64  # tokens of context and continuation together that a suffix tree tells apart
MIN_PATH_PROB = 0.02  # continuations of a smaller share of the matches are left out
MAX_MATCHES = 8.0  # matches beyond these add no confidence
ANY_LENGTH = 1e6  # a continuation may be any times longer than its match; trees are cut by their probabilities
TEXT, READER = 0, -1  # keys in suffix caches: of a request's own text, and of one that only reads others' texts


def _suffix_decoding() -> ModuleType:
    """Return the module that has the suffix trees."""
    need("suffix", "the drafter suffix")
    return import_module("arctic_inference.suffix_decoding")


def _new_cache(max_outputs: int) -> SuffixDecodingCache:
    """Return an empty cache that lets so many outputs be found by other requests; -1: all."""
    cache: SuffixDecodingCache = _suffix_decoding().SuffixDecodingCache(TREE_DEPTH, max_outputs)
    return cache


@dataclass(eq=False)
class _OwnText:
    """Suffix tree of one request's prompt and output."""

    cache: SuffixDecodingCache
    num_tokens: int = 0
    tail: list[int] = field(default_factory=list)  # the last of these tokens

    @classmethod
    def new(cls) -> _OwnText:
        """Return an empty text."""
        cache = _new_cache(0)
        cache.start_request(TEXT, [])
        return cls(cache)

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Return whether these tokens begin with the text, as far as its tail tells."""
        return self.tail == tokens[self.num_tokens - len(self.tail) : self.num_tokens]

    def append(self, tokens: list[int]) -> None:
        """Append new tokens."""
        self.cache.add_active_response(TEXT, tokens)
        self.num_tokens += len(tokens)
        self.tail = [*self.tail, *tokens][-TREE_DEPTH:]


@dataclass(eq=False)
class _Output:
    """One request's output among the shared ones."""

    key: int
    num_tokens: int = 0  # output tokens appended so far


class _SharedOutputs:
    """Outputs of requests in one suffix tree per salt; beyond the bounds the oldest are dropped."""

    def __init__(self, max_texts: int, max_tokens: int):
        self.max_texts, self.max_tokens = max_texts, max_tokens
        self._caches: dict[str, SuffixDecodingCache] = {}  # by salt
        self._kept: dict[int, tuple[str, int]] = {}  # salt and tokens by key, the oldest first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, salt: str, key: int, tokens: list[int]) -> None:
        """Append tokens to the output of this key; one that was dropped begins with them."""
        if not tokens:
            return
        if key not in self._kept:
            if salt not in self._caches:
                self._caches[salt] = _new_cache(-1)
                self._caches[salt].start_request(READER, [])
            self._caches[salt].start_request(key, [])
        self._caches[salt].add_active_response(key, tokens)
        self._kept[key] = salt, self._kept.get(key, (salt, 0))[1] + len(tokens)
        self.num_tokens += len(tokens)
        while len(self._kept) > self.max_texts or self.num_tokens > self.max_tokens:
            self.drop(next(iter(self._kept)))

    def end(self, key: int) -> None:
        """Keep the output of this key, if it was not dropped, as complete."""
        if key in self._kept:
            self._caches[self._kept[key][0]].stop_request(key)

    def drop(self, key: int) -> None:
        """Drop the output of this key, if it is kept."""
        if key not in self._kept:
            return
        salt, num_tokens = self._kept.pop(key)
        cache = self._caches[salt]
        if key in cache.active_requests:
            cache.stop_request(key)
        cache.evict_cached_response(key)
        self.num_tokens -= num_tokens
        if len(cache.cached_requests) == 1:  # the reader
            del self._caches[salt]

    def continuations(self, salt: str, context: list[int], max_nodes: int) -> SuffixDecodingDraft:
        """Return the tree that follows a context in the outputs of a salt."""
        if salt not in self._caches:
            empty: SuffixDecodingDraft = _suffix_decoding().SuffixDecodingDraft()
            return empty
        return _speculated(self._caches[salt], READER, context, max_nodes)


def _speculated(cache: SuffixDecodingCache, key: int, context: list[int], max_nodes: int) -> SuffixDecodingDraft:
    return cache.speculate(key, context, max_nodes, ANY_LENGTH, 0.0, MIN_PATH_PROB, use_tree_spec=True)


class SuffixDrafter(Drafter):
    """Suffix decoding: continuations of earlier occurrences of the last tokens.

    Suffix trees of Snowflake's ``arctic-inference`` count what followed every earlier occurrence of up to
    ``TREE_DEPTH`` last tokens (SuffixDecoding, arXiv 2411.04975). A child's conditional probability is its share of its
    parent's occurrences, times a confidence that rises with the matched tokens and the number of matches. Where the
    noise of a sampled request is known, it is the probability given that noise.

    A request's prompt and output are searched. With ``shares_texts``, so are the outputs of other requests with the
    same ``cache_salt``, running ones too. That helps where requests repeat each other's outputs, as agents and
    rollouts do. Times and acceptance then tell one request about outputs of others of its salt.
    """

    def __init__(self, *, shares_texts: bool = False, max_texts: int = 1000, max_tokens: int = 1_000_000):
        """Set the bounds of what is kept of other requests; a token takes about 400 bytes.

        Args:
            shares_texts: draft from other requests' outputs, too.
            max_texts: outputs kept at most, those of running requests included; the oldest are dropped.
            max_tokens: their tokens at most, all together.

        Raises:
            MissingExtraError: arctic-inference is not installed.
            InvalidInputError: a bound is below 1.
        """
        if min(max_texts, max_tokens) < 1:
            raise InvalidInputError(f"max_texts and max_tokens must be at least 1, got {max_texts} and {max_tokens}")
        _new_cache(0)  # raises at once if the package is missing
        self.shares_texts = shares_texts
        self._own: WeakKeyDictionary[Request, _OwnText] = WeakKeyDictionary()
        self._outputs: WeakKeyDictionary[Request, _Output] = WeakKeyDictionary()
        self._shared = _SharedOutputs(max_texts, max_tokens)
        self._keys = itertools.count()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens in suffix trees: the texts of requests in progress, and shared outputs."""
        with self._lock:
            return sum(own.num_tokens for own in self._own.values()) + self._shared.num_tokens

    @property
    def num_texts(self) -> int:
        """Shared outputs."""
        with self._lock:
            return len(self._shared)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with self._lock:
            found = [self._continuations(request, plan) for request in requests]
        proposed = [_trees(request, plan, drafts) for request, drafts in zip(requests, found, strict=True)]
        forests = [Forest.of(trees) for trees in zip(*proposed, strict=True)]
        conditionals = [Conditionals.of(forest).probs for forest in forests]
        return merge_forests(forests, conditionals, plan.depth * plan.width)

    def release(self, request: Request) -> None:
        """Drop the text of a request, but keep its output among the shared ones, unless it failed."""
        with self._lock:
            if self._own.pop(request, None) is None or not self.shares_texts:
                return
            self._append_output(request)
            if request.error is None:
                self._shared.end(self._outputs[request].key)
            else:
                self._shared.drop(self._outputs[request].key)

    def clear(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._own.clear()
            self._outputs.clear()
            self._shared = _SharedOutputs(self._shared.max_texts, self._shared.max_tokens)

    def _continuations(self, request: Request, plan: Plan) -> list[SuffixDecodingDraft]:
        tokens = request.tokens
        own = self._own.get(request)
        if own is None or not own.is_prefix_of(tokens):  # new, seen again after release, or rolled back
            own = self._own[request] = _OwnText.new()
            if request in self._outputs:
                self._shared.drop(self._outputs.pop(request).key)
        own.append(tokens[own.num_tokens :])
        context, max_nodes = tokens[-TREE_DEPTH:], plan.depth * plan.width
        drafts = [_speculated(own.cache, TEXT, context, max_nodes)]
        if self.shares_texts:
            self._append_output(request)
            drafts.append(self._shared.continuations(request.cache_salt, context, max_nodes))
        return drafts

    def _append_output(self, request: Request) -> None:
        """Append the tokens that the shared output of a request lacks."""
        output = self._outputs.get(request) or _Output(next(self._keys))
        new = request.tokens[request.prompt_len + output.num_tokens :]
        self._outputs[request] = output
        self._shared.append(request.cache_salt, output.key, new)
        output.num_tokens += len(new)


def _trees(request: Request, plan: Plan, drafts: Sequence[SuffixDecodingDraft]) -> list[TokenTree]:
    """Return the token trees of a request's drafts, no deeper than planned."""
    depths = [_depths(draft) for draft in drafts]
    levels: list[set[int]] = [set() for _ in range(min(plan.depth, max(map(max, depths))))]
    for draft, own in zip(drafts, depths, strict=True):
        for token, depth in zip(draft.token_ids, own[1:], strict=True):
            if depth <= plan.depth:
                levels[depth - 1].add(token)
    noise, root = ForeseenNoise(request, levels), request.tokens[-1]
    return [_converted(root, *pair, noise).up_to(plan.depth) for pair in zip(drafts, depths, strict=True)]


def _depths(draft: SuffixDecodingDraft) -> list[int]:
    """Return the depths of a draft's root and tokens.  -> [1 + num_tokens]"""
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def _converted(root: int, draft: SuffixDecodingDraft, depths: Sequence[int], noise: ForeseenNoise) -> TokenTree:
    """Return the token tree of a draft, with probabilities that take the match's length into account.

    The draft's probability of a token is its share of its parent's occurrences. Where the text itself ends with the
    match, that end counts as an occurrence without a continuation: n matches leave shares that sum to n / (n + 1).
    """
    total = sum(prob for prob, parent in zip(draft.probs, draft.parents, strict=True) if parent < 0)
    num_matches = min(total / (1.0 - total), MAX_MATCHES) if total < 1.0 else MAX_MATCHES
    shares, path_probs = [total, *draft.probs], [1.0]
    for place, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True), 1):
        evidence = draft.match_len + num_matches + depths[place] - 2.0  # 1 match of 1 token, at depth 1: as 0.5
        prob = min(shares[place] / shares[parent + 1], 1.0) * (1.0 - 1.0 / (1.0 + max(evidence, 0.0)))
        path_probs.append(path_probs[parent + 1] * noise.given(prob, depths[place], token))
    return TokenTree(
        np.array([root, *draft.token_ids]),
        np.array([-1, *(parent + 1 for parent in draft.parents)]),
        np.array(depths),
        np.array(path_probs),
    )
