"""AdaServe's figures 8, 9 and 12 (Llama-3.1-70B on four A100) in the simulator, with the published values.

    python benchmarks/papers/adaserve.py --json benchmarks/results/papers-adaserve.json

Uses the paper's arrival traces and values read from its figures if they are in ../shared/reference, and otherwise only
synthetic traces with the same statistics. All points have the same parameters.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_slospec.cli.benchmark import provenance
from hf_slospec.sim.hardware import HARDWARE, Hardware, lines
from hf_slospec.sim.outcomes import METRICS
from hf_slospec.sim.simulation import Simulation
from hf_slospec.sim.systems import config_of
from hf_slospec.sim.texts import Library, TextModel
from hf_slospec.sim.traces import read_trace
from hf_slospec.sim.workload import Job, early_ends, gamma, jobs_of, mix_of

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
BASE_TPOT_S = 0.030  # of the 70B model, almost without load
RATES = ("2.6", "2.8", "3.0", "3.4", "3.6", "4.0", "4.2", "4.4", "4.8")
FITTED = ("2.6", "3.4", "4.2", "4.8")  # the parameters below were fitted on these rates and are validated on the others
PUBLISHED = {"vllm": "vLLM", "sarathi": "Sarathi", "adaserve": "AdaServe", "vllm-spec4": "vLLM-Spec4",
             "vllm-spec6": "vLLM-Spec6", "vllm-spec8": "vLLM-Spec8"}  # fmt: skip
OURS = ("auto", 'auto {"admission": "fcfs", "prefill": "first", "prefill_chunk": 1024}')


@dataclass(frozen=True)
class Parameters:
    """Parameters that the paper does not publish, except the step times of the model (hf_slospec.sim.hardware)."""

    acceptance: float = 0.84  # of a drafted token; figure 12 fits 0.83-0.84
    spread: float = 12.0  # of the acceptance of requests
    whole: float = 0.6  # share of outputs with 256 tokens; their mean is then 206, as goodput divided by rate
    draft_ms: float = 4.5  # of a level, for AdaServe and hf_slospec
    vllm_draft_ms: float = 5.0  # of a level in vLLM 0.8.4
    vllm_request_ms: float = 0.7  # for every request of a drafting step in vLLM 0.8.4
    mixed_ms: float = 10.0  # for a step with prompt chunks and decoding, for Sarathi and hf_slospec
    budget: int = 256  # token budget B of AdaServe

    def hardware(self, system: str) -> Hardware:
        """Return the latencies for a system."""
        base = replace(HARDWARE["llama-70b-4xa100"], mixed_s=self.mixed_ms / 1e3)
        if system.startswith("vllm-spec"):
            draft = lines((self.vllm_draft_ms, 0.004))
            return replace(base, draft=draft, drafting_request_s=self.vllm_request_ms / 1e3)
        return replace(base, draft=lines((self.draft_ms, 0.004)))


def jobs_at(rate: str, parameters: Parameters, seed: int) -> list[Job]:
    """Return the requests of a trace, or of a synthetic one."""
    trace, rng = REFERENCE / "adaserve_traces" / f"rps{rate}.csv", np.random.default_rng(seed)
    if trace.exists():
        jobs = read_trace(trace, BASE_TPOT_S)
    else:
        number = int(360 * float(rate))
        jobs = jobs_of(mix_of("adaserve"), gamma(rng, float(rate), number, 1.2), rng, lambda tokens: 0.0)
        jobs = [replace(job, output_tokens=256) for job in jobs]
    return early_ends(jobs, rng, parameters.whole)


def simulated(system: str, rate: str, parameters: Parameters, seed: int) -> dict[str, Any]:
    """Return the figures of one system at one rate."""
    jobs, rng = jobs_at(rate, parameters, seed), np.random.default_rng(seed + 1)
    model = TextModel(parameters.acceptance, parameters.spread)
    library = Library([model.write(rng, job.output_tokens) for job in jobs])
    config = config_of(system)
    if config.policy == "adaserve":
        config = config.model_copy(update={"token_budget": parameters.budget})
    run = Simulation(jobs, library, parameters.hardware(system), config, seed=seed).run(system)
    figures = run.summary(METRICS["adaserve"])
    return {key: figures[key] for key in ("attainment", "goodput", "throughput", "tokens_per_request_and_step",
                                          "tpot_ms", "ttft_s", "ttft_p99_s", "nodes_per_step", "depth")} | {
        "kinds": {kind: own["attainment"] for kind, own in figures["kinds"].items()}
    }  # fmt: skip


def published() -> dict[tuple[str, str, str], float]:
    """Return the published values by (figure, system, rate); none without the reference."""
    path = REFERENCE / "adaserve_llama70b_figures.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["figure"], row["system"], row["x"]): float(row["value"]) for row in csv.DictReader(file)}


def main(
    systems: Annotated[str, typer.Option(help="Comma-separated, or `published`, `all`.")] = "all",
    rates: Annotated[str, typer.Option(help="Comma-separated, or `all`, `fitted`.")] = "all",
    seeds: Annotated[int, typer.Option(help="Runs of each system and rate; means are shown.")] = 2,
    parameters: Annotated[str, typer.Option(help="Fields of Parameters as JSON.")] = "{}",
    sensitivity: Annotated[bool, typer.Option(help="Also vary the unpublished parameters, at two rates.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate the figures."""
    logging.disable(logging.WARNING)
    chosen = Parameters(**json.loads(parameters))
    names = {"all": [*PUBLISHED, *OURS], "published": list(PUBLISHED)}.get(systems) or systems.split(",")
    at = {"all": RATES, "fitted": FITTED}.get(rates) or tuple(rates.split(","))
    found = measured(names, at, chosen, seeds)
    console = Console(width=150)
    errors = compared(found, console)
    record: dict[str, Any] = {
        "provenance": provenance(parameters=vars(chosen), fitted=FITTED, seeds=seeds),
        "results": found,
        "mean_absolute_error_of_attainment_points": errors,
    }
    if sensitivity:
        record["sensitivity"] = varied(chosen, console)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")


