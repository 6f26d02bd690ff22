"""Reading what users write, with errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from hf_slospec.errors import InvalidFileError

Model = TypeVar("Model", bound=BaseModel)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InvalidFileError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def parsed(model: type[Model], path: Path) -> Model:
    """A JSON file as a pydantic model.

    Raises:
        InvalidFileError: with the line and column of what is wrong.
    """
    text = read_text(path)
    try:
        return model.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise InvalidFileError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error
    except ValidationError as error:
        faults = [f"{path}:{place_of(text, e['loc'])}: {_path(e['loc'])}{e['msg']}" for e in error.errors()]
        raise InvalidFileError("\n".join(faults)) from error


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) + ": " if location else ""


def place_of(text: str, location: tuple[int | str, ...]) -> str:
    """Line and column, from 1, of a value in JSON text; of what holds it where it is missing."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)  # JSON is YAML, and YAML knows where its values stand
    for step in location:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((value for key, value in node.value if key.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step]
        if found is None:
            break
        node = found
    return f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"
