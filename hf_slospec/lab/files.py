"""Reading of text, JSON and CSV trace files, with errors that name file, line and column."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hf_slospec.errors import InvalidFileError, InvalidInputError, describe_fault
from hf_slospec.lab.workload import MAX_TIME_S, Job

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
            raise InvalidFileError(
                f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
            ) from error
        raise InvalidFileError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error


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
    except (
        RecursionError,
        ValueError,
    ) as error:  # nested too deeply, or a number with too many digits
        raise InvalidFileError(f"{path}:1:1: {error}") from error


def validated(model: type[Model], path: Path, text: str, data: Any) -> Model:
    """Validate text and content of a file, as :func:`read_json` returns them, as a pydantic model.

    Raises:
        InvalidFileError: the content does not fit the model; the message has line and column of
            each fault.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        listed = faults[:MAX_FAULTS]
        lines = [
            f"{path}:{line_and_column(text, fault['loc'])}: {describe_fault(fault)}"
            for fault in listed
        ]
        if len(faults) > MAX_FAULTS:
            lines.append(f"{path}: and {len(faults) - MAX_FAULTS} more faults")
        raise InvalidFileError("\n".join(lines)) from error


_SEPARATORS = re.compile(r"[\s,:]*")  # between two JSON values


def line_and_column(text: str, location: tuple[int | str, ...]) -> str:
    """Return line and column, from 1, of a value in valid JSON text.

    Args:
        text: the JSON text.
        location: the keys and list indices that lead to the value. If there is no such value, the
            innermost object or list on the way to it is located.
    """
    at = _skip_separators(text, 0)
    for key in location:
        child = _child(text, at, key)
        if child is None:
            break
        at = child
    return f"{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def _child(text: str, at: int, key: int | str) -> int | None:
    """Return the offset of the value of ``key`` in the object or list that begins at offset ``at``;
    None if it has no such key.
    """
    decode = json.JSONDecoder().raw_decode
    is_object = text[at] == "{"
    child = None
    count = 0
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
        at = _skip_separators(text, decode(text, at)[1])
        count = count + 1
    return child


def _skip_separators(text: str, at: int) -> int:
    match = _SEPARATORS.match(text, at)
    return match.end() if match else at


MAX_REQUEST_TOKENS = MAX_PRIORITY = 1_000_000
REQUIRED = ("arrival_s", "input_tokens", "output_tokens")
OPTIONAL = ("slo", "slo_ratio", "ttft_s", "class", "priority", "max_new_tokens")
SLOS = ("slo", "slo_ratio", "ttft_s")
COUNT = (int, 1, MAX_REQUEST_TOKENS)
SECONDS = (float, 0.0, MAX_TIME_S)
# Type, minimum and maximum of each numeric column
NUMBERS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "arrival_s": SECONDS,
    "input_tokens": COUNT,
    "output_tokens": COUNT,
    "slo": SECONDS,
    "slo_ratio": (float, -1e6, 1e6),
    "ttft_s": SECONDS,
    "priority": (int, -MAX_PRIORITY, MAX_PRIORITY),
    "max_new_tokens": COUNT,
}


def read_trace(path: Path, base_tpot_s: float | None = None) -> list[Job]:
    """Return the requests of a CSV trace in order of arrival.

    Args:
        path: the CSV file.
        base_tpot_s: seconds per token; a ``slo_ratio`` above 0 is a multiple of them. A negative
            ``slo_ratio`` is the TPOT SLO in milliseconds, times -1.

    Raises:
        InvalidFileError: the trace is invalid; the message has line and column.
        InvalidInputError: ``base_tpot_s`` is missing or not positive.
    """
    if base_tpot_s is not None and not (math.isfinite(base_tpot_s) and base_tpot_s > 0.0):
        raise InvalidInputError(
            f"--base-tpot must be a positive number of seconds, got {base_tpot_s}"
        )
    reader = csv.DictReader(io.StringIO(read_text(path)), restkey="", strict=True)
    try:
        return _jobs(path, reader, base_tpot_s)
    except csv.Error as error:
        raise InvalidFileError(f"{path}:{reader.reader.line_num}: {error}") from error


def _jobs(path: Path, reader: csv.DictReader[str], base_tpot_s: float | None) -> list[Job]:
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    if missing := [name for name in REQUIRED if name not in names]:
        raise InvalidFileError(
            f"{path}:1: column {', '.join(missing)} is missing; found: {', '.join(names) or 'none'}"
        )
    if unknown := [name for name in names if name not in (*REQUIRED, *OPTIONAL)]:
        raise InvalidFileError(
            f"{path}:1: unknown column {', '.join(unknown)}; known: "
            f"{', '.join(REQUIRED + OPTIONAL)}"
        )
    if "slo" in names and "slo_ratio" in names:
        raise InvalidFileError(
            f"{path}:1: columns slo and slo_ratio exclude each other; remove one"
        )
    if "slo_ratio" in names and base_tpot_s is None:
        raise InvalidInputError(
            f"{path} has SLOs as ratios (slo_ratio); give the seconds they multiply: --base-tpot"
        )
    if len(set(names)) < len(names):
        raise InvalidFileError(f"{path}:1: two columns have the same name; rename one")
    jobs = [_job(f"{path}:{reader.line_num}", row, base_tpot_s) for row in reader]
    if not jobs:
        raise InvalidFileError(f"{path}: contains no requests; add a line for each")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _job(where: str, row: dict[str, str | None], base_tpot_s: float | None) -> Job:
    """Return the request of a CSV line; ``where`` is its file and line number, for errors."""
    if "" in row:
        raise InvalidFileError(f"{where}: has more fields than the header; remove them")
    texts = {name: (text or "").strip() for name, text in row.items()}
    values: dict[str, Any] = {}
    for name in NUMBERS:
        try:
            values[name] = _number(name, texts.get(name, ""))
        except ValueError as error:
            raise InvalidFileError(f"{where}: column {name}: {error}") from error
    num_output = values["output_tokens"]
    max_new_tokens = values["max_new_tokens"]
    if max_new_tokens is not None and max_new_tokens < num_output:
        raise InvalidFileError(
            f"{where}: column max_new_tokens: {max_new_tokens} is less than the {num_output} "
            "output_tokens"
        )
    tpot_slo_s = values["slo"]
    ratio = values["slo_ratio"]
    if ratio is not None and base_tpot_s is not None:
        tpot_slo_s = ratio * base_tpot_s if ratio > 0.0 else -ratio / 1e3
    kind = "none" if tpot_slo_s is None else f"{1e3 * tpot_slo_s:g} ms"
    return Job(
        values["arrival_s"],
        values["input_tokens"],
        num_output,
        tpot_slo_s,
        ttft_slo_s=values["ttft_s"],
        kind=texts.get("class") or kind,
        priority=values["priority"] or 0,
        max_new_tokens=max_new_tokens,
    )


def _number(name: str, text: str) -> float | None:
    """Return a field as a number; None if it is empty.

    Raises:
        ValueError: the field is required but empty, is no number of its column's type, or is out of
            range.
    """
    if not text:
        if name in REQUIRED:
            raise ValueError("is empty")
        return None
    kind, minimum, maximum = NUMBERS[name]
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"{shown} is not a {'whole ' * (kind is int)}number") from error
    if not minimum <= value <= maximum:
        raise ValueError(f"{shown} is not within {minimum:.15g}..{maximum:.15g}")
    if name in SLOS and not value:
        raise ValueError("an SLO of 0 cannot be attained; leave the field empty for none")
    return value
