"""Dynamic trees and a static one by batch size, and SLOs at batch 4, as in Delacourt's thesis.

    python benchmarks/papers/thesis.py [--seeds 3] [--runs runs.jsonl] python
    benchmarks/papers/thesis.py --acceptance 0.55 --json benchmarks/results/papers-thesis-tuned.json

Everything is simulated. The thesis publishes throughputs but no latencies, so the latencies are
fitted to the static tree's throughput at batch sizes 8 to 32; all other figures are predictions.
Further assumptions: docs/papers.md."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, Key, resumed, shares_closed, shown
from rich.console import Console
from rich.table import Table

from benchmarks.intervals import interval_of
from benchmarks.papers.bounds import Bounds
from hf_slospec.cli.benchmark import provenance
from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.comparison import Load
from hf_slospec.lab.hardware import Hardware, lines
from hf_slospec.lab.outcomes import Run
from hf_slospec.lab.policies.sequoia import StaticTreePolicy
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job

RESULTS = Path(__file__).parent.parent / "results" / "papers-thesis.json"
PUBLISHED = {
    "dynamic": (36, 51, 116, 209, 376, 709),
    "static": (32, 91, 147, 221, 273, 319),
}  # tokens per second
NEW_TOKENS = 256
BATCHES = (1, 2, 4, 8, 16, 32)
HARDWARE = Hardware(target=lines((35.0, 0.0), (0.0, 0.39)), draft=lines((5.5, 0.004)))
ACCEPTANCE = 0.52
NUM_CHILDREN = 16
SERVED: dict[str, Any] = dict(admission="fcfs", prefill="first", prefill_chunk=8192)
TREES: dict[str, Any] = dict(token_budget=64, max_depth=8, max_width=16)
DYNAMIC: dict[str, Any] = dict(policy="thesis", max_tree_nodes=64, **TREES)
TARGETS_S = ((0.2, 0.020), (0.8, 0.050))  # share of requests, target


def systems() -> dict[str, dict[str, Any]]:
    return {
        "dynamic": DYNAMIC,
        "static": dict(policy="static", max_width=3),
        "ours": dict(policy="auto"),
        "plain": dict(policy="none"),
        "oracle": dict(max_width=16, draft_budget=1024),
    }


def load(number: int, seed: int, acceptance: float, with_targets: bool = False) -> Load:
    """Return simultaneous requests, prompts of 64 to 128 tokens; equal output lengths keep the
    batch full.
    """
    rng = np.random.default_rng(seed)
    shares, tpot_slos_s = zip(*TARGETS_S, strict=True)
    jobs = [
        Job(0.0, int(rng.integers(64, 129)), NEW_TOKENS, float(rng.choice(tpot_slos_s, p=shares)))
        if with_targets
        else Job(0.0, int(rng.integers(64, 129)), NEW_TOKENS)
        for _ in range(number)
    ]
    return Load.of("all at once", jobs, TextModel(acceptance, num_children=NUM_CHILDREN), rng)


def run(own: Load, batch: int, oracle: bool = False, **settings: Any) -> Run:
    """Simulate a load at a batch size."""
    config = SLOSpecConfig(**SERVED, max_batch=batch, **settings)
    simulation = Simulation(own.jobs, own.library, HARDWARE, config, oracle=oracle)
    policy = simulation.replicas[0].engine.policy
    if isinstance(policy, StaticTreePolicy):
        policy.width = NUM_CHILDREN  # a beam of the tree's own width rarely contains the whole tree
    return simulation.run()


def throughput(
    batch: int, seed: int, acceptance: float = ACCEPTANCE
) -> dict[str, dict[str, float]]:
    """Return throughput and further figures by system at a batch size, and the bound of the
    throughput.
    """
    own = load(max(2 * batch, 8), seed, acceptance)
    found = {}
    for name, settings in systems().items():
        figures = run(own, batch, oracle=name == "oracle", **settings).summary()
        found[name] = {
            key: round(figures[key], 3)
            for key in (
                "throughput",
                "tokens_per_request_and_step",
                "nodes_per_step",
                "step_ms",
                "draft_share",
            )
        }
    depth = SLOSpecConfig().max_depth
    bounds = Bounds(own.jobs, own.library, HARDWARE, depth, own.library.num_children, batch)
    return {**found, "bound": {"throughput": round(bounds.throughput(), 3)}}


def targets(seed: int, acceptance: float = ACCEPTANCE) -> dict[str, dict[str, float]]:
    """Return figures at batch 4: attainment of the requests' SLOs and of the thesis' two
    thresholds.
    """
    own = load(80, seed, acceptance, with_targets=True)
    found = {}
    policies = {
        "Algorithm 1": DYNAMIC,
        "Algorithm 2": dict(policy="thesis-slo", slack=0.010, **TREES),
        "Algorithm 2, capped": dict(policy="thesis-slo-capped", slack=0.010, **TREES),
        "ours": dict(policy="auto"),
    }
    for name, settings in policies.items():
        outcomes = run(own, 4, **settings).outcomes
        tpots_s = np.array([outcome.tpot_s for outcome in outcomes])
        wanted_s = np.array([outcome.tpot_slo_s for outcome in outcomes])
        found[name] = {
            "mean_tpot_ms": 1e3 * float(tpots_s.mean()),
            "attained": float((tpots_s <= wanted_s).mean()),
            "tight_attained": float((tpots_s <= wanted_s)[wanted_s == min(wanted_s)].mean()),
            "below_20_ms": float((tpots_s <= 0.020).mean()),
        }
        found[name] = {key: round(value, 4) for key, value in found[name].items()}
    return found


def means(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return means with intervals over seeds, by system and figure."""
    return {
        name: {key: interval_of([run[name][key] for run in runs]) for key in own}
        for name, own in runs[0].items()
    }


