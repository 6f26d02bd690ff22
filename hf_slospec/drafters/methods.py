"""Base classes of drafting methods, which create a drafter for each engine, and of drafters that
run a network in packed forwards. The interface ``Drafter`` is in ``engine/interfaces.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_slospec.engine.interfaces import Drafter
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.sequences import Sequences
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree


class Room(NamedTuple):
    """Resources that one engine gives its drafter."""

    max_nodes: int  # maximum nodes of one request's draft tree
    vocab_size: int  # size of the target's vocabulary
    max_slots: int | None = None  # K/V slots of all requests and kept prefixes; None: no limit
    max_kept: float | None = None  # maximum tokens of kept prefixes; see :class:`Sequences`
    # Drafting must restore torch's global random generator, as the target samples from it
    keeps_rng: bool = True


def with_roots(requests: Sequence[Request], trees: Mapping[Request, TokenTree]) -> list[TokenTree]:
    """Return the tree of each request; a request without one gets a tree of only its root."""
    return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]


class PackedDrafter(Drafter):
    """Base class of drafters whose network caches K/V of requests, and runs in packed forwards."""

    def __init__(self, packed: PackedModel, room: Room, min_nodes: int = 0):
        """Create a drafter without requests, with K/V slots for at least ``min_nodes`` nodes of
        each.
        """
        self.packed = packed
        self.vocab_size = room.vocab_size
        self.sequences = Sequences(
            packed, max(room.max_nodes, min_nodes), room.max_slots, room.max_kept
        )

    @property
    def num_one_off_forwards(self) -> int:
        return self.packed.num_one_off_forwards

    def release(self, request: Request) -> None:
        self.sequences.release(request)

    def relieve(self) -> bool:
        """Free the K/V of all requests, which can be recomputed; return whether there was any."""
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        self.sequences.close()


class DraftMethod:
    """Drafting method for one target, as :func:`load_drafter` returns it.

    It is passed as ``drafter=``, and may serve several engines at once: each gets a drafter from
    ``new_drafter``.
    """

    @property
    def kind(self) -> str:
        """Name of the method, for logs and error messages."""
        raise NotImplementedError

    @property
    def model(self) -> Any | None:
        """Network that drafts in packed forwards; None: there is none."""
        return None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the drafter reads, numbered as in
        ``output_hidden_states``.
        """
        return ()

    def check(self, target: Any) -> None:
        """Raise IncompatibleDraftError if the method cannot draft for this target on the target's
        present device and in its dtype.
        """

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        """Measure the time of one draft level if another network than ``model`` drafts; return None
        if there is none.

        The caller must hold the target's lock.
        """
        return None

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        """Return a new drafter for one engine; ``draft`` runs packed forwards of ``model``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<hf_slospec drafter: {self.kind}>"
