"""State of a request: how it ended, and the counts and times of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from hf_slospec.engine.events import Commit, PhaseTimes

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestState(StrEnum):
    """State of a request. All but ``UNFINISHED`` are final, and named as the public finish reasons.

    Whether an unfinished request prefills or decodes follows from its K/V: ``Request.is_decoding``.
    """

    UNFINISHED = "unfinished"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Progress:
    """Output so far of a request, with which another engine can resume it."""

    tokens: list[int]  # new tokens
    elapsed_s: float = 0.0  # since the request arrived
    decoding_s: float = 0.0  # since its first token
    drafted: int = 0  # nodes verified, roots not counted
    acceptance_histogram: Sequence[int] = ()  # verify steps by committed drafted nodes
    has_missed: bool = False  # a finished stage missed its SLO
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage


@dataclass
class RequestKV:
    """Counts of a request's tokens that the models have processed.

    ``Engine.step`` writes them; a ``generate`` call that is given a cache writes ``num_cached``
    before the first step."""

    num_cached: int = 0  # tokens whose K/V the target holds
    num_draft_seen: int = 0  # tokens that the drafter has processed
    num_reused: int = 0  # tokens of the prompt whose K/V another request had computed


@dataclass
class RequestStats:
    """Times and counts of a request. :class:`Request` writes them; the scheduler counts preemptions
    and sets ``entered_s``.
    """

    arrived_s: float
    entered_s: float | None = None  # first K/V slots; None before, and in a static batch
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_resumed: int = 0  # new tokens that another engine had committed
    num_preempted: int = 0
    num_drafted: int = 0  # nodes verified, roots not counted
    # Steps by committed drafted nodes.
    acceptance_histogram: list[int] = field(default_factory=list)
    expected_tokens: float = 0.0  # tokens that the policy expected, summed over verify steps
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # summed over steps
    commits: list[Commit] = field(default_factory=list)  # one per step that committed tokens
    stage: int = 0  # index of the current stage
    stage_begin: tuple[float, int] | None = None  # seconds, and tokens emitted before
    has_missed: bool = False  # a finished stage missed its SLO
    first_open: int = 0  # commit that begins the oldest unfinished window of ten tokens
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage

    @property
    def num_steps(self) -> int:
        """Verify steps, prefill not counted."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted(self) -> int:
        """Drafted nodes that were committed."""
        return sum(number * count for number, count in enumerate(self.acceptance_histogram))
