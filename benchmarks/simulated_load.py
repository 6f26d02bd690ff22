"""SLOs attained by policy under AdaServe's classes, in the simulator with step times like those of SmolLM2-135M on two
CPU cores.

    python -m benchmarks.simulated_load --json benchmarks/results/simulated-load-smollm2-135m.json

The classes are those of ``benchmarks.serving load --target``: TPOT SLOs of 1.2, 5/3 and 5 times the seconds
per token of a single stream, TTFT SLOs of 50, 100 and 300 times. All policies get the same arrivals and texts,
which nearly half of the steps find a draft for, as with prompt lookup. Unlike a real machine, the simulated one
always has the same speed.
"""

from __future__ import annotations

import json
import logging
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.intervals import wilson
from benchmarks.serving import ADASERVE_CLASSES, SYSTEMS, arrivals
from hf_slospec.cli.benchmark import provenance
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.lab import Load, Simulation, TextModel, jobs_of
from hf_slospec.lab.hardware import Hardware, curve
from hf_slospec.lab.workload import Kind, Length

# Milliseconds of compiled forwards in bf16, rounded, on two cores of a Xeon with AMX
VERIFY = {
    1: 11,
    2: 12,
    4: 13.5,
    8: 16.5,
    16: 22,
    32: 31,
    64: 48,
    128: 85,
    256: 150,
    512: 280,
    1024: 560,
}
HARDWARE = Hardware(
    ForwardCost(curve(VERIFY).curve, per_request_s=1.2e-3, per_key_s=3e-6),
    curve({1: 0.05, 64: 0.1}),
    host_s=1.2e-3,
    kv_tokens=64_000,
)
UNIT_S = 12.5e-3  # seconds per token of a single stream that decodes plainly
PROMPTS = {
    "code": Length(130, 40, 200),
    "chat": Length(90, 35, 150),
    "summary": Length(750, 145, 1000),
}
ANSWERS = Length(110, 11, 128, 90)
TEXTS = TextModel(0.55, 12.0, matched=0.45)
CELLS = (
    ("poisson", 1.25),
    ("poisson", 1.75),
    ("poisson", 2.5),
    ("bursty", 1.25),
)  # requests per second
NAMES = ("auto", "auto-fcfs", "plain", "fixed-2", "adaserve", "vllm-adaptive", "turbospec")


class Case(NamedTuple):
    """One simulated load of one system."""

    system: str
    kind: str
    rate: float
    seed: int
    number: int


def run(case: Case) -> dict[str, Any]:
    """Simulate one load.  -> its figures"""
    logging.disable(logging.WARNING)  # requests that can no longer meet their SLOs are logged
    rng = np.random.default_rng(case.seed)
    kinds = tuple(
        Kind(name, share, PROMPTS[name], ANSWERS, tpot * UNIT_S, ttft * UNIT_S)
        for name, (share, tpot, ttft) in ADASERVE_CLASSES.items()
    )
    jobs = jobs_of(kinds, arrivals(rng, case.kind, case.rate, case.number), rng, lambda tokens: 0.0)
    load = Load.of("", jobs, TEXTS, rng)
    config = SLOSpecConfig(**SYSTEMS[case.system])
    done = Simulation(load.jobs, load.library, HARDWARE, config, seed=case.seed).run()
    return {
        "seconds": done.seconds,
        "good_tokens": sum(o.output_tokens for o in done.outcomes if o.attained),
        "guaranteed": sum(o.guaranteed for o in done.outcomes),
        "kept": sum(o.guaranteed and bool(o.attained) for o in done.outcomes),
        "classes": {
            name: [bool(o.attained) for o in done.outcomes if o.kind == name] for name in PROMPTS
        },
    }


def totals(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system over all seeds of a load."""
    by_class = {name: [kept for each in runs for kept in each["classes"][name]] for name in PROMPTS}
    attained = [kept for own in by_class.values() for kept in own]
    by_seed = [each["good_tokens"] / each["seconds"] for each in runs]
    return {
        "attained": wilson(sum(attained), len(attained)),
        "goodput": float(np.mean(by_seed)),
        "goodput_by_seed": by_seed,
        **{key: sum(each[key] for each in runs) for key in ("guaranteed", "kept")},
        "classes": {name: sum(own) / len(own) for name, own in by_class.items()},
    }


def main(
    number: Annotated[int, typer.Option(help="Requests of each load.")] = 300,
    seeds: Annotated[int, typer.Option()] = 4,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate every policy under every load, with several seeds."""
    results: dict[str, dict[str, Any]] = {}
    with Pool() as pool:
        for kind, rate in CELLS:
            own = results[f"{kind}, {rate:g}/s"] = {}
            for system in NAMES:
                cases = [Case(system, kind, rate, seed, number) for seed in range(seeds)]
                own[system] = totals(pool.map(run, cases, 1))
                print(kind, rate, system, own[system])
    if json_path is not None:
        facts = provenance(
            number=number, seeds=seeds, classes=ADASERVE_CLASSES, unit_s=UNIT_S, verify_ms=VERIFY
        )
        json_path.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
