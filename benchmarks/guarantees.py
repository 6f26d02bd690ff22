"""Stated against kept probabilities of ``SLOSpecConfig(guarantee=...)``, in the simulator.

    python benchmarks/guarantees.py --json benchmarks/results/guarantees.json --plot docs/images/guarantees.png

A guarantee is kept if every window of ten consecutive tokens meets the TPOT SLO. Requests arrive steadily or in bursts,
faster than their SLOs can be guaranteed, so that the probability decides how many guarantees are given; requests that
get none are served as best effort and do not count.
"""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_slospec.lab import HARDWARE, Load, Simulation, TextModel, gamma, jobs_of, poisson
from hf_slospec.lab.outcomes import Outcome
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.workload import Kind, Length

HARDWARE_NAME = "llama-70b-4xa100"
KIND = Kind("coding", 1.0, Length(150, 60, 1000), Length(206, 80, 512, 11), tpot_slo_s=0.08, ttft_slo_s=1.0)
TEXTS = TextModel(0.84, 12.0)
LEVELS = (0.8, 0.9, 0.95, 0.99)
RATE, BURSTS = 14.0, 3.0  # requests per second, and coefficient of variation of the gaps in bursts
CONFIG: dict[str, Any] = {"max_batch": 256}


def one(arrivals: str, level: float | None, number: int, seed: int, rate: float) -> dict[str, Any]:
    """Simulate one load.  -> its figures"""
    logging.disable(logging.WARNING)  # Requests that can no longer meet their SLOs are logged.
    rng, hardware = np.random.default_rng(seed), HARDWARE[HARDWARE_NAME]
    times_s = poisson(rng, rate, number) if arrivals == "steady" else gamma(rng, rate, number, BURSTS)
    jobs = jobs_of((KIND,), times_s, rng, lambda tokens: float(hardware.target(tokens, 1, tokens)))
    load = Load.of(arrivals, jobs, TEXTS, rng)
    config = config_of("auto").model_copy(update={**CONFIG, "guarantee": level})
    run = Simulation(load.jobs, load.library, hardware, config, seed=seed).run()
    counted = [
        outcome for outcome in run.outcomes if (outcome.guaranteed if level is None else outcome.window_guarantee)
    ]
    throughput = sum(outcome.output_tokens for outcome in run.outcomes) / run.seconds
    good = sum(outcome.output_tokens for outcome in counted if outcome.windows_kept) / run.seconds
    return {
        "arrivals": arrivals, "stated": level, "seed": seed, "requests": number, "rate": rate,
        "guarantees": len(counted), "throughput": throughput, "tokens_per_s_of_kept": good,
        **{f"kept{name}": value for name, value in kept(counted).items()},
        "attained": sum(bool(outcome.attained) for outcome in counted) / max(len(counted), 1),
    }  # fmt: skip


def kept(outcomes: list[Outcome]) -> dict[str, float | None]:
    """Return the share of kept guarantees with Wilson's 95 % interval, which takes requests as independent."""
    number = len(outcomes)
    if not number:
        return {"": None, "_low": None, "_high": None}
    share, z2 = sum(bool(outcome.windows_kept) for outcome in outcomes) / number, 1.96**2 / number
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return {"": share, "_low": middle - half, "_high": middle + half}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot kept over stated probabilities."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5.6, 4.6), layout="constrained")
    panel.plot([75, 100], [75, 100], color="0.6", lw=1, label="kept as stated")
    panel.fill_between([75, 100], [72, 97], [78, 103], color="0.92", label="within 3 points")
    for arrivals, colour, marker, shift in (("steady", "#0072B2", "o", -0.15), ("bursts", "#D55E00", "^", 0.15)):
        for level in LEVELS:
            rows = [row for row in results if row["arrivals"] == arrivals and row["stated"] == level]
            shares = [100 * row["kept"] for row in rows]
            x = 100 * level + shift
            panel.plot([x] * len(rows), shares, color=colour, marker=marker, ls="none", mfc="none", alpha=0.5)
            panel.plot([x], [np.mean(shares)], color=colour, marker=marker, ls="none",
                       label=f"{arrivals}, mean" if level == LEVELS[0] else None)  # fmt: skip
    panel.set(xlabel="stated probability, %", ylabel="guarantees kept, %", xlim=(77, 100.5), ylim=(74, 100.5))
    panel.grid(alpha=0.3)
    panel.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def main(
    number: Annotated[int, typer.Option(help="Requests of each load.")] = 1000,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = RATE,
    seeds: Annotated[int, typer.Option(help="Runs of each load.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Simulate all levels, steadily and in bursts, and the constant margin beside them."""
    cases = [
        (arrivals, level, number, seed, rate)
        for seed in range(seeds) for arrivals in ("steady", "bursts") for level in (None, *LEVELS)
    ]  # fmt: skip
    results = []
    with ProcessPoolExecutor(workers) as pool:
        for row in pool.map(one, *zip(*cases, strict=True)):
            results.append(row)
            print(
                f"{row['arrivals']:7s} stated {row['stated'] or 'nothing'}: {row['guarantees']} of {number}, kept "
                f"{row['kept']:.3f} ({row['kept_low']:.3f} to {row['kept_high']:.3f}); {row['throughput']:.0f} "
                f"tokens/s, of kept guarantees {row['tokens_per_s_of_kept']:.0f}; SLOs attained {row['attained']:.3f}",
                flush=True,
            )
    if plot is not None:
        draw(results, plot)
    if json_path is not None:
        from hf_slospec.cli.benchmark import provenance

        facts = provenance(
            hardware=HARDWARE_NAME, rate=rate, bursts=BURSTS, requests=number, seeds=seeds,
            tpot_slo_s=KIND.tpot_slo_s, texts=TEXTS.model_dump(), config=CONFIG,
        )  # fmt: skip
        json_path.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
