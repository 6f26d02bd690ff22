"""Run simulations of the batcher, one per seed, and print the seeds that fail with the smallest
schedule that does.

Usage: python scripts/simulate_faults.py --seeds 0:1000000 --jobs 4 --log faults.jsonl
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from hf_slospec.cli.benchmark import provenance
from tests.support.simulation.batcher import fault_of, simulate
from tests.support.simulation.schedules import schedule_of, shrunk

MOST_SHOWN = 5  # failing seeds that are shrunk and shown whole
RANGE = 500  # seeds of one line of the log


def main(
    seeds: Annotated[
        str, typer.Option(help="First seed and the one behind the last, as 0:1000.")
    ] = "0:10000",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    log: Annotated[
        Path | None,
        typer.Option(
            help="File of JSON lines; ranges that it has of this commit are not run again."
        ),
    ] = None,
    counts: Annotated[
        bool, typer.Option(help="Print what happened in the schedules, and how often.")
    ] = False,
    shrink: Annotated[bool, typer.Option(help="Shrink the schedules of failing seeds.")] = True,
) -> None:
    """Simulate the batcher once per seed; exit with 1 if a schedule failed, now or before by the
    log.
    """
    first, _, behind = seeds.partition(":")
    if not (first.isdecimal() and behind.isdecimal() and int(first) < int(behind)):
        raise typer.BadParameter(
            f"must be two ascending numbers, such as 0:1000, got {seeds!r}", param_hint="--seeds"
        )
    facts = provenance()
    commit = facts["commit"]
    ranges = [
        range(begin, min(begin + RANGE, int(behind)))
        for begin in range(int(first), int(behind), RANGE)
    ]
    is_known = commit is not None and not commit.endswith(
        "-dirty"
    )  # changed files may have changed again
    known = _read(log) if log is not None and is_known else []
    lines = [line for line in known if line["commit"] == commit and range(*line["seeds"]) in ranges]
    done = {tuple(line["seeds"]) for line in lines}
    left = [seeds for seeds in ranges if (seeds.start, seeds.stop) not in done]
    with tqdm(
        total=sum(map(len, ranges)),
        initial=sum(map(len, ranges)) - sum(map(len, left)),
        unit="schedule",
    ) as bar:
        for line in _run(left, jobs):
            lines.append(line | facts)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
            for seed, error in line["failing"]:
                tqdm.write(f"seed {seed}: {error}")
            bar.update(line["seeds"][1] - line["seeds"][0])
    failing = sorted(seed for line in lines for seed, _ in line["failing"])
    for seed in failing[: MOST_SHOWN if shrink else 0]:
        smaller = shrunk(schedule_of(seed), lambda other: fault_of(other) is not None)
        print(f"{smaller}\n" + "".join(traceback.format_exception(fault_of(smaller))))
    if counts:
        total = sum((Counter(line["counts"]) for line in lines), Counter[str]())
        print(*(f"{name:42}{number:>12,}" for name, number in sorted(total.items())), sep="\n")
    seconds = sum(line["cpu_s"] for line in lines)
    print(
        f"{len(failing)} of {sum(map(len, ranges))} schedules failed in {seconds:.0f} CPU seconds: {failing}"
    )
    raise typer.Exit(bool(failing))


def _run(ranges: list[range], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of ranges of seeds, in the order in which they end."""
    if jobs == 1:
        _begin()
        yield from map(_simulate, ranges)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _begin) as pool:
        yield from pool.imap_unordered(_simulate, ranges)


def _begin() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # injected errors would be logged


def _simulate(seeds: range) -> dict[str, Any]:
    counts = Counter[str]()
    failing = list[tuple[int, str]]()
    begun_s = time.process_time()
    for seed in seeds:
        error, own = simulate(schedule_of(seed))
        counts += own
        if error is not None:
            failing.append((seed, repr(error)))
    seconds = round(time.process_time() - begun_s, 2)
    return {
        "seeds": [seeds.start, seeds.stop],
        "failing": failing,
        "cpu_s": seconds,
        "counts": counts,
    }


def _read(log: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, after removing a last one that was cut off."""
    text = log.read_text() if log.exists() else ""
    if (whole := text[: text.rfind("\n") + 1]) != text:
        log.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


if __name__ == "__main__":
    typer.run(main)
