"""Drafters that users write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree

# Attributes of Drafter that a user's object may leave out
OPTIONAL = {name for name in vars(Drafter) if not name.startswith("_")} - {
    "draft",
    "feature_layers",
}


class UserDrafter(Drafter):
    """Wrapper that adds the default methods of :class:`Drafter` to a user's object, which need not
    inherit from it.
    """

    def __init__(self, drafter: Drafter, keeps_rng: bool):
        """Wrap a user's object. ``keeps_rng``: restore torch's global random generator after
        drafting, as the target samples from it.
        """
        self._drafter = drafter
        self._keeps_rng = keeps_rng

    def __getattribute__(self, name: str) -> Any:
        if name in OPTIONAL and hasattr(self._drafter, name):
            return getattr(self._drafter, name)
        return super().__getattribute__(name)

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        with torch.random.fork_rng(enabled=self._keeps_rng):
            return self._drafter.draft(requests, plan)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(getattr(self._drafter, "feature_layers", ()))


@dataclass(frozen=True, repr=False)
class UserMethod(DraftMethod):
    """Method that drafts with an object that the user wrote."""

    drafter: Drafter

    kind = "drafter of your own"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(
            getattr(self.drafter, "feature_layers", ())
        )  # the object need not be a Drafter

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return UserDrafter(self.drafter, room.keeps_rng)
