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

from benchmarks.intervals import interval_of
from hf_slospec.cli.benchmark import provenance
from hf_slospec.lab.comparison import Load
from hf_slospec.lab.hardware import HARDWARE
from hf_slospec.lab.outcomes import Run
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, poisson

SYSTEMS = {
    "auto": 'auto {"admission": "fcfs", "max_batch": 256, "prefill_chunk": 2048}',
    "plain": '{"policy": "none", "admission": "fcfs", "max_batch": 256, "prefill_chunk": 2048}',
}
SHARE, KV_TOKENS = 28 / 36, 60_000  # relative to the target's own
RATES, ACCEPTANCE, SPAN_S = (6.0, 10.0, 14.0), 0.4, 120.0
PROMPT_TOKENS, NEW_TOKENS = (500, 2000), (100, 500)


def latency_s(system: str, rate: float, seed: int, kv_tokens: int = KV_TOKENS, share: float = 0.0) -> float:
    """Return the mean seconds from arrival to the last token of a Poisson load of two minutes."""
    rng = np.random.default_rng(seed)
    number = round(rate * SPAN_S)
    sizes = zip(rng.integers(*PROMPT_TOKENS, number).tolist(), rng.integers(*NEW_TOKENS, number).tolist(), strict=True)
    jobs = [Job(at_s, *size) for at_s, size in zip(poisson(rng, rate, number).tolist(), sizes, strict=True)]
    load = Load.of(f"{rate:g}/s", jobs, TextModel(ACCEPTANCE, 12.0), rng)
    hardware = replace(HARDWARE["llama-8b-h100"], kv_tokens=kv_tokens, draft_kv_share=share)
    run: Run = Simulation(load.jobs, load.library, hardware, config_of(SYSTEMS[system]), seed=seed).run()
    return float(np.mean([outcome.finish_s - outcome.arrival_s for outcome in run.outcomes]))


def main(
    seeds: Annotated[int, typer.Option()] = 3,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate every rate with several seeds."""
    results: dict[str, Any] = {}
    every = int(KV_TOKENS * (1.0 + SHARE))
    for rate in RATES:
        runs = {
            "plain": [latency_s("plain", rate, seed) for seed in range(seeds)],
            "plain with all the memory": [latency_s("plain", rate, seed, every) for seed in range(seeds)],
            "auto": [latency_s("auto", rate, seed) for seed in range(seeds)],
            "auto, lends": [latency_s("auto", rate, seed, share=SHARE) for seed in range(seeds)],
        }
        ratios = [lends_s / own_s for lends_s, own_s in zip(runs["auto, lends"], runs["auto"], strict=True)]
        results[f"{rate:g}/s"] = {"latency_s": runs, "lending to none": interval_of(ratios)}
        means = "  ".join(f"{name} {np.mean(own):.2f} s" for name, own in runs.items())
        print(f"{rate:g}/s: {np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})   {means}", flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"provenance": provenance(seeds=seeds), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