def measured(names: list[str], rates: tuple[str, ...], chosen: Parameters, seeds: int) -> dict[str, Any]:
    """Return means over seeds by system and rate."""
    found: dict[str, Any] = defaultdict(dict)
    turns = [(name, rate) for name in names for rate in rates]
    for name, rate in tqdm(turns, disable=not sys.stderr.isatty()):
        runs = [simulated(name, rate, chosen, 10 * seed) for seed in range(seeds)]
        means = {key: float(np.mean([run[key] for run in runs])) for key in runs[0] if key != "kinds"}
        kinds = {kind: float(np.mean([run["kinds"][kind] for run in runs])) for kind in runs[0]["kinds"]}
        found[name][rate] = {**means, "kinds": kinds}
    return found


def compared(found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print simulated and published values.  -> mean absolute errors of attainment by system"""
    printed, errors = published(), {}
    for figure, key, factor, digits in (("fig8_llama_attain", "attainment", 100.0, 1),
                                        ("fig9_llama_goodput", "goodput", 1.0, 0)):  # fmt: skip
        table = Table(title=f"{figure}: simulated / published")
        table.add_column("system")
        rates = list(next(iter(found.values())))
        for rate in rates:
            table.add_column(rate, justify="right")
        table.add_column("error", justify="right")
        for name, own in found.items():
            values = [factor * own[rate][key] for rate in rates]
            theirs = [printed.get((figure, PUBLISHED.get(name, ""), rate)) for rate in rates]
            cells = [
                f"{v:.{digits}f}" + ("" if t is None else f" / {t:g}") for v, t in zip(values, theirs, strict=True)
            ]
            pairs = [(v, t, r) for v, t, r in zip(values, theirs, rates, strict=True) if t is not None]
            shown = ""
            if pairs:
                error = float(np.mean([abs(v - t) for v, t, _ in pairs]))
                shown = f"{error:.1f}"
                if key == "attainment":
                    unseen = [abs(v - t) for v, t, r in pairs if r not in FITTED]
                    errors[name] = {"all": error, "not_fitted": float(np.mean(unseen)) if unseen else None}
            table.add_row(name, *cells, shown)
        console.print(table)
    return errors


def varied(chosen: Parameters, console: Console) -> dict[str, Any]:
    """Attainment of AdaServe and of ours, one parameter changed at a time."""
    changes: list[dict[str, Any]] = [
        {}, {"budget": 128}, {"budget": 192}, {"budget": 512}, {"draft_ms": 2.0}, {"draft_ms": 8.0},
        {"acceptance": 0.78}, {"acceptance": 0.88}, {"spread": 6.0}, {"spread": 50.0}, {"whole": 1.0},
        {"mixed_ms": 0.0},
    ]  # fmt: skip
    table = Table(title="attainment %, AdaServe and auto, one unpublished parameter changed")
    for heading in ("change", "AdaServe 3.4", "AdaServe 4.8", "auto 3.4", "auto 4.8"):
        table.add_column(heading, justify="right")
    found = {}
    for change in tqdm(changes, disable=not sys.stderr.isatty()):
        parameters = replace(chosen, **change)
        values = [100.0 * simulated(system, rate, parameters, 0)["attainment"] for system in ("adaserve", "auto")
                  for rate in ("3.4", "4.8")]  # fmt: skip
        found[json.dumps(change)] = values
        table.add_row(json.dumps(change), *(f"{value:.1f}" for value in values))
    console.print(table)
    return found


if __name__ == "__main__":
    typer.run(main)
