"""Bases of drafting methods, each of which makes a drafter for every engine, and of drafters that run
a network by packed forwards.
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
    """Limits of one engine's drafter."""

    max_nodes: int  # tree nodes of one request per step
    vocab_size: int  # the target's
    max_slots: int | None = None  # K/V slots of all requests and kept prefixes; None: no limit
    max_kept: float | None = None  # tokens of kept prefixes; see :class:`Sequences`
    # Drafting must restore the global generator, as the target samples from it
    keeps_rng: bool = True


def with_roots(requests: Sequence[Request], trees: Mapping[Request, TokenTree]) -> list[TokenTree]:
    """Return each request's tree; only its root where there is none."""
    return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]


class PackedDrafter(Drafter):
    """Drafter whose network caches K/V of requests in packed forwards."""

    def __init__(self, packed: PackedModel, room: Room, min_nodes: int = 0):
        """Make a drafter that has no requests yet; a forward stages at least ``min_nodes`` nodes."""
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
        """Free the K/V of all requests, which can be computed again; return whether any was freed."""
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        self.sequences.close()


class DraftMethod:
    """A drafting method for one target, as :func:`load_drafter` returns.

    It is passed as ``drafter=``, and may serve several engines at once.
    """

    @property
    def kind(self) -> str:
        """Name of the method."""
        raise NotImplementedError

    @property
    def model(self) -> Any | None:
        """The network that drafts by packed forwards; None: there is none."""
        return None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads, numbered as in ``output_hidden_states``."""
        return ()

    def check(self, target: Any) -> None:
        """Raise IncompatibleDraftError unless it can draft for this target on its present device,
        in its dtype.
        """

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        """Measure one level of drafting that ``model`` does not run; None if it takes only the
        host's time.

        The caller must hold the target's lock.
        """
        return None

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        """Return a drafter for one engine; ``draft`` has the packed forwards of ``model``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<hf_slospec drafter: {self.kind}>"
