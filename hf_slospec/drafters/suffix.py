"""Drafting from suffix trees of the request's tokens and, if that is allowed, of other requests' outputs."""

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
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need
from hf_slospec.models.packed.model import PackedModel

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

TREE_DEPTH = 64  # depth of suffix trees: tokens of context and continuation together
MIN_PATH_PROB = 0.02  # share of the matches; rarer continuations are not proposed
MAX_MATCHES = 8.0  # further matches add no confidence
ANY_LENGTH = 1e6  # limit of continuation per matched token; trees are limited by their probabilities instead
TEXT, READER = 0, -1  # keys in suffix caches: a request's own tokens, and a request that only reads shared outputs


def _suffix_decoding() -> ModuleType:
    """Return the module that has the suffix trees."""
    need("suffix", "the drafter suffix")
    return import_module("arctic_inference.suffix_decoding")


def _new_cache(max_outputs: int) -> SuffixDecodingCache:
    """Return an empty cache that shares at most ``max_outputs`` outputs between requests; -1: all."""
    cache: SuffixDecodingCache = _suffix_decoding().SuffixDecodingCache(TREE_DEPTH, max_outputs)
    return cache


@dataclass(eq=False)
class _RequestTree:
    """Suffix tree of one request's prompt and output."""

    cache: SuffixDecodingCache
    num_tokens: int = 0
    tail: list[int] = field(default_factory=list)  # the last TREE_DEPTH of these tokens

    @classmethod
    def new(cls) -> _RequestTree:
        """Return an empty tree."""
        cache = _new_cache(0)
        cache.start_request(TEXT, [])
        return cls(cache)

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Return whether these tokens begin with the tree's, compared by the last ``TREE_DEPTH`` ones."""
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
    """Outputs of requests, in one suffix tree per salt; the oldest are evicted if there are too many."""

    def __init__(self, max_texts: int, max_tokens: int):
        self.max_texts, self.max_tokens = max_texts, max_tokens
        self._caches: dict[str, SuffixDecodingCache] = {}  # by salt
        self._kept: dict[int, tuple[str, int]] = {}  # salt and number of tokens by key, the oldest first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, salt: str, key: int, tokens: list[int]) -> None:
        """Append tokens to the output of this key, or begin an output with them."""
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
        """End the output of this key, if it is still kept."""
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
        if len(cache.cached_requests) == 1:  # only the reader is left
            del self._caches[salt]

    def continuations(self, salt: str, context: list[int], max_nodes: int) -> SuffixDecodingDraft:
        """Return the tree of continuations of a context in the outputs of a salt."""
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
    parent's occurrences, times a confidence that rises with the matched tokens and the number of matches. If the noise
    of a sampled request is known, it is the probability given that noise.

    A request's prompt and output are searched. With ``shares_texts``, so are the outputs of other requests with the
    same ``cache_salt``, running ones included, for agents and rollouts that repeat each other's outputs. Times and
    acceptance then leak information about these outputs to all requests with that salt.
    """

    def __init__(self, *, shares_texts: bool = False, max_texts: int = 1000, max_tokens: int = 1_000_000):
        """Set the limits of shared outputs; a token takes about 400 bytes.

        Args:
            shares_texts: draft from other requests' outputs, too.
            max_texts: maximum number of shared outputs, those of running requests included; the oldest are evicted.
            max_tokens: maximum number of tokens of all shared outputs together.

        Raises:
            MissingExtraError: arctic-inference is not installed.
            InvalidInputError: a bound is below 1.
        """
        if min(max_texts, max_tokens) < 1:
            raise InvalidInputError(f"max_texts and max_tokens must be at least 1, got {max_texts} and {max_tokens}")
        _new_cache(0)  # raises at once if the package is missing
        self.shares_texts = shares_texts
        self._trees: WeakKeyDictionary[Request, _RequestTree] = WeakKeyDictionary()
        self._outputs: WeakKeyDictionary[Request, _Output] = WeakKeyDictionary()
        self._shared = _SharedOutputs(max_texts, max_tokens)
        self._keys = itertools.count()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all suffix trees."""
        with self._lock:
            return sum(tree.num_tokens for tree in self._trees.values()) + self._shared.num_tokens

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with self._lock:
            drafts = [self._continuations(request, plan) for request in requests]
        proposed = [_trees(request, plan, per_tree) for request, per_tree in zip(requests, drafts, strict=True)]
        forests = [Forest.of(trees) for trees in zip(*proposed, strict=True)]
        conditionals = [Conditionals.of(forest).probs for forest in forests]
        return merge_forests(forests, conditionals, plan.depth * plan.width)

    def release(self, request: Request) -> None:
        """Drop the suffix tree of a request; keep its shared output unless the request failed."""
        with self._lock:
            if self._trees.pop(request, None) is None or not self.shares_texts:
                return
            self._append_output(request)
            if request.error is None:
                self._shared.end(self._outputs[request].key)
            else:
                self._shared.drop(self._outputs[request].key)

    def _continuations(self, request: Request, plan: Plan) -> list[SuffixDecodingDraft]:
        """Return the continuations of a request's last tokens in its own tree and, if shared, in other outputs."""
        tokens = request.tokens
        tree = self._trees.get(request)
        if tree is None or not tree.is_prefix_of(tokens):  # new, seen again after release, or rolled back
            tree = self._trees[request] = _RequestTree.new()
            if request in self._outputs:
                self._shared.drop(self._outputs.pop(request).key)
        tree.append(tokens[tree.num_tokens :])
        context, max_nodes = tokens[-TREE_DEPTH:], plan.depth * plan.width
        drafts = [_speculated(tree.cache, TEXT, context, max_nodes)]
        if self.shares_texts:
            self._append_output(request)
            drafts.append(self._shared.continuations(request.params.cache_salt, context, max_nodes))
        return drafts

    def _append_output(self, request: Request) -> None:
        """Append new tokens of a request to its shared output."""
        output = self._outputs.get(request) or _Output(next(self._keys))
        new = request.tokens[request.prompt_len + output.num_tokens :]
        self._outputs[request] = output
        self._shared.append(request.params.cache_salt, output.key, new)
        output.num_tokens += len(new)


