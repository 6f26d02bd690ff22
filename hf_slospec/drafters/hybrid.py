"""Drafting by several drafters, whose trees are merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import numpy as np

from hf_slospec.algo.acceptance import Acceptance, Prediction
from hf_slospec.algo.latency_curves import ForwardCost
from hf_slospec.algo.merge import merge_forests
from hf_slospec.algo.tree import ROOT, FloatArray, Forest, IntArray, TokenTree
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.models.packed.model import PackedModel

WARM_TREES, BATCH_TREES = 24, 16  # after the former, trees are learned from together: numpy takes as long for one
CONFIDENT = 0.75  # share of the planned depth; later drafters are skipped if one expects it to be accepted


class _Source:
    """One drafter with statistics of its acceptance."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.acceptance = drafter, Acceptance()
        self._num_learned = 0  # trees
        self._trees = list[tuple[ref[Request], TokenTree, int]]()  # not learned from yet; with the text's length before

    def expect(self, requests: Sequence[Request], trees: Mapping[Request, TokenTree]) -> Prediction:
        """Return the predicted acceptance of the trees, and keep them for :meth:`learn`.

        ``trees`` lacks requests for which the drafter was skipped.
        """
        self._trees += [(ref(request), tree, len(request.tokens)) for request, tree in trees.items() if tree.max_depth]
        forest = Forest.of([trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests])
        return self.acceptance.predict(requests, forest)

    def learn(self, at_once: bool = False) -> None:
        """Learn from the tokens that were committed since the trees, once these are many or ``at_once``.

        A node counts, verified or not, if the path to its parent was committed and a token after that is known.
        """
        if self._num_learned >= WARM_TREES and len(self._trees) < BATCH_TREES and not at_once:
            return
        pending, self._trees = ((kept(), tree, begin) for kept, tree, begin in self._trees), []
        followed = [
            (request, tree, begin) for request, tree, begin in pending if request and begin < len(request.tokens)
        ]
        if not followed:
            return
        self._num_learned += len(followed)
        requests, forest = [request for request, _, _ in followed], Forest.of([tree for _, tree, _ in followed])
        is_decided, committed = np.ones(len(forest.depths), dtype=np.bool_), list[int]()
        for start, (request, tree, begin) in zip(forest.starts.tolist(), followed, strict=True):
            tokens = request.tokens[begin : begin + tree.max_depth + 1]
            path = _path(tree, tokens)
            committed += [start + node for node in path]
            if len(path) == len(tokens):  # the token after the path is not known
                is_decided[start + np.flatnonzero(tree.parents == path[-1])] = False
        prediction = self.acceptance.predict(requests, forest)
        self.acceptance.observe(requests, prediction, is_decided, np.array(committed, dtype=np.int64))


