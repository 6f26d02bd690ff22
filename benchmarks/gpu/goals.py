"""What the parts of a run say of the goals that were set for a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.contestants import COMPILED
from benchmarks.gpu.variants import CONSTANTS
from hf_slospec.cli.benchmark import OURS, WITHOUT_DRAFTS

DRAFTS_GAIN = {1: 1.8, 8: 1.6, 64: 1.3}  # speed as a multiple of that without drafts, by batch
ENOUGH = 0.98  # share of the speed of the better of no drafts and the best constant
COMPILED_GAIN = 2.0  # speed as a multiple of that of compiled stock at batch 8
FLOOR = 1.25  # times the time to read the weights
MEMORY = 1.3  # multiple of compiled stock's extra memory at batch 64
HALF, ATTAINED = 0.5, 0.85  # where no drafts attain so few, auto attains so many
SELF_SPEED = 0.7  # share of the default mode's speed


class Goal(NamedTuple):
    """A goal and what was measured."""

    name: str
    wanted: float
    measured: float
    is_most: bool = False  # the goal is an upper bound

    @property
    def is_reached(self) -> bool:
        return self.measured <= self.wanted if self.is_most else self.measured >= self.wanted

    def __str__(self) -> str:
        bound = "at most" if self.is_most else "at least"
        outcome = "reached" if self.is_reached else "missed"
        return f"{self.name}: {self.measured:.3g}, goal {bound} {self.wanted:g}: {outcome}"


def goals(folder: Path) -> list[Goal]:
    """Return the goals that the parts' files in a folder say something about."""
    readers: dict[str, Callable[[dict[str, Any]], Iterator[Goal]]] = {
        "head": _head,
        "compiled": _compiled,
        "load": _load,
        "repeatable": _repeatable,
    }
    found: list[Goal] = []
    for name, read in readers.items():
        path = folder / f"{name}.json"
        if path.exists():
            found += read(json.loads(path.read_text(encoding="utf-8"))["results"])
    return found


def _measured(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in cell["contestants"]}
    return {name: row for name, row in rows.items() if row["status"] == "measured"}


def _head(results: dict[str, Any]) -> Iterator[Goal]:
    for cell in results["speed"]:
        batch = cell["batch"]
        speed = {name: row["tokens_per_s"] for name, row in _measured(cell).items()}
        if not {OURS, WITHOUT_DRAFTS} <= speed.keys():
            continue
        if batch in DRAFTS_GAIN:
            gain = speed[OURS] / speed[WITHOUT_DRAFTS]
            yield Goal(f"auto over no drafts at batch {batch}", DRAFTS_GAIN[batch], gain)
        best = max(speed[name] for name in (WITHOUT_DRAFTS, *CONSTANTS) if name in speed)
        yield Goal(f"auto over the best constant at batch {batch}", ENOUGH, speed[OURS] / best)
    for row in results["floor"]:
        if "forward_over_floor" in row:
            name = f"{row['tokens']} tokens over the time to read the weights"
            yield Goal(name, FLOOR, row["forward_over_floor"], is_most=True)


def _compiled(results: dict[str, Any]) -> Iterator[Goal]:
    for cell in results["speed"]:
        rows = _measured(cell)
        if not {OURS, COMPILED} <= rows.keys():
            continue
        ours, theirs = rows[OURS], rows[COMPILED]
        if cell["batch"] == 8:
            gain = ours["tokens_per_s"] / theirs["tokens_per_s"]
            yield Goal("auto over compiled stock at batch 8", COMPILED_GAIN, gain)
        if cell["batch"] == 64 and "peak_beyond_held_gib" in theirs:
            share = ours["peak_beyond_held_gib"] / theirs["peak_beyond_held_gib"]
            yield Goal("memory over compiled stock's at batch 64", MEMORY, share, is_most=True)


def _load(results: dict[str, Any]) -> Iterator[Goal]:
    for by_pressure in results.values():
        for pressure, systems in sorted(by_pressure.items(), key=lambda item: float(item[0])):
            if systems["plain"]["attainment"]["mean"] <= HALF:
                attained = systems["auto"]["attainment"]["mean"]
                yield Goal(f"attained by auto at {pressure} of plain's load", ATTAINED, attained)
                break


def _repeatable(results: dict[str, Any]) -> Iterator[Goal]:
    own = {each["name"]: each for each in results["self"]["conditions"]}
    if own:
        differ = sum(each["differ"] for each in own.values())
        yield Goal('outputs of exact="self" that differ', 0, differ, is_most=True)
    default = results.get("default", {}).get("conditions", ())
    for each in default:
        if each["name"] == "batch 8" and "batch 8" in own:
            share = own["batch 8"]["tokens_per_s"] / each["tokens_per_s"]
            yield Goal('speed of exact="self" over the default', SELF_SPEED, share)