def _trees(request: Request, plan: Plan, drafts: Sequence[SuffixDecodingDraft]) -> list[TokenTree]:
    """Return a request's drafts as token trees of the planned depth at most."""
    depths = [_depths(draft) for draft in drafts]
    levels: list[set[int]] = [set() for _ in range(min(plan.depth, max(map(max, depths))))]
    for draft, token_depths in zip(drafts, depths, strict=True):
        for token, depth in zip(draft.token_ids, token_depths[1:], strict=True):
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
    """Return a draft as a token tree, with probabilities that rise with the match's length.

    The draft's probability of a token is its share of its parent's occurrences. The end of the request's tokens counts
    as an occurrence without a continuation, so that the shares after n matches sum to n / (n + 1).
    """
    total = sum(prob for prob, parent in zip(draft.probs, draft.parents, strict=True) if parent < 0)
    num_matches = min(total / (1.0 - total), MAX_MATCHES) if total < 1.0 else MAX_MATCHES
    shares, path_probs = [total, *draft.probs], [1.0]
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True), 1):
        evidence = draft.match_len + num_matches + depths[node] - 2.0  # 1 match of 1 token, at depth 1: 0.5
        prob = min(shares[node] / shares[parent + 1], 1.0) * (1.0 - 1.0 / (1.0 + max(evidence, 0.0)))
        path_probs.append(path_probs[parent + 1] * noise.given(prob, depths[node], token))
    return TokenTree(
        np.array([root, *draft.token_ids]),
        np.array([-1, *(parent + 1 for parent in draft.parents)]),
        np.array(depths),
        np.array(path_probs),
    )


class SuffixMethod(DraftMethod):
    """Suffix trees of the request's tokens and, if that is allowed, of other requests' outputs."""

    @property
    def kind(self) -> str:
        return "suffix trees"

    def __init__(self, shares_texts: bool = False):
        """Make the trees, which all engines share; see :class:`SuffixDrafter`."""
        self._drafter = SuffixDrafter(shares_texts=shares_texts)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return self._drafter
