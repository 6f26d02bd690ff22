"""What the replays of papers share: runs that resume, the oracle and the bound beside the systems,
and their plot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.intervals import Interval, share_closed
from benchmarks.papers.bounds import Bounds
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Library
from hf_slospec.lab.workload import Job

Key = tuple[Any, ...]  # strings and numbers
Figures = dict[str, Any]


def resumed(
    tasks: Mapping[Key, Callable[[], Figures]], workers: int, kept: Path | None
) -> dict[Key, Figures]:
    """Return the figures of every task.

    Args:
        kept: a file with a line per finished task, which is not repeated; new ones are added as
            they finish.
    """
    found: dict[Key, Figures] = {}
    if kept is not None and kept.exists():
        lines = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
        found = {tuple(key): figures for key, figures in lines if tuple(key) in tasks}
    left = {key: task for key, task in tasks.items() if key not in found}
    for key, figures in tqdm(_run(left, workers), total=len(left), disable=not sys.stderr.isatty()):
        found[key] = figures
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, figures]) + "\n")
    return found


def _run(tasks: Mapping[Key, Callable[[], Figures]], workers: int) -> Iterator[tuple[Key, Figures]]:
    """Yield the figures of tasks as they finish; a single worker is this process."""
    if workers == 1:
        for key, task in tasks.items():
            yield key, task()
        return
    with ProcessPoolExecutor(workers) as pool:
        started = {pool.submit(task): key for key, task in tasks.items()}
        for done in as_completed(started):
            yield started[done], done.result()


def bounds_of(
    jobs: Sequence[Job], library: Library, hardware: Hardware, systems: Iterable[str]
) -> Bounds:
    """Return the bounds that hold for all of these systems: they draft no deeper and run no more
    requests at a time.
    """
    configs = [config_of(system) for system in systems]
    depth = max(config.max_depth for config in configs if config.policy != "none")
    return Bounds(
        jobs,
        library,
        hardware,
        depth,
        library.num_children,
        max(config.max_batch for config in configs),
    )


def shares_closed(
    runs: Sequence[Mapping[str, float]], base: Sequence[str], best: str, own: str
) -> list[float]:
    """Return for each run which share of the distance from the best of ``base`` to ``best`` the
    system ``own`` closes.

    Runs without such a distance are left out. Higher figures are better, unless ``best`` is below
    all of ``base``."""
    found = []
    for run in runs:
        others = [run[name] for name in base]
        start = min(others) if run[best] < min(others) else max(others)
        if (share := share_closed(start, run[own], run[best])) is not None:
            found.append(share)
    return found


def shown(interval: Interval | None, digits: int, factor: float = 1.0) -> str:
    """Return an interval for a table: the mean, and what it may be off by."""
    if interval is None:
        return ""
    text = f"{factor * interval['mean']:.{digits}f}"
    if "low" not in interval:
        return text
    low, high = (factor * abs(interval[end] - interval["mean"]) for end in ("low", "high"))
    ends = f"-{low:.{digits}f}+{high:.{digits}f}"
    return f"{text} {ends}" if abs(high - low) >= 0.1**digits else f"{text} ±{high:.{digits}f}"
