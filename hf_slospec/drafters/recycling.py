"""Drafting from the tokens that the target found probable in earlier steps (Token Recycling)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.best_first import Candidates, grown_tree
from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree
from hf_slospec.drafters.foreseen import ForeseenNoise
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.packed.model import PackedModel

NUM_SUCCESSORS = int(os.environ.get("K", 8))
MIN_PROB = float(os.environ.get("MINP", 0.01))
MAX_ENTRIES = 16384
TRUST = float(os.environ.get("TRUST", 1.0))
POW = float(os.environ.get("POW", 1.0))
BIGRAM = int(os.environ.get("BIGRAM", 0))
TRUST1 = float(os.environ.get("TRUST1", 1.0))
NONE: Candidates = ((), ())


class Successors:
    def __init__(self) -> None:
        self._of: dict[int | tuple[int, int], Candidates] = {}

    def record(self, above: int, tree: TokenTree, successors: IntArray, probs: FloatArray) -> None:
        probs = TRUST * probs**POW
        parents = tree.tokens[tree.parents].tolist()
        parents[0] = above
        rows = zip(parents, tree.tokens.tolist(), successors.tolist(), probs.tolist(), (probs >= MIN_PROB).sum(axis=1).tolist())
        for a, token, ids, ps, n in reversed(list(rows)):
            e = ids[:n], ps[:n]
            self._of[token] = e
            if BIGRAM:
                self._of[a, token] = e

    def after(self, depth: int, above: int, token: int) -> Candidates:
        if BIGRAM:
            e = self._of.get((above, token))
            if e is None:
                e = self._of.get(token)
                if e is not None:
                    e = e[0], [TRUST1 * p for p in e[1]]
            return e or NONE
        return self._of.get(token) or NONE


class RecyclingDrafter(Drafter):
    def __init__(self, shares_texts: bool = False):
        self._own: WeakKeyDictionary[Request, Successors] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def num_successors(self) -> int:
        return NUM_SUCCESSORS

    def take_successors(self, request: Request, tree: TokenTree, successors: IntArray, probs: FloatArray) -> None:
        with self._lock:
            m = self._own.setdefault(request, Successors())
            m.record(request.tokens[-2] if len(request.tokens) > 1 else -1, tree, successors, probs)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with self._lock:
            return [self._tree(r, plan) for r in requests]

    def _tree(self, request: Request, plan: Plan) -> TokenTree:
        m = self._own.get(request)
        if m is None:
            return TokenTree.root_only(request.tokens[-1])
        return grown_tree(request.tokens[-2] if len(request.tokens) > 1 else -1, request.tokens[-1], m.after, plan.depth, plan.depth * plan.width)

    def release(self, request: Request) -> None:
        self._own.pop(request, None)


class RecyclingMethod(DraftMethod):
    def __init__(self, shares_texts: bool = False):
        self._drafter = RecyclingDrafter(shares_texts)

    @property
    def kind(self) -> str:
        return "token recycling"

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return self._drafter
