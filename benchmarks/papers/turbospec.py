"""TurboSpec's table of mean latencies on H100 (arXiv 2406.14066, table 5) in the simulator.

    python benchmarks/papers/turbospec.py [--seeds 3] [--json ...] [--sensitivity] [--no-auto] [--runs FILE]

Poisson arrivals over two minutes; prompts first and unchunked; latency from arrival to the last
token, mean over all requests. Published values are read from ``../shared/papers/turbospec.txt``
beside the checkout, or from ``--published``; without that file only simulated values are printed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, bounds_of, resumed, shares_closed

from benchmarks.intervals import interval_of
from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.lab.comparison import Load
from hf_slospec.lab.hardware import MAX_TOKENS, Hardware, curve, lines
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of, is_oracle
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, poisson

PUBLISHED = Path(__file__).parents[3] / "shared" / "papers" / "turbospec.txt"
# Requests arrive so long; unpublished, inferred from the growth of latencies with the load
SPAN_S = 120.0
RATES = (1, 4, 8, 16)
LENGTHS = (1, 3, 5, 7)
COLUMNS: dict[str, str] = {
    "Org": "vllm",
    **{f"k={length}": f'vllm-spec2 {{"max_depth": {length}}}' for length in LENGTHS},
    "TS": "turbospec",
}
LIMITS = '"max_batch": 256, "admission": "fcfs", "prefill": "first", "prefill_chunk": 8192'
AUTO = {
    f"auto-{width}": f'auto {{"max_depth": 8, "max_width": {width}, {LIMITS}}}' for width in (1, 3)
}
ORACLE = f'oracle {{"max_depth": 8, "max_width": 3, {LIMITS}}}'
# Also knows the lengths of outputs, and begins with the shortest that waits
SHORTEST = "oracle (shortest first)"
RIVALS = {"AdaSpec": "adaspec", "oracle": ORACLE, SHORTEST: ORACLE}
BEST, BOUND = (
    "oracle, best",
    "bound",
)  # the better oracle of each run; no schedule is faster than the bound
SYSTEMS = {**COLUMNS, **AUTO, **RIVALS}
FIXED = tuple(column for column in COLUMNS if column != "TS")
CLEAR = 1.10  # ratio of published latencies above which their order is compared


@dataclass(frozen=True)
class Setup:
    """A target on a data set: hardware, lengths and acceptance."""

    target: str
    data: str
    hardware: Hardware
    input_tokens: tuple[float, float]  # mean and standard deviation, published
    output_tokens: tuple[float, float]  # likewise
    output_scale: float  # factor on output lengths, fitted to "Org" at the lowest rate
    texts: TextModel
    input_scale: float = (
        1.0  # factor on prompt lengths, fitted likewise where prompts take most of the time
    )

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        return f"{self.target} {self.data}"

    def load(self, rate: float, seed: int) -> Load:
        """Return a load; lengths are shuffled quantiles of log-normal distributions, so all seeds
        have equal means.
        """
        rng = np.random.default_rng(seed)
        number = round(SPAN_S * rate)
        inputs = lengths(rng, _scaled(self.input_tokens, self.input_scale), number)
        outputs = lengths(rng, _scaled(self.output_tokens, self.output_scale), number)
        jobs = [
            Job(*job)
            for job in zip(poisson(rng, rate, number).tolist(), inputs, outputs, strict=True)
        ]
        return Load.of(f"{rate:g}", jobs, self.texts, rng)


def _scaled(moments: tuple[float, float], factor: float) -> tuple[float, float]:
    return factor * moments[0], factor * moments[1]


def lengths(rng: np.random.Generator, moments: tuple[float, float], number: int) -> list[int]:
    """Return shuffled quantiles of a log-normal distribution with this mean and standard deviation."""
    average, deviation = moments
    variance = math.log1p((deviation / average) ** 2)
    normal = NormalDist(math.log(average) - variance / 2.0, variance**0.5)
    quantiles = [normal.inv_cdf((place + 0.5) / number) for place in range(number)]
    drawn: list[int] = rng.permutation(
        np.clip(np.rint(np.exp(quantiles)), 2, 4000).astype(np.int64)
    ).tolist()
    return drawn


# ---- latencies and acceptance; docs/papers.md says which numbers are published and which are
# fitted

LOOKUP = "CNN"  # data set of the prompt lookup rows, which have no draft model
GRAPHS = 256  # largest forward, in tokens, that is replayed as a CUDA graph


def cost(base: float, slope: float, jump: float, steep: float, per_key: float) -> ForwardCost:
    """Return a cost: almost constant up to the largest graph, then a jump and a steeper line; all
    in milliseconds.
    """
    last = base + slope * GRAPHS
    points = {1: base + slope, GRAPHS: last, GRAPHS + 1: last + jump}
    points[MAX_TOKENS] = last + jump + steep * (MAX_TOKENS - GRAPHS - 1)
    return replace(curve(points), per_key_s=per_key / 1e3)


def lookup(hardware: Hardware, request_ms: float) -> Hardware:
    """Return the hardware with drafts that cost only host time."""
    return replace(hardware, draft=lines((0.0, 0.0)), drafting_request_s=request_ms / 1e3)


VICUNA_33B = Hardware(
    cost(11.31, 0.0091, 6.03, 0.0759, per_key=2.9e-4),
    cost(1.79, 0.0356, 3.99, 0.003, per_key=1.4e-4),
    drafting_request_s=0.103e-3,
    kv_tokens=58_200,
)
VICUNA_33B_EAGER = replace(
    VICUNA_33B, target=cost(11.31, 0.102, 6.03, 0.0759, per_key=2.9e-4)
)  # see docs/papers.md
LLAMA_70B = Hardware(
    cost(13.83, 0.059, 8.05, 0.0773, per_key=6.24e-5),
    cost(1.52, 0.0142, 3.97, 0.006, per_key=1.0e-5),
    drafting_request_s=0.049e-3,
)


def drafting(acceptance: float, spread: float) -> TextModel:
    """Return texts of a draft model with this mean acceptance rate, which varies by request."""
    return TextModel(acceptance, spread, evenness=3.0, sibling=0.3)


def matching(acceptance: float, spread: float, matched: float) -> TextModel:
    """Return texts of prompt lookup: one continuation, with constant probability, in a share of the
    steps.
    """
    return TextModel(acceptance, spread, evenness=math.inf, num_children=1, matched=matched)


# prompts
SHAREGPT = (227.0, 264.0)
SONNET = (517.0, 10.0)
CNN = (1067.0, 537.0)
SETUPS = (
    Setup("33B", "ShareGPT", VICUNA_33B, SHAREGPT, (269, 233), 0.84, drafting(0.760, 12.8)),
    Setup("33B", "Sonnet", VICUNA_33B, SONNET, (139, 15), 1.37, drafting(0.851, 6.2)),
    Setup(
        "33B",
        LOOKUP,
        lookup(VICUNA_33B_EAGER, 0.032),
        CNN,
        (82, 44),
        0.48,
        matching(0.624, 9.5, 0.64),
        0.86,
    ),
    Setup("70B", "ShareGPT", LLAMA_70B, SHAREGPT, (227, 208), 1.17, drafting(0.794, 26.8)),
    Setup("70B", "Sonnet", LLAMA_70B, SONNET, (135, 18), 1.28, drafting(0.905, 9.7)),
    Setup(
        "70B", LOOKUP, lookup(LLAMA_70B, 0.2), CNN, (85, 48), 1.08, matching(0.644, 9.2, 0.56), 0.80
    ),
)


# ---- the paper's values

HEADER = "(Target, Data) QPS Org k=1 k=3 k=5 k=7 TS"
Cells = dict[tuple[str, float, str], float]  # (setup, rate, column) -> mean latency in seconds


def published(path: Path) -> Cells:
    """Parse table 5 of the paper's text: three heading lines per setup, then a line of figures per
    rate.
    """
    cells: Cells = {}
    heading: list[str] = []
    name = ""
    for line in path.read_text(encoding="utf-8").rpartition(HEADER)[2].splitlines()[1:]:
        fields = line.split()
        if line.startswith("Table"):
            break
        if not fields[0][0].isdigit():
            heading.append(line.strip())
            continue
        if heading:
            name = f"{heading[0].rpartition('-')[2]} {heading[2].partition('-')[0]}"
            heading = []
        cells.update(
            ((name, float(fields[0]), column), float(value))
            for column, value in zip(COLUMNS, fields[1:], strict=True)
        )
    return cells


# ---- running


@dataclass(frozen=True)
class Task:
    """One simulation, or the bound of its load."""

    setup: Setup
    rate: float
    column: str
    seed: int

    def run(self) -> Figures:
        """Return the figures of :data:`FIGURES`, or of the latency alone for :data:`BOUND`."""
        load = self.setup.load(self.rate, self.seed)
        if self.column == BOUND:
            bounds = bounds_of(load.jobs, load.library, self.setup.hardware, SYSTEMS.values())
            return {"latency_s": bounds.latency_s(), "throughput": bounds.throughput()}
        system = SYSTEMS[self.column]
        jobs = list(load.jobs)
        if self.column == SHORTEST:
            jobs = [replace(job, priority=job.output_tokens) for job in jobs]
        simulation = Simulation(
            jobs,
            load.library,
            self.setup.hardware,
            config_of(system),
            seed=self.seed,
            oracle=is_oracle(system),
        )
        found = simulation.run().summary()
        return {figure: found[figure] for figure in FIGURES}


FIGURES = ("latency_s", "ttft_s", "tpot_ms", "depth", "nodes_per_step", "requests_per_step", "step_ms",
           "tokens_per_request_and_step", "draft_share", "throughput")  # fmt: skip


def simulated(
    setups: Sequence[Setup],
    columns: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    workers: int,
    kept: Path | None = None,
) -> dict[tuple[str, float, str], list[dict[str, float]]]:
    """Return the figures of every cell and seed; see :func:`replays.resumed`."""
    cells = [(setup, rate, column) for setup in setups for rate in rates for column in columns]
    tasks = {
        (cell[0].name, *cell[1:], seed): Task(*cell, seed).run
        for cell in cells
        for seed in range(seeds)
    }
    runs = resumed(tasks, workers, kept)
    return {
        (setup.name, rate, column): [runs[setup.name, rate, column, seed] for seed in range(seeds)]
        for setup, rate, column in cells
    }


def latencies(cells: dict[tuple[str, float, str], list[dict[str, float]]]) -> Cells:
    """Return the mean latencies over seeds."""
    return {cell: mean(run["latency_s"] for run in runs) for cell, runs in cells.items()}


# ---- comparing


def closed(runs: Sequence[dict[str, float]], column: str, best: str) -> list[float]:
    """Return for each run the share of the distance from the best fixed length or rival to a
    reference.
    """
    base = [rival for rival in (*COLUMNS, "AdaSpec") if rival in runs[0]]
    return shares_closed(runs, base, best, column)


def is_fitted(name: str, rate: float, column: str) -> bool:
    """Return whether parameters were fitted on this cell: fixed lengths at the lowest and the
    highest rate.
    """
    return column in FIXED and rate in (min(RATES), max(RATES))


def varied(setups: Sequence[Setup]) -> dict[str, list[Setup]]:
    """Return the setups with a draft model, with one parameter at a time changed by 20 %."""

    def draft(setup: Setup, factor: float) -> Setup:
        level = setup.hardware.draft
        seconds = tuple(factor * s for s in level.curve.seconds)
        slower = replace(
            level, curve=replace(level.curve, seconds=seconds), per_key_s=factor * level.per_key_s
        )
        return replace(setup, hardware=replace(setup.hardware, draft=slower))

    def accepting(setup: Setup, factor: float) -> Setup:
        acceptance = min(factor * setup.texts.acceptance, 0.97)
        return replace(setup, texts=setup.texts.model_copy(update={"acceptance": acceptance}))

    changes = {"draft time": draft, "acceptance": accepting}
    return {
        f"{what} x {factor:g}": [
            change(setup, factor) for setup in setups if LOOKUP not in setup.name
        ]
        for what, change in changes.items()
        for factor in (0.8, 1.0, 1.2)
        if factor != 1.0 or what == "draft time"
    }


def errors(ours: Cells, theirs: Cells) -> dict[tuple[str, float, str], float]:
    """Return the relative errors of simulated latencies."""
    return {cell: ours[cell] / theirs[cell] - 1.0 for cell in theirs if cell in ours}


def orders(ours: Cells, theirs: Cells) -> Iterator[tuple[tuple[str, float, str, str], bool]]:
    """Yield pairs of columns that clearly differ in the paper, and whether the simulation has the
    same order.
    """
    for name, rate in dict.fromkeys(
        (name, rate) for name, rate, _ in theirs if (name, rate, "Org") in ours
    ):
        columns = [column for column in COLUMNS if (name, rate, column) in ours]
        for faster, slower in itertools.permutations(columns, 2):
            if theirs[name, rate, slower] > CLEAR * theirs[name, rate, faster]:
                yield (
                    (name, rate, faster, slower),
                    ours[name, rate, slower] > ours[name, rate, faster],
                )


def compared(ratios: Sequence[float]) -> dict[str, Any]:
    """Return in how many cells one column is faster than another, and the ratios of their
    latencies.
    """
    found = {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    counts = {"faster": sum(each < 1.0 for each in ratios), "of": len(ratios)}
    return counts | {name: round(value, 4) for name, value in found.items()}


def summary(ours: Cells, theirs: Cells) -> dict[str, Any]:
    """Return median errors, by the use of the cells, and the number of clear orders that are
    reproduced.
    """
    own = errors(ours, theirs)
    ranked = list(orders(ours, theirs))
    groups = {
        "draft rows": lambda name, rate, column: LOOKUP not in name,
        "draft rows, fitted": lambda name, rate, column: (
            is_fitted(name, rate, column) and LOOKUP not in name
        ),
        "draft rows, not fitted": lambda name, rate, column: (
            not is_fitted(name, rate, column) and LOOKUP not in name
        ),
        "prompt lookup rows": lambda name, rate, column: LOOKUP in name,
        "prompt lookup rows, not fitted": lambda *cell: LOOKUP in cell[0] and not is_fitted(*cell),
    }
    found: dict[str, Any] = {}
    for group, holds in groups.items():
        values = [abs(error) for cell, error in own.items() if holds(*cell)]
        found[group] = {
            "cells": len(values),
            "median_error": round(median(values), 4) if values else None,
        }
    for kind in ("draft", "lookup"):
        verdicts = [right for (name, *_), right in ranked if (LOOKUP in name) == (kind == "lookup")]
        found[f"orders, {kind}"] = {"right": sum(verdicts), "of": len(verdicts)}
    found["wrong orders"] = [list(pair) for pair, right in ranked if not right]
    worst = sorted(own, key=lambda cell: -abs(own[cell]))[:8]
    found["worst cells"] = [[*cell, round(own[cell], 3)] for cell in worst]
    return found


def markdown(ours: Cells, theirs: Cells, columns: Sequence[str]) -> str:
    """Return a table with a line per setup and rate: simulated values, and published ones in
    parentheses.
    """
    rows = [
        "| target, data | QPS | " + " | ".join(columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for name, rate in dict.fromkeys((name, rate) for name, rate, _ in ours):
        fields = [f"{ours[name, rate, column]:.2f}" for column in columns]
        beside = [
            f" ({theirs[cell]:.2f})" if (cell := (name, rate, column)) in theirs else ""
            for column in columns
        ]
        rows.append(
            f"| {name} | {rate:g} | "
            + " | ".join(map("".join, zip(fields, beside, strict=True)))
            + " |"
        )
    return "\n".join(rows)


def main(
    seeds: Annotated[int, typer.Option(help="Loads per cell; figures are means.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    auto: Annotated[
        bool, typer.Option(help="Also simulate policy auto, AdaSpec and the oracle.")
    ] = True,
    sensitivity: Annotated[
        bool, typer.Option(help="Also change draft times and acceptance by 20 %, one seed.")
    ] = False,
    only: Annotated[str, typer.Option(help="Only setups whose names contain this.")] = "",
    rates: Annotated[str, typer.Option(help="Comma-separated QPS.")] = ",".join(map(str, RATES)),
    only_columns: Annotated[
        str, typer.Option("--columns", help="Comma-separated; all by default.")
    ] = "",
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished runs, to resume from.")
    ] = None,
    path: Annotated[Path, typer.Option("--published", help="The paper's text.")] = PUBLISHED,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate the table."""
    theirs = published(path) if path.exists() else {}
    if not theirs:
        print(f"{path} does not exist: only simulated values are printed")
    known = (*SYSTEMS, BOUND) if auto else tuple(COLUMNS)
    columns = tuple(only_columns.split(",")) if only_columns else known
    if unknown := {*columns} - {*known}:
        raise typer.BadParameter(
            f"--columns must be among {', '.join(known)}, got {', '.join(sorted(unknown))}"
        )
    setups = [setup for setup in SETUPS if only in setup.name]
    at = tuple(map(float, rates.split(",")))
    figures = simulated(setups, columns, at, seeds, workers, kept)
    ours = latencies(figures)
    print(markdown(ours, theirs, columns))
    record: dict[str, Any] = {
        "provenance": provenance(seeds=seeds, span_s=SPAN_S),
        "cells": [
            {
                "setup": n,
                "rate": r,
                "column": c,
                **{
                    figure: interval_of([run[figure] for run in runs])
                    for figure in FIGURES
                    if figure in runs[0]
                },
            }
            for (n, r, c), runs in figures.items()
        ],
    }
    if theirs:
        record["summary"] = summary(ours, theirs)
    if {"auto-1", "TS"} <= {*columns}:
        record["auto-1 to TS"] = compared(
            [ours[n, r, "auto-1"] / ours[n, r, c] for n, r, c in ours if c == "TS"]
        )
    own_columns = [column for column in AUTO if column in columns]
    if {*FIXED} <= {*columns} and own_columns:
        record |= {"over best fixed": {}, "share of the distance from the best other": {}}
        for name, rate in dict.fromkeys((name, rate) for name, rate, _ in ours):
            runs = [
                {column: figures[name, rate, column][seed]["latency_s"] for column in columns}
                for seed in range(seeds)
            ]
            if {"oracle", SHORTEST} <= {*columns}:
                for run in runs:
                    run[BEST] = min(run["oracle"], run[SHORTEST])
            record["over best fixed"][f"{name}, {rate:g}"] = {
                column: interval_of(
                    [run[column] / min(run[fixed] for fixed in FIXED) for run in runs]
                )
                for column in (*AUTO, *RIVALS, "TS", BEST, BOUND)
                if column in runs[0]
            }
            record["share of the distance from the best other"][f"{name}, {rate:g}"] = {
                f"{column}, to {best}": interval_of(shares)
                if (shares := closed(runs, column, best))
                else None
                for column in own_columns
                for best in ("oracle", BEST, BOUND)
                if best in runs[0]
            }
    if sensitivity and theirs:
        record["sensitivity"] = {}
        for label, changed in varied(setups).items():
            cells = simulated(changed, tuple(COLUMNS), at, 1, workers)
            record["sensitivity"][label] = summary(latencies(cells), theirs)
    print(
        json.dumps(
            {key: value for key, value in record.items() if key not in ("cells", "provenance")},
            indent=1,
        )
    )
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
