"""Mean latency with and without lending the memory of an idle drafter's K/V, in the simulator.

    python benchmarks/lending.py --json benchmarks/results/lending.json

The K/V per token of the draft is 28/36 of the target's, as that of Qwen3-0.6B is of Qwen3-8B's: 28 and 36 layers with 8
heads each. Without lending, that memory stays the drafter's while speculation does not pay.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_slospec.cli.benchmark import provenance
from hf_slospec.sim.comparison import Load
from hf_slospec.sim.hardware import HARDWARE
from hf_slospec.sim.intervals import interval_of
from hf_slospec.sim.outcomes import Run
from hf_slospec.sim.simulation import Simulation
from hf_slospec.sim.systems import config_of
from hf_slospec.sim.texts import TextModel
from hf_slospec.sim.workload import Job, poisson

SYSTEMS = {
    "auto": 'auto {"admission": "fcfs", "max_batch": 256, "prefill_chunk": 2048}',
    "plain": '{"policy": "none", "admission": "fcfs", "max_batch": 256, "prefill_chunk": 2048}',
}
SHARE, KV_TOKENS = 28 / 36, 60_000  # of the target's own
RATES, SPAN_S = (1.0, 4.0, 6.0, 8.0, 10.0), 120.0
PROMPT_TOKENS, NEW_TOKENS = (500, 2000), (100, 500)


def latency_s(system: str, share: float, rate: float, acceptance: float, seed: int) -> float:
    """Return the mean seconds from arrival to the last token of a Poisson load of two minutes."""
    rng = np.random.default_rng(seed)
    number = round(rate * SPAN_S)
    sizes = zip(rng.integers(*PROMPT_TOKENS, number).tolist(), rng.integers(*NEW_TOKENS, number).tolist(), strict=True)
    jobs = [Job(at_s, *size) for at_s, size in zip(poisson(rng, rate, number).tolist(), sizes, strict=True)]
    load = Load.of(f"{rate:g}/s", jobs, TextModel(acceptance, 12.0), rng)
    hardware = replace(HARDWARE["llama-8b-h100"], kv_tokens=KV_TOKENS, draft_kv_share=share)
    run: Run = Simulation(load.jobs, load.library, hardware, config_of(SYSTEMS[system]), seed=seed).run()
    return float(np.mean([outcome.finish_s - outcome.arrival_s for outcome in run.outcomes]))


def main(
    seeds: Annotated[int, typer.Option()] = 3,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate every rate and acceptance with several seeds."""
    results: dict[str, Any] = {}
    for acceptance in (0.4, 0.7):
        for rate in RATES:
            runs = {
                "plain": [latency_s("plain", 0.0, rate, acceptance, seed) for seed in range(seeds)],
                "auto": [latency_s("auto", 0.0, rate, acceptance, seed) for seed in range(seeds)],
                "auto, lends": [latency_s("auto", SHARE, rate, acceptance, seed) for seed in range(seeds)],
            }
            ratios = [with_s / without_s for with_s, without_s in zip(runs["auto, lends"], runs["auto"], strict=True)]
            label = f"acceptance {acceptance:g}, {rate:g}/s"
            results[label] = {"latency_s": runs, "lending to none": interval_of(ratios)}
            means = "  ".join(f"{name} {np.mean(own):.2f} s" for name, own in runs.items())
            print(f"{label}: {np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})   {means}", flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"provenance": provenance(seeds=seeds), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
