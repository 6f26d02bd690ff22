"""Which SLOs guaranteed requests keep, by load and by ``SLOSpecConfig(guarantee=...)``, in the
simulator.

    python benchmarks/guarantees.py --json benchmarks/results/guarantees.json --plot docs/images/guarantees.png

A guarantee is kept if the TTFT SLO is met, the mean TPOT over all tokens, and the TPOT over every
window of ten consecutive tokens. Requests arrive steadily or in bursts, at rates up to twice what
can be served; requests without a guarantee are served as best effort and do not count. Runs that
the JSON file has already are left out, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_slospec.lab import HARDWARE, Load, Simulation, TextModel, gamma, jobs_of, poisson
from hf_slospec.lab.outcomes import Outcome
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.workload import Kind, Length

HARDWARE_NAME = "llama-70b-4xa100"
KIND = Kind(
    "coding", 1.0, Length(150, 60, 1000), Length(206, 80, 512, 11), tpot_slo_s=0.08, ttft_slo_s=1.0
)
TIGHT_S = 0.045  # TPOT SLO that plain decoding beside prompts cannot keep
TEXTS = TextModel(0.84, 12.0)
RATES, BURSTS = (
    (6.0, 10.0, 14.0),
    3.0,
)  # requests per second, and coefficient of variation of the gaps in bursts
STATED = 0.95
CONFIG: dict[str, Any] = {"max_batch": 256}
COMPONENTS = ("ttft", "tpot", "windows", "all")


@dataclass(frozen=True)
class Case:
    """One load and the probability stated."""

    arrivals: str
    stated: float | None
    rate: float  # requests per second
    tpot_slo_s: float
    requests: int
    seed: int


def cases(number: int, seeds: int) -> list[Case]:
    """Return all cases, the most important ones first."""
    slo_s = KIND.tpot_slo_s or math.inf
    loads = [("steady", STATED), ("steady", None), ("bursts", STATED)]
    listed = [Case(*load, rate, slo_s, number, 0) for load in loads for rate in RATES]
    listed += [Case("steady", stated, 5.0, TIGHT_S, number // 2, 0) for stated in (STATED, None)]
    listed += [Case("steady", stated, max(RATES), slo_s, number, 0) for stated in (0.8, 0.99)]
    return [replace(case, seed=seed) for seed in range(seeds) for case in listed]


def run(case: Case) -> dict[str, Any]:
    """Simulate one load.  -> its figures"""
    logging.disable(logging.WARNING)  # Requests that can no longer meet their SLOs are logged.
    rng = np.random.default_rng(case.seed)
    hardware = HARDWARE[HARDWARE_NAME]
    is_steady = case.arrivals == "steady"
    times_s = (
        poisson(rng, case.rate, case.requests)
        if is_steady
        else gamma(rng, case.rate, case.requests, BURSTS)
    )
    kind = replace(KIND, tpot_slo_s=case.tpot_slo_s)
    jobs = jobs_of((kind,), times_s, rng, lambda tokens: float(hardware.target(tokens, 1, tokens)))
    load = Load.of(case.arrivals, jobs, TEXTS, rng)
    config = config_of("auto").model_copy(update={**CONFIG, "guarantee": case.stated})
    done = Simulation(load.jobs, load.library, hardware, config, seed=case.seed).run()
    guaranteed = [outcome for outcome in done.outcomes if outcome.guaranteed]
    kept = [kept_of(outcome) for outcome in guaranteed]
    good = sum(
        outcome.output_tokens
        for outcome, parts in zip(guaranteed, kept, strict=True)
        if parts["all"]
    )
    return {
        **asdict(case), "guarantees": len(guaranteed),
        **{f"kept_{name}": share([parts[name] for parts in kept]) for name in COMPONENTS},
        "interval": wilson([parts["all"] for parts in kept]),
        "throughput": sum(outcome.output_tokens for outcome in done.outcomes) / done.seconds,
        "tokens_per_s_of_kept": good / done.seconds,
        "attained_by_all_requests": share([bool(outcome.attained) for outcome in done.outcomes]),
    }  # fmt: skip


def kept_of(outcome: Outcome) -> dict[str, bool]:
    """Return which parts of the promise were kept for a request."""
    slo_s = outcome.tpot_slo_s
    ttft_slo_s = outcome.ttft_slo_s
    parts = {
        "ttft": ttft_slo_s is None or outcome.ttft_s <= ttft_slo_s,
        "tpot": slo_s is None or outcome.tpot_s is None or outcome.tpot_s <= slo_s,
        "windows": outcome.windows_kept is not False,
    }
    return {**parts, "all": all(parts.values())}


def share(kept: list[bool]) -> float | None:
    """Return the share that was kept."""
    return sum(kept) / len(kept) if kept else None


def wilson(kept: list[bool]) -> tuple[float, float] | None:
    """Return Wilson's 95 % interval of the share, which takes requests as independent."""
    if not kept:
        return None
    mean = sum(kept) / len(kept)
    z2 = 1.96**2 / len(kept)
    middle, half = (
        (mean + z2 / 2) / (1 + z2),
        math.sqrt(mean * (1 - mean) * z2 + z2**2 / 4) / (1 + z2),
    )
    return middle - half, middle + half


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot what was kept, and how many were guaranteed, over the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    shown = [
        ("steady", STATED, "#0072B2", "o", "95 % stated"), ("bursts", STATED, "#D55E00", "^", "95 % stated, bursts"),
        ("steady", None, "0.5", "s", "none stated"),
    ]  # fmt: skip
    for arrivals, stated, colour, marker, label in shown:
        rows = [
            row for row in results
            if (row["arrivals"], row["stated"], row["tpot_slo_s"]) == (arrivals, stated, KIND.tpot_slo_s)
            and row["rate"] in RATES
        ]  # fmt: skip
        rates = [row["rate"] for row in rows]
        style = {"color": colour, "marker": marker, "label": label}
        panels[0].plot(rates, [100 * row["kept_all"] for row in rows], **style)
        panels[1].plot(rates, [100 * row["guarantees"] / row["requests"] for row in rows], **style)
    panels[0].axhline(100 * STATED, color="0.6", lw=1, ls="--")
    panels[0].set(ylabel="guarantees that kept all SLOs, %", ylim=(0, 102))
    panels[1].set(ylabel="requests guaranteed, %", ylim=(0, 102))
    for panel in panels:
        panel.set(xlabel="requests per second")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower left")
    figure.savefig(path, dpi=120)


def main(
    number: Annotated[int, typer.Option(help="Requests of each load.")] = 2000,
    seeds: Annotated[int, typer.Option(help="Runs of each load.")] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Results; runs that it has are left out.")
    ] = None,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Simulate all loads, with one probability stated, with others and with none."""
    from hf_slospec.cli.benchmark import provenance

    facts = provenance(
        hardware=HARDWARE_NAME, bursts=BURSTS, requests=number, seeds=seeds, texts=TEXTS.model_dump(), config=CONFIG,
        ttft_slo_s=KIND.ttft_slo_s,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    if json_path is not None and json_path.exists():
        results = json.loads(json_path.read_text())["results"]
    for case in cases(number, seeds):
        if not any(asdict(case).items() <= row.items() for row in results):
            results.append(row := run(case))
            print(json.dumps(row), flush=True)
            if json_path is not None:
                json_path.write_text(
                    json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
                )
    if plot is not None:
        draw(results, plot)


if __name__ == "__main__":
    typer.run(main)
