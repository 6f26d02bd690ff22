"""Slots of K/V that running requests may hold, among them those in the memory of a drafter's K/V."""

from __future__ import annotations


class KVRoom:
    """Slots that the running requests of an engine may hold together.

    Where requests wait for slots, the target may decode more tokens per second with the memory of the drafter's K/V and
    without drafts than with drafts. Then that memory is lent to the target, after Nightjar (arXiv 2512.22420), which
    moves the draft model's weights away. The loan ends once running requests need less than the target's own slots,
    and no request waits or the loan was recalled.
    """

    GAP = 64  # steps between two loans, as the drafter has to process all texts again
    PATIENCE = 512  # steps without a loan after one that was recalled; doubled every time

    def __init__(self, own: int, lendable: int = 0):
        """Set the target's own slots, and how many more the memory of the drafter's K/V holds."""
        self.own, self.lendable, self.is_lent, self.is_recalled = own, lendable, False, False
        self._most: int | None = None  # after memory ran out
        self._num_steps, self._not_before, self._patience = 0, 0, self.PATIENCE

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

    def lend(self) -> None:
        """Give the drafter's slots to the target."""
        self.is_lent, self.is_recalled = True, False

    def recall(self) -> None:
        """Let no further request enter lent slots, as decoding was faster before."""
        self.is_recalled = self.is_lent

    def settle(self, held: int, is_enough: bool) -> None:
        """End the loan if it may end, at the beginning of a step.

        Args:
            held: slots that running requests may come to hold.
            is_enough: no request waits.
        """
        self._num_steps += 1
        if not self.is_lent or held > self.own or not (is_enough or self.is_recalled):
            return
        self._not_before = self._num_steps + (self._patience if self.is_recalled else self.GAP)
        self._patience *= 2 if self.is_recalled else 1
        self.is_lent = self.is_recalled = False

    def tighten(self, held: int) -> None:
        """Let no request enter beyond the slots that are held now, as memory ran out."""
        self._most = held

    def relax(self) -> None:
        """Let requests use all slots again, as one has left since memory ran out."""
        self._most = None
