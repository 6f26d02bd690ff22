"""Loads as CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.sim.files import read_text
from hf_slospec.sim.workload import MOST_S, Job

MOST_TOKENS = 1_000_000
NEEDED = ("arrival_s", "input_tokens", "output_tokens")
OPTIONAL = ("slo", "slo_ratio", "ttft_s", "class", "priority", "max_new_tokens")


def read_trace(path: Path, base_tpot_s: float | None = None) -> list[Job]:
    """A CSV trace as jobs, in order of arrival.

    Args:
        base_tpot_s: what a ``slo_ratio`` above 0 multiplies; one below 0 is milliseconds.

    Raises:
        InvalidFileError: with the line and the column of what is wrong.
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
    if missing := [name for name in NEEDED if name not in names]:
        raise InvalidFileError(f"{path}:1: no column {', '.join(missing)}; there are: {', '.join(names) or 'none'}")
    if unknown := [name for name in names if name not in (*NEEDED, *OPTIONAL)]:
        raise InvalidFileError(f"{path}:1: unknown column {', '.join(unknown)}; known: {', '.join(NEEDED + OPTIONAL)}")
    if "slo" in names and "slo_ratio" in names:
        raise InvalidFileError(f"{path}:1: slo and slo_ratio exclude each other")
    if "slo_ratio" in names and base_tpot_s is None:
        raise InvalidInputError(f"{path} gives targets as ratios; say of what: --base-tpot, in seconds")
    if len(set(names)) < len(names):
        raise InvalidFileError(f"{path}:1: a column is named twice")
    jobs = [_job(_Line(path, reader.line_num, row), base_tpot_s) for row in reader]
    if not jobs:
        raise InvalidFileError(f"{path}: holds no requests")
    return sorted(jobs, key=lambda job: job.arrival_s)


@dataclass(frozen=True)
class _Line:
    """A request's fields."""

    path: Path
    number: int
    fields: dict[str, str | None]

    def text(self, name: str) -> str:
        return (self.fields.get(name) or "").strip()

    def fault(self, name: str, message: str) -> InvalidFileError:
        return InvalidFileError(f"{self.path}:{self.number}: column {name}: {message}")

    def value(self, name: str, kind: type[int] | type[float], least: float, most: float) -> float | None:
        """None where the field is empty."""
        text = self.text(name)
        if not text:
            if name in NEEDED:
                raise self.fault(name, "is empty")
            return None
        told = repr(text if len(text) <= 40 else f"{text[:40]}...")
        try:
            value = kind(text)
        except ValueError as error:
            raise self.fault(name, f"{told} is not a {'whole ' * (kind is int)}number") from error
        if not least <= value <= most:
            raise self.fault(name, f"{told} does not lie within {least:.15g}..{most:.15g}")
        return value

    def count(self, name: str) -> int | None:
        value = self.value(name, int, 1, MOST_TOKENS)
        return None if value is None else int(value)

    def tpot_slo_s(self, name: str) -> float | None:
        value = self.value(name, float, 0.0, MOST_S)
        if value == 0.0:
            raise self.fault(name, "0 is no target; leave it empty for none")
        return value


def _job(line: _Line, base_tpot_s: float | None) -> Job:
    if "" in line.fields:
        raise InvalidFileError(f"{line.path}:{line.number}: has more fields than the header")
    tpot_s, ratio = line.tpot_slo_s("slo"), line.value("slo_ratio", float, -1e6, 1e6)
    if ratio == 0.0:
        raise line.fault("slo_ratio", "0 is no target; leave it empty for none")
    if ratio is not None and base_tpot_s is not None:
        tpot_s = ratio * base_tpot_s if ratio > 0.0 else -ratio / 1e3
    num_output, most = line.count("output_tokens") or 1, line.count("max_new_tokens")
    if most is not None and most < num_output:
        raise line.fault("max_new_tokens", f"{most} is less than the {num_output} output_tokens")
    return Job(
        arrival_s=line.value("arrival_s", float, 0.0, MOST_S) or 0.0,
        input_tokens=line.count("input_tokens") or 1,
        output_tokens=num_output,
        tpot_s=tpot_s,
        ttft_s=line.tpot_slo_s("ttft_s"),
        kind=line.text("class") or ("none" if tpot_s is None else f"{1e3 * tpot_s:g} ms"),
        priority=int(line.value("priority", int, -MOST_TOKENS, MOST_TOKENS) or 0),
        max_new_tokens=most,
    )


def write_trace(jobs: Sequence[Job], path: Path) -> None:
    """As :func:`read_trace` reads it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*NEEDED, "slo", "ttft_s", "class", "priority", "max_new_tokens"))
        for job in jobs:
            writer.writerow(
                (job.arrival_s, job.input_tokens, job.output_tokens, job.tpot_s, job.ttft_s, job.kind, job.priority,
                 job.max_new_tokens)
            )  # fmt: skip