def main(
    seeds: Annotated[
        int, typer.Option(min=1, help="Loads of each figure, the first of seed 1.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    acceptance: Annotated[
        float, typer.Option(help="Of a drafted token; higher after fine-tuning.")
    ] = ACCEPTANCE,
    only: Annotated[
        str, typer.Option("--batches", help="Comma-separated sizes; all by default.")
    ] = "",
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished runs, to resume from.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json")] = RESULTS,
) -> None:
    logging.disable(logging.WARNING)  # SLOs of 20 ms cannot be attained
    numbers = range(1, seeds + 1)
    batches = tuple(map(int, only.split(","))) if only else BATCHES
    tasks: dict[Key, Callable[[], Figures]] = {
        **{
            ("throughput", batch, seed): partial(throughput, batch, seed, acceptance)
            for batch in batches
            for seed in numbers
        },
        **{("targets", 4, seed): partial(targets, seed, acceptance) for seed in numbers},
    }
    found = resumed(tasks, workers, kept)
    by_batch = {
        str(batch): [found["throughput", batch, seed] for seed in numbers] for batch in batches
    }
    by_policy = means([found["targets", 4, seed] for seed in numbers])
    closed = {}
    for reference in ("oracle", "bound"):
        for batch, runs in by_batch.items():
            rates = [{name: own["throughput"] for name, own in run.items()} for run in runs]
            others = [name for name in rates[0] if name not in ("ours", "oracle", "bound")]
            shares = shares_closed(rates, others, reference, "ours")
            closed.setdefault(reference, {})[batch] = interval_of(shares) if shares else None
    averages = {batch: means(runs) for batch, runs in by_batch.items()}
    record = dict(
        provenance=provenance(seeds=seeds, acceptance=acceptance),
        published_tokens_per_s=PUBLISHED, throughput=averages, targets=by_policy,
        share_of_the_distance_from_the_best_other=closed,
    )  # fmt: skip
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    console = Console(width=140, file=sys.stdout)
    table = Table("tokens/s at batch", *map(str, batches), title="Throughput")
    for name, published in PUBLISHED.items():
        table.add_row(
            f"{name}, published", *(str(published[BATCHES.index(batch)]) for batch in batches)
        )
    for name in averages[str(batches[0])]:
        table.add_row(name, *(shown(averages[batch][name]["throughput"], 0) for batch in averages))
    for reference, own in closed.items():
        table.add_row(
            f"ours: % of the way to the {reference}",
            *(shown(share, 0, 100.0) for share in own.values()),
        )
    console.print(table)
    table = Table("batch 4", *next(iter(by_policy.values())), title="Targets")
    for name, figures in by_policy.items():
        table.add_row(name, *(shown(value, 3) for value in figures.values()))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
