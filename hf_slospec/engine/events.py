"""What happened in a step, for metrics, plots and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one step, or of several together, by what they were spent on."""

    draft_s: float = 0.0  # the drafter's forwards
    select_s: float = 0.0  # planning and selection
    verify_s: float = 0.0  # the target's forward and the choice of tokens
    host_s: float = 0.0  # accepting, committing and book-keeping

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.draft_s + self.select_s + self.verify_s + self.host_s

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            self.draft_s + other.draft_s,
            self.select_s + other.select_s,
            self.verify_s + other.verify_s,
            self.host_s + other.host_s,
        )


class Commit(NamedTuple):
    """What a request had after one of its steps. Of the tokens a step added, accepted drafts are the first."""

    num_emitted: int  # new tokens of the request so far
    at_s: float  # on the engine's clock
    num_nodes: int  # verified in the step, root included
    num_accepted: int  # of the tokens it added, those the draft had proposed


@dataclass(frozen=True)
class RequestStep:
    """One request's part in a step."""

    index: int  # of the request
    nodes: int  # verified, root included
    committed: int  # tokens
    expected: float  # tokens that were expected
    tpot_slo_s: float | None  # seconds per output token, of its stage
    elapsed_s: float  # since its stage began
    emitted: int  # tokens since its stage began


@dataclass(frozen=True)
class StepEvent:
    """One step of the engine. Times are seconds of the engine's monotonic clock."""

    begun_s: float  # when it began
    num_decoding: int  # of the requests, which come first; the others chose their first token behind their prompts
    depth: int  # draft levels planned; 0: no speculation
    width: int  # of a request's beam, as planned
    phases: PhaseTimes  # what it took
    predicted_s: float  # what the policy expected the step to take; 0 where it expects nothing
    requests: tuple[RequestStep, ...]  # those that chose tokens
    prefill_tokens: int = 0  # of prompts, in the same forward

    @property
    def is_prefill(self) -> bool:
        """Whether it fed prompts and nothing else."""
        return self.num_decoding == 0

    @property
    def decoding(self) -> tuple[RequestStep, ...]:
        """Those that had tokens before."""
        return self.requests[: self.num_decoding]

    @property
    def committed(self) -> int:
        """Tokens, over all requests."""
        return sum(request.committed for request in self.requests)

    @property
    def nodes(self) -> int:
        """Verified, over all requests, roots included: what counts against the token budget."""
        return sum(request.nodes for request in self.requests)
