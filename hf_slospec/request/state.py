"""State, cached-token counts and statistics of a request, and its progress, with which another
engine can resume it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from hf_slospec.engine.events import Commit, PhaseTimes

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestState(StrEnum):
    """State of a request. All states but ``UNFINISHED`` are final and have the names of public
    finish reasons.

    Whether an unfinished request prefills or decodes follows from its cached tokens, see
    ``Request.is_decoding``.
    """

    UNFINISHED = "unfinished"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Progress:
    """Output so far of a request, from which another engine can continue it."""

    tokens: list[int]  # new tokens
    elapsed_s: float = 0.0  # seconds since the request arrived
    decoding_s: float = 0.0  # seconds since its first token
    drafted: int = 0  # nodes verified, roots excluded
    acceptance_histogram: Sequence[int] = ()  # decode steps that accepted 0, 1, ... draft nodes
    has_missed: bool = False  # a finished stage missed its SLO
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage


@dataclass
class RequestKV:
    """Numbers of a request's tokens that the models have processed.

    The engine sets them in every step; a ``generate`` call with a given cache sets ``num_cached``
    before the first step.
    """

    num_cached: int = 0  # tokens whose K/V the target holds
    num_draft_seen: int = 0  # tokens that the drafter has processed
    num_reused: int = 0  # prompt tokens whose K/V was reused from another request


@dataclass
class RequestStats:
    """Times and counts of a request. :class:`Request` updates them, except that the scheduler
    counts preemptions and sets ``entered_s``.
    """

    arrived_s: float  # times are on the engine's clock
    entered_s: float | None = None  # got its first K/V slots; None before, and in a static batch
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_resumed: int = 0  # new tokens that another engine had committed
    num_preempted: int = 0
    num_drafted: int = 0  # nodes verified, roots excluded
    # Number of decode steps that accepted 0, 1, ... draft nodes.
    acceptance_histogram: list[int] = field(default_factory=list)
    expected_tokens: float = 0.0  # tokens that the policy predicted, summed over decode steps
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # summed over steps
    commits: list[Commit] = field(default_factory=list)  # one per step that committed tokens
    stage: int = 0  # index of the current stage
    # Time from which the current stage counts, and new tokens until then; None: no token yet.
    stage_begin: tuple[float, int] | None = None
    has_missed: bool = False  # a finished stage missed its SLO
    first_open: int = 0  # index of the commit that begins the oldest open window of ten tokens
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage

    @property
    def num_steps(self) -> int:
        """Number of decode steps; steps that prefill the request are not counted."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft nodes."""
        return sum(number * count for number, count in enumerate(self.acceptance_histogram))
