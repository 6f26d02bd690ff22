"""Registry of named drafters, for ``drafter=`` and ``--drafter``; imports a drafter when its name
is used.

A new drafter is one file with its :class:`Drafter` and :class:`DraftMethod`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_slospec.drafters.methods import DraftMethod
    from hf_slospec.heads.past_answers import PastAnswers


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that is known by its name."""

    make: Callable[
        [Any, PastAnswers | None], DraftMethod
    ]  # makes it from the target and the answers to draft from
    has_model: bool = False  # it runs a network, so that it must be the last part of a sum


def _lookup(target: Any, past: PastAnswers | None) -> DraftMethod:
    from hf_slospec.drafters.lookup import LookupMethod

    return LookupMethod(past=past)


def _suffix(target: Any, past: PastAnswers | None) -> DraftMethod:
    from hf_slospec.heads.suffix import SuffixMethod

    return SuffixMethod(past)


def _mtp(target: Any, past: PastAnswers | None) -> DraftMethod:
    from hf_slospec.drafters.head import HeadMethod
    from hf_slospec.heads.loading import load_mtp

    return HeadMethod(load_mtp(target))


NAMED = {
    "lookup": NamedDrafter(_lookup),
    "suffix": NamedDrafter(_suffix),
    "mtp": NamedDrafter(_mtp, has_model=True),
}
NAMES = ", ".join(NAMED)  # for error messages
