"""Requests in stages at given rates: SLOs-Serve's Reasoning, alone and on replicas, and its ToolLLM
with pauses.

    python benchmarks/papers/stages.py

Lengths and SLOs are the paper's. Reasoning runs on the latencies of an 8B model on one H100, as
those of the paper's model of 1.5B are not published; tools take two seconds on average, which is
assumed, and K/V is kept meanwhile, if it is not said to be dropped. All systems get the same
requests. Times are those of the virtual clock."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, Key, resumed
from rich.console import Console
from rich.table import Table
from slos_serve import (
    GUARANTEES,
    HARDWARES,
    OURS,
    SCENARIOS,
    SEQUENTIAL,
    THEIRS,
    WITHOUT_DRAFTS,
    Scenario,
    attained_share,
)

from hf_slospec.cli.benchmark import provenance
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of

RESULTS = Path(__file__).parent.parent / "results" / "stages.json"
PAUSE_S = 2.0  # mean seconds of a tool
PLAIN = WITHOUT_DRAFTS["ours"].format()  # as in the paper, ToolLLM has no draft model
SARATHI = 'sarathi {"prefill_chunk": 512}'
REASONING = Scenario(
    ("reasoning",), 60, (512, 512), {"reasoning": "poisson"}, hardware="llama-8b-h100"
)
TOOLS = replace(SCENARIOS["toolllm"], number=100, pause_s=PAUSE_S)


@dataclass(frozen=True)
class Experiment:
    """A load, the rates at which it comes to each replica, and the systems that serve it."""

    scenario: Scenario
    rates: tuple[float, ...]
    systems: dict[str, str]
    routers: dict[str, str] = field(default_factory=dict)  # by system; others: guarantees
    replicas: int = 1


EXPERIMENTS = {
    "reasoning": Experiment(REASONING, (1.0, 4.0), {"Sarathi": SARATHI, "SLOs-Serve": THEIRS, "auto": OURS}),
    "reasoning, three replicas": Experiment(
        replace(REASONING, number=200), (0.7, 1.0),
        {"SLOs-Serve": THEIRS, "auto": OURS, "auto, sequential": OURS, "auto, oracle router": OURS},
        {"SLOs-Serve": SEQUENTIAL, "auto, sequential": SEQUENTIAL, "auto, oracle router": "oracle"},
        replicas=3,
    ),
    "tools": Experiment(TOOLS, (1.0, 2.0, 3.0), {"Sarathi": SARATHI, "auto": PLAIN, "auto, K/V dropped": PLAIN}),
}  # fmt: skip


def measured(experiment: Experiment, name: str, rate: float, seed: int) -> Figures:
    """Return what becomes of a load: shares of requests by what they attained, and means."""
    scenario = experiment.scenario
    keeps_kv = "dropped" not in name
    load = scenario.load(rate, experiment.replicas, seed)
    jobs = [replace(job, continues=job.continues and keeps_kv) for job in load.jobs]
    system = experiment.systems[name]
    router = experiment.routers.get(name, GUARANTEES)
    run = Simulation(
        jobs, load.library, HARDWARES[scenario.hardware], config_of(system),
        replicas=experiment.replicas, router=router, seed=seed,
    ).run(system)  # fmt: skip
    outcomes = run.outcomes
    summary = run.summary()
    return {
        "attained": attained_share(jobs, run),
        "first_token_in_time": float(
            np.mean([o.ttft_slo_s is None or o.ttft_s <= o.ttft_slo_s for o in outcomes])
        ),
        "windows_kept": float(np.mean([o.windows_kept is not False for o in outcomes])),
        "guaranteed": summary["guaranteed"],
        "tpot_ms": summary["tpot_ms"],
        "latency_s": summary["latency_s"],
        "depth": summary["depth"],
        "step_ms": summary["step_ms"],
        "reused_share": sum(o.reused for o in outcomes) / sum(o.input_tokens for o in outcomes),
    }


def main(
    seed: Annotated[int, typer.Option(help="Seed of the loads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished runs, to resume from.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json")] = RESULTS,
) -> None:
    """Simulate all systems at all rates, and write the results."""
    logging.disable(logging.WARNING)  # above capacity many requests miss their SLOs
    tasks: dict[Key, Callable[[], Figures]] = {
        (title, name, rate): partial(measured, experiment, name, rate, seed)
        for title, experiment in EXPERIMENTS.items()
        for name in experiment.systems
        for rate in experiment.rates
    }
    found = resumed(tasks, workers, kept)
    results: dict[str, Any] = {"provenance": provenance(seed=seed)}
    for title, experiment in EXPERIMENTS.items():
        own = {
            name: {f"{rate:g}": found[title, name, rate] for rate in experiment.rates}
            for name in experiment.systems
        }
        results[title] = own
        (first, *_), *_ = (by_rate.values() for by_rate in own.values())
        table = Table("system", "rate", *first, title=title)
        for name, by_rate in own.items():
            for rate, values in by_rate.items():
                table.add_row(name, rate, *(f"{value:.3g}" for value in values.values()))
        Console(width=160, file=sys.stdout).print(table)
    json_path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
