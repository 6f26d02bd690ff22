"""Slots of K/V that running requests may hold, among them those in the memory of a drafter's K/V."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.request import Request


class KVRoom:
    """Slots that the running requests of an engine may hold together.

    Where requests wait for slots, the target may decode more tokens per second with the memory of the drafter's K/V and
    without drafts than with drafts. Then that memory is lent to the target, after Nightjar (arXiv 2512.22420), which
    moves the draft model's weights away. The loan ends once running requests need less than the target's own slots,
    and no request waits or the loan was recalled.
    """

    GAIN = 1.1  # factor by which a loan must raise the tokens per second
    GAP = 64  # steps between two loans, as the drafter has to process all texts again
    PATIENCE = 512  # steps without a loan after one that was recalled; doubled every time

    def __init__(self, own: int, lendable: int, max_batch: int, costs: StepCosts):
        """Set the slots there are.

        Args:
            own: slots of the target.
            lendable: how many more fit into the memory of the drafter's K/V.
            max_batch: requests that run together, at most.
            costs: seconds of steps.
        """
        self.own, self.lendable, self.max_batch, self.costs = own, lendable, max_batch, costs
        self.is_lent = self.is_recalled = False
        self._most: int | None = None  # after memory ran out
        self._num_steps, self._not_before, self._patience = 0, 0, self.PATIENCE
        self._number, self._rate_before = 1.0, 0.0  # requests that the loan is for, and tokens per second before it

    @property
    def lent(self) -> int:
        """The drafter's slots that the target may use now."""
        return self.lendable if self.is_lent else 0

    @property
    def slots(self) -> int:
        """Slots of all requests up to which further ones may enter."""
        slots = self.own if self.is_recalled else self.own + self.lent
        return slots if self._most is None else min(slots, self._most)

    @property
    def may_lend(self) -> bool:
        """Return whether there is memory to lend, and the last loan is over for long enough."""
        is_free = bool(self.lendable) and not self.is_lent and self._most is None
        return is_free and self._num_steps >= self._not_before

    def consider(self, running: Iterable[Request], num_waiting: int) -> None:
        """Lend the drafter's slots if plain decoding of the requests that they hold yields more than recent steps do.

        Requests whose TPOT SLO such steps would miss keep the drafter.
        """
        decoding = [request for request in running if request.is_decoding]
        if not self.may_lend or not decoding:
            return
        number = len(decoding)
        more = min(number * (1.0 + self.lendable / self.own), number + num_waiting, self.max_batch)
        plain, rate = self._plain_rate(more), number * self.costs.recent.tokens / float(self.costs.step_s(number))
        if plain > self.GAIN * rate and more / plain <= min(request.tpot_slo_s or math.inf for request in decoding):
            self.is_lent, self._number, self._rate_before = True, more, rate

    def settle(self, held: int, is_enough: bool) -> None:
        """Recall a loan where steps turned out to take longer than expected, and end it if that is possible.

        It is called once at the beginning of each step.

        Args:
            held: slots that running requests may come to hold.
            is_enough: no request waits.
        """
        self._num_steps += 1
        if not self.is_lent:
            return
        self.is_recalled |= self._plain_rate(self._number) < self._rate_before
        if held <= self.own and (is_enough or self.is_recalled):
            self._not_before = self._num_steps + (self._patience if self.is_recalled else self.GAP)
            self._patience *= 2 if self.is_recalled else 1
            self.is_lent = self.is_recalled = False

    def tighten(self, held: int) -> None:
        """Let no request enter beyond the slots that are held now, as memory ran out."""
        self._most = held

    def relax(self) -> None:
        """Let requests use all slots again, as one has left since memory ran out."""
        self._most = None

    def _plain_rate(self, number: float) -> float:
        """Return the tokens per second of steps that decode so many requests without drafts."""
        return number / float(self.costs.verify_s(number, number, number * self.costs.recent.keys))
