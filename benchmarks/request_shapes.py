"""Policy auto on loads of unequal requests in the simulator: missed SLOs and tokens per second of a
version.

    python benchmarks/request_shapes.py --name "one depth per step" --json benchmarks/results/request-shapes.json

Run it on checkouts of several versions (``PYTHONPATH``), each under a name of its own, to compare
them; the file keeps the runs of all names. With ``--free-widths`` only the first node of a
request's draft level costs: what that gains, no choice of widths for single requests could exceed.
More requests wait than can decode at a time, so tokens per second do not depend on arrivals.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.lab import HARDWARE, Load, Simulation, TextModel, jobs_of
from hf_slospec.lab.hardware import Hardware, hardware_of
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.workload import Kind, Length

PROFILE = Path(__file__).parent / "results" / "profile-cpu-2core-0.6B-bf16.json"
MAX_DRAFTED = 96  # tokens of a draft level, about
INPUT = Length(150, 60, 1000)
OUTPUT = Length(206, 80, 256, 5)
FIGURES = ("attainment", "goodput", "throughput", "tpot_ms", "tokens_per_request_and_step", "nodes_per_step", "depth",
           "draft_share")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Latencies, and a load that saturates them."""

    hardware: Hardware
    max_batch: int
    tpot_s: float  # about what auto needs per token with this batch; SLOs are multiples of it


def machines() -> dict[str, Machine]:
    """Return the machines by name."""
    gpus = HARDWARE["llama-70b-4xa100"]
    cpu = hardware_of(str(PROFILE))
    return {
        "4 A100": Machine(gpus, 24, 0.021),
        # As in engines that prepare every request of a draft level on the host.
        "4 A100, 0.5 ms per request and level": Machine(
            replace(gpus, draft=replace(gpus.draft, per_request_s=0.0005)), 24, 0.0305
        ),
        "2-core CPU, larger draft": Machine(replace(cpu, draft=times(cpu.draft, 6.0)), 12, 0.147),
    }


def without_widths(cost: ForwardCost) -> ForwardCost:
    """Return the cost of draft levels in which each request pays for one token, however many it
    has.
    """
    first_s = cost.curve(1)
    token_s = (cost.curve(MAX_DRAFTED) - first_s) / MAX_DRAFTED
    return replace(
        cost, curve=LatencyCurve((1,), (first_s,)), per_request_s=cost.per_request_s + token_s
    )


def times(cost: Any, factor: float) -> Any:
    """Return a cost that is larger by a factor."""
    return cost.scaled([factor] * len(cost.curve.num_tokens), factor)


def kinds(*tiers: tuple[float, float], tpot_s: float) -> tuple[Kind, ...]:
    """Return classes by their share and their TPOT SLO, a multiple of ``tpot_s``."""
    return tuple(
        Kind(f"{slo:g}", share, INPUT, OUTPUT, tpot_slo_s=slo * tpot_s) for share, slo in tiers
    )


TIERS = (0.25, 0.8), (0.35, 1.15), (0.4, 4.0)
LOADS: dict[str, tuple[tuple[tuple[float, float], ...], TextModel, float]] = {
    "three tiers": (TIERS, TextModel(0.82, 12.0), 1.0),
    "few tight SLOs": (((0.06, 0.75), (0.94, 4.0)), TextModel(0.82, 12.0), 1.0),
    "unequal acceptance": (
        TIERS,
        TextModel(0.65, 2.0),
        1.15,
    ),  # a lower acceptance takes more time per token
}


def one(machine: str, load: str, seed: int, number: int, free_widths: bool) -> dict[str, Any]:
    """Simulate one load.  -> its figures"""
    logging.disable(logging.WARNING)  # requests that can no longer meet their SLOs are logged
    chosen, (tiers, texts, slower), rng = (
        machines()[machine],
        LOADS[load],
        np.random.default_rng(seed),
    )
    config = config_of("auto").model_copy(
        update={"max_batch": chosen.max_batch, "admission": "fcfs"}
    )
    mix = kinds(*tiers, tpot_s=slower * chosen.tpot_s)
    jobs = jobs_of(mix, np.arange(number) * 1e-3, rng, lambda tokens: 0.0)
    work = Load.of(load, jobs, texts, rng)
    hardware = chosen.hardware
    if free_widths:
        hardware = replace(hardware, draft=without_widths(hardware.draft))
    figures = (
        Simulation(work.jobs, work.library, hardware, config, seed=seed)
        .run()
        .summary(METRICS["adaserve"])
    )
    return {
        "machine": machine,
        "load": load,
        "seed": seed,
        **{key: figures[key] for key in FIGURES},
    }


def main(
    name: Annotated[str, typer.Option(help="Of this version in the file.")],
    number: Annotated[int, typer.Option(help="Requests of each load.")] = 300,
    seeds: Annotated[int, typer.Option(help="Runs of each load.")] = 3,
    free_widths: Annotated[
        bool, typer.Option(help="Draft levels cost no more for being wide.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate all loads on all machines."""
    cases = [
        (machine, load, seed, number, free_widths)
        for machine in machines()
        for load in LOADS
        for seed in range(1, seeds + 1)
    ]
    with ProcessPoolExecutor(workers) as pool:
        rows = list(pool.map(one, *zip(*cases, strict=True)))
    for machine, load in dict.fromkeys((row["machine"], row["load"]) for row in rows):
        runs = [row for row in rows if (row["machine"], row["load"]) == (machine, load)]
        missed, speed, good = (
            fmean(run[key] for run in runs) for key in ("attainment", "throughput", "goodput")
        )  # fmt: skip
        print(
            f"{machine}, {load}: {100 * (1 - missed):.1f} % missed, {speed:.1f} tokens/s, {good:.1f} of attained"
        )
    if json_path is not None:
        record = (
            json.loads(json_path.read_text())
            if json_path.exists()
            else {"provenance": {}, "results": {}}
        )
        record["provenance"][name] = provenance(requests=number, seeds=seeds)
        record["results"][name] = rows
        json_path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
