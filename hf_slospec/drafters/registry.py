"""Registry of drafters by name, published formats of drafting heads, and kinds of assistant models.

A drafter or format of another distribution is an entry point, in the group ``hf_slospec.drafters``
or ``hf_slospec.heads``: a module that calls :func:`register` when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hf_slospec.assembly import load_plugins
from hf_slospec.errors import InvalidInputError, UnsupportedModelError
from hf_slospec.extras import load_entry_points

if TYPE_CHECKING:
    from hf_slospec.drafters.checkpoint import Checkpoint
    from hf_slospec.drafters.head import Head
    from hf_slospec.drafters.methods import DraftMethod
    from hf_slospec.drafters.past_answers import PastAnswers

ENTRY_POINTS = ("hf_slospec.drafters", "hf_slospec.heads")  # entry point groups


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that is known by its name, for ``drafter=`` and ``--drafter``."""

    name: str
    make: Callable[[Any, PastAnswers | None], DraftMethod]  # (target, past answers) -> method
    # it runs a network, so it must be the last part of a hybrid such as "lookup+mtp"
    has_model: bool = False
    extra: str | None = None  # extra of this package that it needs


@dataclass(frozen=True)
class HeadFormat:
    """A published format of drafting heads."""

    # name of the format and its publishers, for error messages; ``{field}`` in it stands for a
    # field of the checkpoint's config
    name: str
    recognises: Callable[[Checkpoint], bool]
    # (checkpoint, target) -> head; None: not implemented
    load: Callable[[Checkpoint, Any], Head] | None = None
    reason: str = ""  # why it cannot be loaded; appended to the error message


@dataclass(frozen=True)
class AssistantKind:
    """A kind of assistant model that needs another drafter than :class:`AssistantDrafter`."""

    name: str
    # (model, target, target's tokenizer or None, assistant's tokenizer or None) -> method; None for
    # a model of another kind
    make: Callable[[Any, Any, Any, Any], DraftMethod | None]


_ENTRIES: dict[tuple[type, str], Any] = {}


Entry = TypeVar("Entry", NamedDrafter, HeadFormat, AssistantKind)


def register(*entries: NamedDrafter | HeadFormat | AssistantKind) -> None:
    """Add entries to the registry; formats and kinds are tried in the order of registration.

    Raises:
        InvalidInputError: another entry of this type has the name.
    """
    for entry in entries:
        if _ENTRIES.setdefault((type(entry), entry.name), entry) != entry:
            raise InvalidInputError(
                f"there is a {type(entry).__name__} {entry.name!r} already; choose another name"
            )


def entries(kind: type[Entry]) -> list[Entry]:
    """Return all entries of a type, including entries of other distributions."""
    load_plugins()
    for group in ENTRY_POINTS:
        load_entry_points(group)
    return [entry for (entry_kind, _), entry in _ENTRIES.items() if entry_kind is kind]


def named_drafters() -> dict[str, NamedDrafter]:
    """Return all named drafters by name."""
    return {drafter.name: drafter for drafter in entries(NamedDrafter)}


def drafter_names() -> str:
    """Return the names of all named drafters, for error messages."""
    return ", ".join(named_drafters())


def head_formats() -> str:
    """Return the names of all head formats that can be loaded, for error messages."""
    return ", ".join(each.name for each in entries(HeadFormat) if each.load is not None)


def head_of(checkpoint: Checkpoint, target: Any) -> Head | None:
    """Return the head of a checkpoint; None if no format recognises it.

    Raises:
        UnsupportedModelError: the head's format, or a setting of the head, is not implemented.
        IncompatibleDraftError: the head was made for another target.
    """
    for each in entries(HeadFormat):
        if each.recognises(checkpoint):
            if each.load is None:
                name = each.name.format(**checkpoint.config)
                raise UnsupportedModelError(
                    f"{checkpoint.source} is {name}, which cannot be loaded{each.reason}; these "
                    f"heads can: {head_formats()}"
                )
            return each.load(checkpoint, target)
    return None


def _lookup(target: Any, past: PastAnswers | None) -> DraftMethod:
    from hf_slospec.drafters.lookup import LookupMethod

    return LookupMethod(past=past)


register(NamedDrafter("lookup", _lookup))
