"""Reading what users write, with errors that say where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hf_slospec.errors import InvalidFileError

Model = TypeVar("Model", bound=BaseModel)
MOST_FAULTS = 5  # of a file are told


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise InvalidFileError(f"{path}: is not UTF-8 text (byte {error.start})") from error
        raise InvalidFileError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_json(path: Path) -> tuple[str, Any]:
    """A JSON file's text, and what it says.

    Raises:
        InvalidFileError: with the line and column of what is wrong.
    """
    text = read_text(path)
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidFileError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise InvalidFileError(f"{path}:1:1: {error}") from error


def validated(model: type[Model], path: Path, text: str, data: Any) -> Model:
    """What :func:`read_json` gave as a pydantic model.

    Raises:
        InvalidFileError: with the line and column of what is wrong.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        faults = [f"{path}:{place_of(text, e['loc'])}: {described(e['loc'], e['msg'])}" for e in found[:MOST_FAULTS]]
        if len(found) > MOST_FAULTS:
            faults.append(f"{path}: and {len(found) - MOST_FAULTS} more faults")
        raise InvalidFileError("\n".join(faults)) from error


def described(location: tuple[int | str, ...], message: str) -> str:
    """One fault that pydantic found, in short."""
    return ": ".join((*([".".join(map(str, location))] if location else []), message.removeprefix("Value error, ")))


_SPACE = re.compile(r"[\s,:]*")  # and what stands between values


def place_of(text: str, location: tuple[int | str, ...]) -> str:
    """Line and column, from 1, of a value in sound JSON text; of what holds it where it is missing."""
    at = _after_space(text, 0)
    for step in location:
        found = _child(text, at, step)
        if found is None:
            break
        at = found
    return f"{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def _child(text: str, at: int, step: int | str) -> int | None:
    """Where the value of a key, or of a place in a list, begins in the one that begins at ``at``."""
    decode, is_object, found, count = json.JSONDecoder().raw_decode, text[at] == "{", None, 0
    if text[at] not in "[{":
        return None
    at = _after_space(text, at + 1)
    while text[at] not in "]}":
        key: int | str = count
        if is_object:
            key, end = decode(text, at)
            at = _after_space(text, end)
        if key == step:
            found = at  # of a key given twice the last one counts
        at, count = _after_space(text, decode(text, at)[1]), count + 1
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
