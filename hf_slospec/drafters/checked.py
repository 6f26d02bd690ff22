"""Checks of the candidate trees that a user's own drafter returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.checked_policy import check_tree
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.models.packed.model import PackedModel

# Passed on to the user's drafter.
METHODS = ("release", "take_features", "read_kv_of", "reuse", "relieve", "close")


class CheckedDrafter(Drafter):
    """Wrapper of a user's drafter that checks candidate trees before they are verified."""

    def __init__(self, drafter: Drafter, vocab_size: int, keeps_rng: bool = True):
        """``keeps_rng``: restore the global generator after drafting, as the target samples from it."""
        self.drafter, self.vocab_size, self.keeps_rng = drafter, vocab_size, keeps_rng
        for name in METHODS:  # the object need not be a Drafter; methods that it lacks do nothing
            if hasattr(drafter, name):
                setattr(self, name, getattr(drafter, name))

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        with torch.random.fork_rng(enabled=self.keeps_rng):
            drafted = self.drafter.draft(requests, plan)
        if not isinstance(drafted, Iterable):
            raise InvalidInputError(f"drafter returned {type(drafted).__name__}; it must return TokenTree objects")
        trees = list(drafted)
        if len(trees) != len(requests):
            raise InvalidInputError(
                f"drafter returned {len(trees)} trees for {len(requests)} requests; it must return one for each"
            )
        for request, tree in zip(requests, trees, strict=True):
            self._check(request, tree, plan)
        return trees

    def _check(self, request: Request, tree: TokenTree, plan: Plan) -> None:
        check_tree("drafter", request, tree, self.vocab_size)
        if tree.max_depth > plan.depth or tree.num_nodes - 1 > plan.depth * plan.width:
            raise InvalidInputError(
                f"drafter returned a tree of {tree.num_nodes - 1} nodes, {tree.max_depth} deep, for a plan of depth "
                f"{plan.depth} and width {plan.width}; cut it to that depth and depth * width nodes below the root"
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.drafter, "feature_layers", ()))

    @property
    def num_one_off_forwards(self) -> int:
        return int(getattr(self.drafter, "num_one_off_forwards", 0))

    @property
    def num_feature_bytes(self) -> int:
        return int(getattr(self.drafter, "num_feature_bytes", 0))


@dataclass(frozen=True, repr=False)
class UserMethod(DraftMethod):
    """A drafter that the user wrote."""

    drafter: Drafter

    @property
    def kind(self) -> str:
        return "drafter of your own"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.drafter, "feature_layers", ()))  # the object need not be a Drafter

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return CheckedDrafter(self.drafter, room.vocab_size, room.keeps_rng)
