"""Slots of K/V that running requests may hold, optionally in the memory of the drafter's K/V as well."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts


class KVRoom:
    """Slots that the running requests of an engine may hold together.

    If requests wait for slots, the target may decode more tokens per second with the memory of the drafter's K/V and
    without drafts than with drafts. Then that memory is lent to the target, after Nightjar (arXiv 2512.22420), which
    moves the draft model's weights away. The loan ends once running requests fit into the target's slots, and no
    request waits or the loan was recalled.
    """

    GAIN = 1.1  # factor by which a loan must raise the tokens per second
    GAP = 64  # steps between two loans, since the drafter has to process all requests again
    PATIENCE = 512  # steps without a loan after one that was recalled; doubled every time

    def __init__(self, target_slots: int, draft_slots: int, max_batch: int, costs: StepCosts):
        """Set the number of slots.

        Args:
            target_slots: slots of the target.
            draft_slots: further slots of the target that fit into the memory of the drafter's K/V.
            max_batch: maximum number of running requests.
            costs: seconds of steps.
        """
        self.target_slots, self.draft_slots, self.max_batch, self.costs = target_slots, draft_slots, max_batch, costs
        self.is_lent = self.is_recalled = False
        self._max_slots: int | None = None  # set after memory ran out; None: no such limit
        self._num_steps, self._not_before, self._patience = 0, 0, self.PATIENCE
        self._number, self._rate_before = 1.0, 0.0  # requests assumed for the loan; tokens per second before it

    @property
    def lent(self) -> int:
        """Slots in the drafter's memory that the target may use now."""
        return self.draft_slots if self.is_lent else 0

    @property
    def available(self) -> int:
        """Slots that requests may hold now."""
        return self.target_slots + self.lent

    @property
    def slots(self) -> int:
        """Slots of all requests up to which further requests are admitted."""
        slots = self.target_slots if self.is_recalled else self.available
        return slots if self._max_slots is None else min(slots, self._max_slots)

    @property
    def may_lend(self) -> bool:
        """Return whether there is memory to lend and the last loan ended long enough ago."""
        is_free = bool(self.draft_slots) and not self.is_lent and self._max_slots is None
        return is_free and self._num_steps >= self._not_before

    def consider(self, running: Iterable[Request], num_waiting: int) -> None:
        """Lend the drafter's slots if plain decoding with the larger batch yields more tokens per second than now.

        Nothing is lent if such steps would make a decoding request miss its TPOT SLO.
        """
        decoding = [request for request in running if request.is_decoding]
        if not self.may_lend or not decoding:
            return
        number = len(decoding)
        larger = min(number * (1.0 + self.draft_slots / self.target_slots), number + num_waiting, self.max_batch)
        plain_rate = self._plain_rate(larger)  # tokens per second, like rate
        rate = number * self.costs.recent.tokens / float(self.costs.step_s(number))
        tightest_s = min(request.pace_s or math.inf for request in decoding)
        if plain_rate > self.GAIN * rate and larger / plain_rate <= tightest_s:
            self.is_lent, self._number, self._rate_before = True, larger, rate

    def settle(self, held: int, is_enough: bool) -> None:
        """Recall a loan if steps turned out to take longer than expected, and end it as soon as possible.

        It is called once at the beginning of each step.

        Args:
            held: slots that running requests are expected to need.
            is_enough: no request waits.
        """
        self._num_steps += 1
        if not self.is_lent:
            return
        self.is_recalled |= self._plain_rate(self._number) < self._rate_before
        if held <= self.target_slots and (is_enough or self.is_recalled):
            self._not_before = self._num_steps + (self._patience if self.is_recalled else self.GAP)
            self._patience *= 2 if self.is_recalled else 1
            self.is_lent = self.is_recalled = False

    def tighten(self, held: int) -> None:
        """Let no request enter beyond the slots held now, since memory ran out."""
        self._max_slots = held

    def relax(self) -> None:
        """Let requests use all slots again, after a request has left."""
        self._max_slots = None

    def _plain_rate(self, number: float) -> float:
        """Return the tokens per second of plain decoding of ``number`` requests."""
        return number / float(self.costs.verify_s(number, number, number * self.costs.recent.keys))