def _path(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Return the nodes below the root along these tokens, as far as the tree has them."""
    path, node = list[int](), tree.child(ROOT, tokens[0])
    while node is not None:
        path.append(node)
        node = tree.child(node, tokens[len(path)]) if len(path) < len(tokens) else None
    return path


class HybridDrafter(Drafter):
    """Merges the trees of several drafters: cheap ones first (prompt lookup, suffix trees), then a model.

    Acceptance is learned for each drafter separately, from the tokens that requests continue with, by drawing and
    request as policies do, so that the drafters' probabilities can be compared. The merged tree holds the nodes of the
    highest probability. If a drafter expects ``confident`` of the planned depth to be accepted, the later ones are
    skipped for that request.
    """

    def __init__(self, drafters: Sequence[Drafter], confident: float = CONFIDENT, max_model_depth: int | None = None):
        """Set the drafters in the order in which they draft.

        Args:
            drafters: at least one; the last is the model.
            confident: share of the planned depth, above 0; above 1: all drafters draft for every request.
            max_model_depth: greatest depth of the last drafter's trees; None: as planned.
        """
        if not drafters:
            raise InvalidInputError("drafters must name at least one drafter")
        self._sources = [_Source(drafter) for drafter in drafters]
        self.confident, self.max_model_depth = confident, max_model_depth
        self._lock = threading.Lock()

    @property
    def num_one_off_forwards(self) -> int:
        return sum(source.drafter.num_one_off_forwards for source in self._sources)

    @property
    def num_feature_bytes(self) -> int:
        return sum(source.drafter.num_feature_bytes for source in self._sources)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with self._lock:
            for source in self._sources:
                source.learn()
        predictions, open_requests = list[Prediction](), list(requests)
        for source in self._sources:
            source_plan = self._model_plan(plan) if source is self._sources[-1] else plan
            trees = source.drafter.draft(open_requests, source_plan) if open_requests else ()
            with self._lock:
                predictions.append(source.expect(requests, dict(zip(open_requests, trees, strict=True))))
            expected = dict(zip(requests, _expected_depths(predictions[-1]).tolist(), strict=True))
            open_requests = [r for r in open_requests if expected[r] < self.confident * plan.depth]
        return merge_forests(
            [prediction.forest for prediction in predictions],
            [np.where(one.forest.path_probs > 0.0, one.calibrated, 0.0) for one in predictions],
            plan.depth * plan.width,
        )

    def reuse(self, request: Request) -> int:
        return max(source.drafter.reuse(request) for source in self._sources)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return next((reader.feature_layers for reader in self._readers), ())

    def take_features(self, request: Request, begin: int, features: Any) -> None:
        for reader in self._readers:
            reader.take_features(request, begin, features)

    @property
    def num_successors(self) -> int:
        return max(source.drafter.num_successors for source in self._sources)

    def take_successors(
        self, request: Request, begin: int, tree: TokenTree, successors: IntArray, probs: FloatArray
    ) -> None:
        for source in self._sources:
            if number := source.drafter.num_successors:
                source.drafter.take_successors(request, begin, tree, successors[:, :number], probs[:, :number])

    def read_kv_of(self, sequences: Any) -> None:
        for source in self._sources:
            source.drafter.read_kv_of(sequences)

    @property
    def _readers(self) -> list[Drafter]:
        return [source.drafter for source in self._sources if source.drafter.feature_layers]

    def release(self, request: Request) -> None:
        for source in self._sources:
            with self._lock:
                source.learn(at_once=True)
            source.drafter.release(request)

    def relieve(self) -> bool:
        has_freed = [source.drafter.relieve() for source in self._sources]
        return any(has_freed)

    def close(self) -> None:
        for source in self._sources:
            source.drafter.close()

    def _model_plan(self, plan: Plan) -> Plan:
        return plan if self.max_model_depth is None else replace(plan, depth=min(plan.depth, self.max_model_depth))


def _expected_depths(prediction: Prediction) -> FloatArray:
    """Return the expected accepted tokens of each tree.  -> [num_requests] f64"""
    return prediction.expected_tokens(np.ones(len(prediction.path_probs), dtype=np.bool_)) - 1.0


def model_before_last(kind: str) -> str:
    """Return the error message for a hybrid with a model before its last part."""
    return (
        f"the drafter {kind} has a model before its last part; at most one part may have a model, and it is written "
        "last, as in 'lookup+org/draft'"
    )


@dataclass(frozen=True, repr=False)
class HybridMethod(DraftMethod):
    """Several methods, whose candidate trees are merged: cheap ones first; only the last may have a model."""

    methods: Sequence[DraftMethod]

    def __post_init__(self) -> None:
        if any(method.model is not None or method.feature_layers for method in self.methods[:-1]):
            raise InvalidInputError(model_before_last(self.kind))

    @property
    def kind(self) -> str:
        return " + ".join(method.kind for method in self.methods)

    @property
    def model(self) -> Any | None:
        return self.methods[-1].model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.methods[-1].feature_layers

    def check(self, target: Any) -> None:
        for method in self.methods:
            method.check(target)

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        return self.methods[-1].measure_level(target, limit_s)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return HybridDrafter([method.new_drafter(draft, room) for method in self.methods])
