"""Slots of K/V that running requests may hold, among them those of a drafter that is not used."""

from __future__ import annotations

from hf_slospec.engine.events import StepEvent


class KVRoom:
    """Slots that the running requests of an engine may hold together.

    Where requests wait for slots and the policy seldom drafts, the memory of the drafter's K/V is lent to the target's.
    Nightjar (arXiv 2512.22420) does the same with the draft model's weights. The loan ends as soon as running requests
    need less than the target's own slots, and nothing waits or the loan has lasted for ``LOAN`` steps: from then on no
    request enters lent slots, so that the policy can try again whether drafting pays.
    """

    PATIENCE = 64  # steps over which the share of steps that draft is averaged
    SELDOM = 1 / 16  # share of steps that draft below which the drafter's memory is lent
    LOAN = 512  # steps

    def __init__(self, own: int, lendable: int = 0):
        """Set the target's own slots, and how many more the memory of the drafter's K/V holds."""
        self.own, self.lendable, self.is_lent = own, lendable, False
        self._most: int | None = None  # after memory ran out
        self._drafted, self._num_lent_steps = 1.0, 0  # share of steps that drafted

    @property
    def lent(self) -> int:
        """The drafter's slots that the target may use now."""
        return self.lendable if self.is_lent else 0

    @property
    def slots(self) -> int:
        """Slots of all requests up to which further ones may enter."""
        slots = self.own + (self.lent if self._num_lent_steps < self.LOAN else 0)
        return slots if self._most is None else min(slots, self._most)

    def observe(self, step: StepEvent) -> None:
        """Learn whether steps draft, and count those of the loan."""
        if step.num_decoding:
            self._drafted += (float(step.draft_levels > 0) - self._drafted) / self.PATIENCE
        self._num_lent_steps += self.is_lent

    def lend(self) -> None:
        """Give the drafter's slots to the target if the drafter is seldom used."""
        if self.lendable and not self.is_lent and self._drafted < self.SELDOM and self._most is None:
            self.is_lent, self._num_lent_steps = True, 0

    def settle(self, held: int, is_enough: bool) -> None:
        """End the loan if it may end.

        Args:
            held: slots that running requests may come to hold.
            is_enough: no request waits.
        """
        if self.is_lent and held <= self.own and (is_enough or self._num_lent_steps >= self.LOAN):
            self.is_lent, self._drafted = False, 1.0  # it is lent again after as many steps without drafts

    def tighten(self, held: int) -> None:
        """Let no request enter beyond the slots that are held now, as memory ran out."""
        self._most = held

    def relax(self) -> None:
        """Let requests use all slots again, as one has left since memory ran out."""
        self._most = None
