"""Base of drafting methods, each of which makes a drafter for every engine; the methods are beside
their drafters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_slospec.engine.interfaces import Drafter
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.model.packed_model import PackedModel


class Room(NamedTuple):
    """Limits of one engine's drafter."""

    max_nodes: int  # tree nodes of one request per step
    vocab_size: int  # the target's
    max_slots: int | None = None  # K/V slots of all requests and kept prefixes; None: no limit
    max_kept: float | None = None  # tokens of kept prefixes; see :class:`Sequences`
    # Drafting must restore the global generator, as the target samples from it
    keeps_rng: bool = True


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
