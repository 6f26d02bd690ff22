"""The exceptions."""

from __future__ import annotations

from hf_slospec import (
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecError,
    UnsupportedModelError,
    UnsupportedOptionError,
)


def test_every_error_is_an_slospec_error_and_a_builtin():
    for error in (
        InvalidInputError,
        UnsupportedModelError,
        UnsupportedOptionError,
        IncompatibleDraftError,
    ):
        assert issubclass(error, SLOSpecError) and issubclass(error, ValueError)
    assert issubclass(InvalidTypeError, SLOSpecError) and issubclass(InvalidTypeError, TypeError)
