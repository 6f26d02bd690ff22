"""Records of what a step did, for metrics, plots, traces and the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one step, or of several together, by phase."""

    draft_s: float = 0.0  # the drafter's forwards
    select_s: float = 0.0  # planning and selection
    verify_s: float = 0.0  # the target's forward and the choice of tokens
    host_s: float = 0.0  # accepting and committing

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return self.draft_s + self.select_s + self.verify_s + self.host_s

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            self.draft_s + other.draft_s,
            self.select_s + other.select_s,
            self.verify_s + other.verify_s,
            self.host_s + other.host_s,
        )


class Commit(NamedTuple):
    """A request's state after one of its steps. Of the tokens that a step added, accepted draft tokens come first."""

    num_emitted: int  # new tokens of the request so far
    at_s: float  # on the engine's clock
    num_nodes: int  # verified in the step, root included
    num_accepted: int  # added tokens that the draft had proposed


@dataclass(frozen=True)
class RequestStep:
    """One request's part in a step."""

    index: int  # the request's index
    nodes: int  # verified, root included
    committed: int  # tokens
    expected: float  # tokens that the policy expected
    tpot_slo_s: float | None  # TPOT SLO of its stage, in seconds
    elapsed_s: float  # since its stage began
    emitted: int  # tokens since its stage began


@dataclass(frozen=True)
class StepEvent:
    """One step of the engine. Times are seconds of the engine's monotonic clock."""

    begun_s: float
    num_decoding: int  # decoding requests, which come first; the others chose the first token after their prompts
    depth: int  # draft levels planned; 0: no speculation
    width: int  # planned beam width per request
    phases: PhaseTimes
    predicted_s: float  # seconds that the policy expected; 0 where it makes no prediction
    requests: tuple[RequestStep, ...]  # those that chose tokens
    prefill_tokens: int = 0  # in the same forward
    num_keys: int = 0  # cached tokens of the requests that decode
    num_drafted_for: int = 0  # requests that the drafter was asked for
    num_catch_up: int = 0  # committed tokens of these that the drafter had not been given before
    draft_levels: int = 0  # depth of the deepest candidate tree

    @property
    def is_prefill(self) -> bool:
        """Return whether the step decoded nothing."""
        return self.num_decoding == 0

    @property
    def decoding(self) -> tuple[RequestStep, ...]:
        """The requests that had emitted tokens before."""
        return self.requests[: self.num_decoding]

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's forward: nodes of the requests that decode, and prefill."""
        return sum(request.nodes for request in self.decoding) + self.prefill_tokens

    @property
    def committed(self) -> int:
        """Tokens committed, over all requests."""
        return sum(request.committed for request in self.requests)

    @property
    def nodes(self) -> int:
        """Nodes verified over all requests, roots included: what counts against the token budget."""
        return sum(request.nodes for request in self.requests)
