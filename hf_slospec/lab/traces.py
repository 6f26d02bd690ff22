"""Reading of CSV traces."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.lab.files import read_text
from hf_slospec.lab.workload import MAX_TIME_S, Job

MAX_REQUEST_TOKENS = MAX_PRIORITY = 1_000_000
REQUIRED = ("arrival_s", "input_tokens", "output_tokens")
OPTIONAL = ("slo", "slo_ratio", "ttft_s", "class", "priority", "max_new_tokens")


def read_trace(path: Path, base_tpot_s: float | None = None) -> list[Job]:
    """Return the requests of a CSV trace in order of arrival.

    Args:
        base_tpot_s: seconds per token that a ``slo_ratio`` above 0 multiplies; one below 0 is milliseconds.

    Raises:
        InvalidFileError: the trace is invalid; the message has line and column.
        InvalidInputError: ``base_tpot_s`` is missing or not positive.
    """
    if base_tpot_s is not None and not (math.isfinite(base_tpot_s) and base_tpot_s > 0.0):
        raise InvalidInputError(f"--base-tpot must be a positive number of seconds, got {base_tpot_s}")
    reader = csv.DictReader(io.StringIO(read_text(path)), restkey="", strict=True)
    try:
        return _jobs(path, reader, base_tpot_s)
    except csv.Error as error:
        raise InvalidFileError(f"{path}:{reader.reader.line_num}: {error}") from error


def _jobs(path: Path, reader: csv.DictReader[str], base_tpot_s: float | None) -> list[Job]:
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    if missing := [name for name in REQUIRED if name not in names]:
        raise InvalidFileError(f"{path}:1: column {', '.join(missing)} is missing; found: {', '.join(names) or 'none'}")
    if unknown := [name for name in names if name not in (*REQUIRED, *OPTIONAL)]:
        raise InvalidFileError(
            f"{path}:1: unknown column {', '.join(unknown)}; known: {', '.join(REQUIRED + OPTIONAL)}"
        )
    if "slo" in names and "slo_ratio" in names:
        raise InvalidFileError(f"{path}:1: columns slo and slo_ratio exclude each other; remove one")
    if "slo_ratio" in names and base_tpot_s is None:
        raise InvalidInputError(f"{path} has SLOs as ratios (slo_ratio); give the seconds they multiply: --base-tpot")
    if len(set(names)) < len(names):
        raise InvalidFileError(f"{path}:1: two columns have the same name; rename one")
    jobs = [_job(_Line(path, reader.line_num, row), base_tpot_s) for row in reader]
    if not jobs:
        raise InvalidFileError(f"{path}: contains no requests; add a line for each")
    return sorted(jobs, key=lambda job: job.arrival_s)


@dataclass(frozen=True)
class _Line:
    """Fields of one request, with file and line for error messages."""

    path: Path
    number: int
    fields: dict[str, str | None]

    def text(self, name: str) -> str:
        """Return a field without surrounding whitespace; empty if it is missing."""
        return (self.fields.get(name) or "").strip()

    def fault(self, name: str, message: str) -> InvalidFileError:
        """Return an error that names file, line and column."""
        return InvalidFileError(f"{self.path}:{self.number}: column {name}: {message}")

    def value(self, name: str, kind: type[int] | type[float], minimum: float, maximum: float) -> float | None:
        """Return a number within limits; None if the field is empty."""
        text = self.text(name)
        if not text:
            if name in REQUIRED:
                raise self.fault(name, "is empty")
            return None
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        try:
            value = kind(text)
        except ValueError as error:
            raise self.fault(name, f"{shown} is not a {'whole ' * (kind is int)}number") from error
        if not minimum <= value <= maximum:
            raise self.fault(name, f"{shown} is not within {minimum:.15g}..{maximum:.15g}")
        return value

    def count(self, name: str) -> int | None:
        """Return a number of tokens; None if the field is empty."""
        value = self.value(name, int, 1, MAX_REQUEST_TOKENS)
        return None if value is None else int(value)

    def slo_s(self, name: str) -> float | None:
        """Return an SLO in seconds; None if the field is empty."""
        value = self.value(name, float, 0.0, MAX_TIME_S)
        if value == 0.0:
            raise self.fault(name, "an SLO of 0 cannot be attained; leave the field empty for none")
        return value


def _job(line: _Line, base_tpot_s: float | None) -> Job:
    if "" in line.fields:
        raise InvalidFileError(f"{line.path}:{line.number}: has more fields than the header; remove them")
    tpot_slo_s, ratio = line.slo_s("slo"), line.value("slo_ratio", float, -1e6, 1e6)
    if ratio == 0.0:
        raise line.fault("slo_ratio", "an SLO of 0 cannot be attained; leave the field empty for none")
    if ratio is not None and base_tpot_s is not None:
        tpot_slo_s = ratio * base_tpot_s if ratio > 0.0 else -ratio / 1e3
    num_output, max_new_tokens = line.count("output_tokens") or 1, line.count("max_new_tokens")
    if max_new_tokens is not None and max_new_tokens < num_output:
        raise line.fault("max_new_tokens", f"{max_new_tokens} is less than the {num_output} output_tokens")
    return Job(
        arrival_s=line.value("arrival_s", float, 0.0, MAX_TIME_S) or 0.0,
        input_tokens=line.count("input_tokens") or 1,
        output_tokens=num_output,
        tpot_slo_s=tpot_slo_s,
        ttft_slo_s=line.slo_s("ttft_s"),
        kind=line.text("class") or ("none" if tpot_slo_s is None else f"{1e3 * tpot_slo_s:g} ms"),
        priority=int(line.value("priority", int, -MAX_PRIORITY, MAX_PRIORITY) or 0),
        max_new_tokens=max_new_tokens,
    )
