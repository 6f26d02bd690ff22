"""What callers can do wrong, each error also the built-in one would expect to catch."""

__all__ = [
    "FallbackWarning",
    "IncompatibleDraftError",
    "InvalidInputError",
    "InvalidTypeError",
    "SLOSpecError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
]


class SLOSpecError(Exception):
    """Root of all hf_slospec errors."""


class InvalidInputError(SLOSpecError, ValueError):
    """An argument has the right type and an impossible value."""


class InvalidTypeError(SLOSpecError, TypeError):
    """An argument has the wrong type."""


class UnsupportedModelError(SLOSpecError, ValueError):
    """The model cannot verify a token tree; the message says which property is missing."""


class UnsupportedOptionError(SLOSpecError, ValueError):
    """A ``generate`` option that speculation cannot honour; the message says what to do instead."""


class UnsupportedInputError(InvalidInputError, UnsupportedOptionError):
    """An input that stock ``generate`` takes, to doubtful effect, and speculation does not."""


class IncompatibleDraftError(SLOSpecError, ValueError):
    """Target and draft do not fit together: another vocabulary or another device."""


class FallbackWarning(UserWarning):
    """Stock ``generate`` ran in place of speculation, as ``fallback=True`` asked; the message says why."""
