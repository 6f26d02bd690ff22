"""Hybrid drafters, which merge the trees of several drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_slospec.drafters.methods import DraftMethod, Room, with_roots
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.errors import InvalidInputError
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import Request
from hf_slospec.tree.merge import merge_trees
from hf_slospec.tree.tree import TokenTree

# If a drafter expects this share of the planned depth to be accepted, later ones are skipped
CONFIDENT = 0.75


class HybridDrafter(Drafter):
    """Drafter that asks several drafters for each request, and merges their trees.

    A merged tree holds the nodes with the highest path probabilities. If only one drafter proposes
    anything, its tree stays as it is. If a drafter expects ``CONFIDENT`` of the planned depth to be
    accepted, the later drafters are skipped for that request.
    """

    def __init__(self, drafters: Sequence[Drafter]):
        """Set the drafters in the order in which they are asked; only the last may have a model or
        read features.
        """
        self._drafters = drafters
        self._last = drafters[-1]

    @property
    def num_one_off_forwards(self) -> int:
        return self._last.num_one_off_forwards

    @property
    def num_feature_bytes(self) -> int:
        return self._last.num_feature_bytes

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._last.feature_layers

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        proposed: dict[Request, list[TokenTree]] = {request: [] for request in requests}
        asking = list(requests)
        for drafter in self._drafters:
            if not asking:
                break
            drafted = list(zip(asking, drafter.draft(asking, plan), strict=True))
            for request, tree in drafted:
                if tree.num_nodes > 1:
                    proposed[request].append(tree)
            enough = CONFIDENT * plan.depth
            asking = [request for request, tree in drafted if tree.path_probs.sum() - 1.0 < enough]
        merged = {request: trees[0] for request, trees in proposed.items() if trees}
        several = {request: trees for request, trees in proposed.items() if len(trees) > 1}
        if several:
            trees = merge_trees(list(several.values()), plan.depth * plan.width)
            merged |= zip(several, trees, strict=True)
        return with_roots(requests, merged)

    def reuse(self, request: Request) -> int:
        return self._last.reuse(request)

    def take_features(self, request: Request, begin: int, features: Any) -> None:
        self._last.take_features(request, begin, features)

    def read_kv_of(self, sequences: Any) -> None:
        self._last.read_kv_of(sequences)

    def release(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.release(request)

    def relieve(self) -> bool:
        return self._last.relieve()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def model_before_last(kind: str) -> str:
    """Return the error message for a hybrid with a model before its last part."""
    return (
        f"the drafter {kind} has a model before its last part; at most one part may have a model, and it is written "
        "last, as in 'lookup+org/draft'"
    )


@dataclass(frozen=True, repr=False)
class HybridMethod(DraftMethod):
    """Method that asks several methods in order, cheap ones first; only the last has a model."""

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
