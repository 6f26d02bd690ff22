"""Errors and warnings of the package. Each error also derives from the built-in error that callers
expect to catch.
"""

from __future__ import annotations

import concurrent.futures
import queue
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "FallbackWarning",
    "IncompatibleDraftError",
    "InvalidFileError",
    "InvalidInputError",
    "InvalidTypeError",
    "MissingExtraError",
    "NotGuaranteedError",
    "NotRunningError",
    "QueueFull",
    "RequestCancelledError",
    "SLOSpecError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
]


class SLOSpecError(Exception):
    """Base class of all hf_slospec errors."""


class InvalidInputError(SLOSpecError, ValueError):
    """An argument has an invalid value."""


class InvalidFileError(InvalidInputError):
    """A file has invalid content; the message names file, line and column."""


class InvalidTypeError(SLOSpecError, TypeError):
    """An argument has the wrong type."""


class MissingExtraError(SLOSpecError, ImportError):
    """A package of an extra is not installed; the message has the command that installs it."""


class UnsupportedModelError(SLOSpecError, ValueError):
    """The model cannot verify a token tree; the message names the property that it lacks."""


class UnsupportedOptionError(SLOSpecError, ValueError):
    """A ``generate`` option cannot be speculated; the message says what to do instead."""


class UnsupportedInputError(InvalidInputError, UnsupportedOptionError):
    """Speculation refuses an input that stock ``generate`` accepts with doubtful results."""


class IncompatibleDraftError(SLOSpecError, ValueError):
    """The draft model does not fit the target: they differ in vocabulary, device or processes."""


class QueueFull(SLOSpecError, queue.Full):  # noqa: N818  named like queue.Full
    """The batcher's queue is full; try again later, or submit with ``block=True``."""


class NotGuaranteedError(SLOSpecError, RuntimeError):
    """A request was submitted with ``must_guarantee``, and its SLOs cannot be guaranteed; none of
    its tokens was computed.
    """


class NotRunningError(SLOSpecError, RuntimeError):
    """The batcher has not been started, was stopped, or failed; the message says which."""


class RequestCancelledError(SLOSpecError, concurrent.futures.CancelledError):
    """The request was cancelled by its handle or because the batcher stopped."""


class FallbackWarning(UserWarning):
    """Stock ``generate`` ran in place of speculation; the message says why."""


class InputModel(BaseModel):
    """Base of frozen pydantic models whose constructor raises InvalidInputError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidInputError(describe_validation_error(error)) from error

    # Let pydantic validate nested models without the constructor, so that errors have the paths of
    # their fields.
    vars(__init__)["__pydantic_base_init__"] = True

    if not TYPE_CHECKING:  # type checkers refuse to set fields of a frozen model

        def __setattr__(self, name: str, value: Any) -> None:
            raise InvalidInputError(
                f"{type(self).__name__} is frozen; make another one with "
                f"model_copy(update={{{name!r}: {reprlib.repr(value)}}})"
            )


def describe_validation_error(error: ValidationError, name: Callable[[str], str] = str) -> str:
    """Return the messages of all faults of a pydantic error, joined by semicolons.

    Args:
        error: raised by pydantic.
        name: returns the name to show for a field of the model.
    """
    return "; ".join(describe_fault(fault, name) for fault in error.errors(include_url=False))


def describe_fault(fault: ErrorDetails, name: Callable[[str], str] = str) -> str:
    """Return the message of one fault as ``field.path: reason``, with the invalid value if it is a
    scalar.

    Args:
        fault: one of pydantic's ``error.errors()``.
        name: returns the name to show for a field of the model.
    """
    reason = fault["msg"].removeprefix("Value error, ")
    is_about_value = fault["type"] not in (
        "missing",
        "extra_forbidden",
        "value_error",
        "json_invalid",
    )
    if is_about_value and isinstance(fault["input"], str | int | float):
        reason += f", got {reprlib.repr(fault['input'])}"
    first, *path = map(str, fault["loc"] or ("",))
    return f"{'.'.join((name(first), *path))}: {reason}" if first else reason
