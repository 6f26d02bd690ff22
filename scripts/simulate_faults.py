"""Run simulations of the batcher, one per seed, and print the seeds that fail with the smallest schedule that does.

Usage: python scripts/simulate_faults.py --seeds 0:1000000
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.simulated_batcher import fault_of, schedule_of, shrunk

MOST_SHOWN = 5  # failing seeds that are shrunk and shown whole


def main(
    seeds: Annotated[str, typer.Option(help="First seed and the one behind the last, as 0:1000.")] = "0:10000",
    shrink: Annotated[bool, typer.Option(help="Shrink the schedules of failing seeds.")] = True,
) -> None:
    """Simulate the batcher once per seed; exit with 1 if a schedule failed."""
    first, _, behind = seeds.partition(":")
    if not (first.isdecimal() and behind.isdecimal() and int(first) < int(behind)):
        raise typer.BadParameter(f"must be two ascending numbers, such as 0:1000, got {seeds!r}", param_hint="--seeds")
    logging.disable(logging.CRITICAL)  # of the errors that are injected
    failing = []
    for seed in tqdm(range(int(first), int(behind)), unit="schedule"):
        plan = schedule_of(seed)
        if (error := fault_of(plan)) is None:
            continue
        failing.append(seed)
        tqdm.write(f"seed {seed}: {error!r}")
        if shrink and len(failing) <= MOST_SHOWN:
            smaller = shrunk(plan)
            tqdm.write(f"{smaller}\n" + "".join(traceback.format_exception(fault_of(smaller))))
    print(f"{len(failing)} of {int(behind) - int(first)} schedules failed: {failing}")
    raise typer.Exit(bool(failing))


if __name__ == "__main__":
    typer.run(main)
