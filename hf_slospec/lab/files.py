"""Reading of text and JSON files, with errors that name file, line and column."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hf_slospec.errors import InvalidFileError, describe_fault

Model = TypeVar("Model", bound=BaseModel)
MAX_FAULTS = 5  # faults of a file that an error lists; further ones are counted


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text.

    Raises:
        InvalidFileError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise InvalidFileError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
        raise InvalidFileError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_json(path: Path) -> tuple[str, Any]:
    """Return a JSON file's text and its parsed content.

    Raises:
        InvalidFileError: the file is not valid JSON; the message has line and column.
    """
    text = read_text(path)
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidFileError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
        raise InvalidFileError(f"{path}:1:1: {error}") from error


def validated(model: type[Model], path: Path, text: str, data: Any) -> Model:
    """Return the content that :func:`read_json` gave as a pydantic model.

    Raises:
        InvalidFileError: the content does not fit the model; the message has line and column of each fault.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        listed = faults[:MAX_FAULTS]
        lines = [f"{path}:{line_and_column(text, fault['loc'])}: {describe_fault(fault)}" for fault in listed]
        if len(faults) > MAX_FAULTS:
            lines.append(f"{path}: and {len(faults) - MAX_FAULTS} more faults")
        raise InvalidFileError("\n".join(lines)) from error


_SEPARATORS = re.compile(r"[\s,:]*")  # between two JSON values


def line_and_column(text: str, location: tuple[int | str, ...]) -> str:
    """Return line and column, from 1, of a value in valid JSON text.

    Args:
        location: the keys and list indices that lead to the value. If it is missing, its parent is located.
    """
    at = _skip_separators(text, 0)
    for key in location:
        child = _child(text, at, key)
        if child is None:
            break
        at = child
    return f"{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def _child(text: str, at: int, key: int | str) -> int | None:
    """Return the offset of the value of ``key`` in the object or list at offset ``at``; None if there is none."""
    decode, is_object, child, count = json.JSONDecoder().raw_decode, text[at] == "{", None, 0
    if text[at] not in "[{":
        return None
    at = _skip_separators(text, at + 1)
    while text[at] not in "]}":
        current_key: int | str = count
        if is_object:
            current_key, end = decode(text, at)
            at = _skip_separators(text, end)
        if current_key == key:
            child = at  # the last value of a repeated key counts
        at, count = _skip_separators(text, decode(text, at)[1]), count + 1
    return child


def _skip_separators(text: str, at: int) -> int:
    match = _SEPARATORS.match(text, at)
    return match.end() if match else at
