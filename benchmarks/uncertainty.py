"""Policy auto when little is known or things change, in the simulator: bursts at the start,
recovery, slow minutes.

    python benchmarks/uncertainty.py --json benchmarks/results/uncertainty.json

Every scenario is served by auto, by plain decoding and by chains of fixed lengths. Figures are mean
latencies of the requests of interest, relative to the best of the fixed lengths for these very
requests, which is known afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.costs import StepCosts
from hf_slospec.lab.comparison import Load
from hf_slospec.lab.hardware import HARDWARE, Hardware
from hf_slospec.lab.models import SlowedClock, VirtualClock
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, poisson

OURS = "auto"
LENGTHS = (1, 2, 3, 5, 8)
LIMITS = {"max_batch": 256, "admission": "fcfs", "prefill_chunk": 2048, "max_width": 1}
POLICIES: dict[str, dict[str, Any]] = {
    OURS: {"policy": "auto", "max_depth": 8},
    "plain": {"policy": "none"},
    **{f"k={length}": {"policy": "fixed", "max_depth": length} for length in LENGTHS},
}
SYSTEMS = {name: json.dumps(options | LIMITS) for name, options in POLICIES.items()}
SLOW_S = (60.0, 120.0)  # a minute


@dataclass(frozen=True)
class BusyProfile(Hardware):
    """Hardware whose profile was taken while other programs ran: it says these factors for the two
    models.
    """

    verify_factor: float = 1.0  # forwards of more than one token take so many times longer
    draft_factor: float = 1.0

    def costs(self) -> StepCosts:
        """Return the profile, which is wrong."""
        curve = self.target.curve
        factors = [1.0 if tokens == 1 else self.verify_factor for tokens in curve.num_tokens]
        draft = self.draft.scaled(
            [self.draft_factor] * len(self.draft.curve.num_tokens), self.draft_factor
        )
        return StepCosts(self.target.scaled(factors, 1.0), draft)


@dataclass(frozen=True)
class Scenario:
    """A load on a machine, and which requests are of interest, by their arrivals."""

    name: str
    phases: tuple[
        tuple[float, float], ...
    ]  # seconds and requests per second; no seconds: so many at once
    acceptance: float
    hardware: Hardware
    parts: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"": (0.0, math.inf)}
    )  # suffix -> seconds
    new_clock: Callable[[], VirtualClock] = VirtualClock

    def load(self, seed: int) -> Load:
        """Return the requests: prompts of 50 to 350 tokens, outputs of 40 to 160."""
        rng = np.random.default_rng(seed)
        jobs = list[Job]()
        begin_s = 0.0
        for seconds, rate in self.phases:
            number = round(seconds * rate) if seconds else round(rate)
            at_s = poisson(rng, rate, number) if seconds else np.zeros(number)
            sizes = zip(
                rng.integers(50, 350, number).tolist(),
                rng.integers(40, 160, number).tolist(),
                strict=True,
            )
            jobs += [
                Job(begin_s + at, *size) for at, size in zip(at_s.tolist(), sizes, strict=True)
            ]
            begin_s += seconds
        return Load.of(self.name, jobs, TextModel(self.acceptance, 12.0), rng)

    def latencies_s(self, system: str, seed: int) -> dict[str, float]:
        """Return the mean latency of the requests of each part, by the scenario's name with the
        part's.
        """
        load = self.load(seed)
        simulation = Simulation(
            load.jobs,
            load.library,
            self.hardware,
            config_of(SYSTEMS[system]),
            seed=seed,
            new_clock=self.new_clock,
        )
        outcomes = simulation.run().outcomes
        found = dict[str, float]()
        for part, (first_s, last_s) in self.parts.items():
            own = [o.finish_s - o.arrival_s for o in outcomes if first_s <= o.arrival_s < last_s]
            found[self.name + part] = float(np.mean(own))
        return found


LARGE = replace(HARDWARE["llama-70b-4xh100"], kv_tokens=10**6)
SMALL = replace(HARDWARE["llama-7b-h100"], kv_tokens=10**6)
RUSH = ((10.0, 40.0), (30.0, 2.0))
STEADY = ((180.0, 6.0),)
SCENARIOS = [
    *(
        Scenario(f"first {number} requests at once, acceptance {acceptance:g}", ((0.0, number),), acceptance, LARGE)
        for number in (4, 32, 128)
        for acceptance in (0.4, 0.6, 0.8)
    ),
    Scenario("first 64 requests at once, small model", ((0.0, 64),), 0.6, SMALL),
    *(
        Scenario(f"profile: {what}, {rate:g}/s", ((60.0, rate),), 0.7, BusyProfile(**vars(LARGE), **factors))
        for what, factors in {
            "draft 5 times too slow": {"draft_factor": 5.0},
            "verify twice too slow": {"verify_factor": 2.0},
            "draft 5 times too fast": {"draft_factor": 0.2},
        }.items()
        for rate in (0.5, 4.0)
    ),
    Scenario("quiet after a rush", RUSH, 0.6, SMALL, {": all": (0.0, math.inf), ": the quiet": (10.0, math.inf)}),
    Scenario(
        "a minute at half speed", STEADY, 0.6, LARGE, {": that minute": SLOW_S, ": afterwards": (SLOW_S[1], math.inf)},
        partial(SlowedClock, *SLOW_S),
    ),
]  # fmt: skip


def main(
    seeds: Annotated[int, typer.Option()] = 5,
    only: Annotated[str, typer.Option(help="Only scenarios whose names contain this.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate every scenario with several seeds."""
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        if only not in scenario.name:
            continue
        runs = {
            name: [scenario.latencies_s(name, seed) for seed in range(seeds)] for name in SYSTEMS
        }
        for label in (scenario.name + part for part in scenario.parts):
            latencies = {name: [run[label] for run in own] for name, own in runs.items()}
            fixed = [
                min(own)
                for own in zip(
                    *(own for name, own in latencies.items() if name != OURS), strict=True
                )
            ]
            ratios = [ours / best for ours, best in zip(latencies[OURS], fixed, strict=True)]
            results[label] = {"auto_to_best_fixed": ratios, "latency_s": latencies}
            means = "  ".join(f"{name} {np.mean(own):.2f}" for name, own in latencies.items())
            print(
                f"{label}: {np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})   s: {means}",
                flush=True,
            )
    if json_path is not None:
        json_path.write_text(
            json.dumps({"provenance": provenance(seeds=seeds), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
