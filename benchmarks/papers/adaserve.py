"""AdaServe's figures 8 to 12 and 15 (Llama-3.1-70B on four A100) in the simulator, with the
published values.

    python benchmarks/papers/adaserve.py --runs runs.jsonl --json benchmarks/results/papers-adaserve.json \
        --plot docs/images/adaserve.png
    python benchmarks/papers/adaserve.py --workloads --json benchmarks/results/papers-adaserve-workloads.json

Uses the paper's arrival traces and values read from its figures if they are in ../shared/reference,
and otherwise only synthetic traces with the same statistics. All points have the same parameters.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, Key, bounds_of, resumed, shares_closed, shown
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.intervals import draw, interval_of, scaled, wilson
from hf_slospec.cli.benchmark import provenance
from hf_slospec.lab.files import read_trace
from hf_slospec.lab.hardware import HARDWARE, Hardware, lines
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of, is_oracle
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job, gamma, jobs_of, mix_of

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
BASE_TPOT_S = 0.030  # the 70B model's, almost without load
RATES = ("2.6", "2.8", "3.0", "3.4", "3.6", "4.0", "4.2", "4.4", "4.8")
FITTED = (
    "2.6",
    "3.4",
    "4.2",
    "4.8",
)  # the parameters below were fitted on these rates and are validated on the others
PUBLISHED = {"vllm": "vLLM", "sarathi": "Sarathi", "adaserve": "AdaServe", "vllm-spec4": "vLLM-Spec4",
             "vllm-spec6": "vLLM-Spec6", "vllm-spec8": "vLLM-Spec8"}  # fmt: skip
TRUE_PROBS = (
    "adaserve-oracle"  # AdaServe with true path probabilities: its Algorithm 1 is optimal then
)
OURS = ("auto", 'auto {"admission": "fcfs", "prefill": "first", "prefill_chunk": 1024}')
# Knows acceptance. With a smaller batch more requests wait, which the metric does not count; BEST
# is the best of all.
ORACLES = ("oracle", 'oracle {"max_batch": 24}', 'oracle {"max_batch": 16}',
           'oracle {"admission": "fcfs", "prefill": "chunked", "prefill_chunk": 256}')  # fmt: skip
# the latter of any schedule, see bounds.py
BEST = "oracle, best"
BOUND = "bound"
FIGURES = ("attainment", "goodput", "throughput", "tokens_per_request_and_step", "tpot_ms", "ttft_s", "ttft_p99_s",
           "nodes_per_step", "depth", "step_ms", "requests_per_step", "draft_share")  # fmt: skip
PLOTTED = {"auto": "auto", "adaserve": "AdaServe", "oracle": "oracle", BEST: BEST, BOUND: BOUND}
FIXED = ("vllm", "vllm-spec4", "vllm-spec6", "vllm-spec8")  # the best of them is plotted, by rate
KINDS = ("urgent", "chat", "summary")  # in order of their SLOs
# Figure 1; a larger batch never preempts, so priorities do nothing
PRIORITY = 'vllm-priority {"max_batch": 16}'
# Of figures 10 and 11, and as published (figures 1 and 15), at 4 requests per second.
WORKLOADS: dict[str, dict[str, float]] = {
    "as published": {}, "urgent 0.9": {"urgent": 0.9}, "scale 0.8": {"slo_scale": 0.8},
}  # fmt: skip
SPAN_S = 120.0  # seconds: a third of the trace
COMPARED = ("vllm", "sarathi", "vllm-spec4", "adaserve", "auto")


@dataclass(frozen=True)
class Parameters:
    """Parameters that the paper does not publish, except the step times of the model
    (hf_slospec.lab.hardware).
    """

    acceptance: float = 0.84  # probability for a drafted token; figure 12 fits 0.83-0.84
    spread: float = 12.0  # concentration of the requests' acceptance
    whole: float = (
        0.6  # share of outputs with 256 tokens; their mean is then 206, as goodput divided by rate
    )
    draft_ms: float = 4.5  # per level, for AdaServe and hf_slospec
    vllm_draft_ms: float = 5.0  # per level in vLLM 0.8.4
    vllm_request_ms: float = 0.7  # for every request of a drafting step in vLLM 0.8.4
    mixed_ms: float = 10.0  # for a step with prompt chunks and decoding, for Sarathi and hf_slospec
    budget: int | None = (
        256  # token budget B of AdaServe; the artifact has 512. None: the ridge of the roofline
    )
    urgent: float | None = (
        None  # share of urgent requests, the others in equal parts; None: as in the trace
    )
    slo_scale: float = 1.2  # SLO of urgent requests, relative to the base
    span_s: float | None = None  # only requests that arrive within it

    def hardware(self, system: str) -> Hardware:
        """Return the latencies for a system."""
        base = replace(HARDWARE["llama-70b-4xa100"], mixed_s=self.mixed_ms / 1e3)
        if system.startswith("vllm-spec"):
            draft = lines((self.vllm_draft_ms, 0.004))
            return replace(base, draft=draft, drafting_request_s=self.vllm_request_ms / 1e3)
        return replace(base, draft=lines((self.draft_ms, 0.004)))


def jobs_at(rate: str, parameters: Parameters, seed: int) -> list[Job]:
    """Return the requests of a trace, or of a synthetic one."""
    trace = REFERENCE / "adaserve_traces" / f"rps{rate}.csv"
    rng = np.random.default_rng(seed)
    if trace.exists():
        jobs = read_trace(trace, BASE_TPOT_S)
    else:
        number = int(360 * float(rate))
        jobs = jobs_of(
            mix_of("adaserve"), gamma(rng, float(rate), number, 1.2), rng, lambda tokens: 0.0
        )
        jobs = [replace(job, output_tokens=256) for job in jobs]
    jobs = [job for job in jobs if parameters.span_s is None or job.arrival_s < parameters.span_s]
    return early_ends(of_kinds(jobs, parameters, rng), rng, parameters.whole)


def early_ends(jobs: list[Job], rng: np.random.Generator, full_share: float) -> list[Job]:
    """Return the requests with outputs that may end early; the old lengths become
    ``max_new_tokens``.

    Args:
        full_share: share of the requests that keep their length; the lengths of all others are
            uniform below it, from 5 tokens on.
    """
    shortened = []
    for job in jobs:
        length = job.output_tokens
        if rng.random() >= full_share:
            length = int(rng.integers(min(5, length), length + 1))
        limit = job.max_new_tokens or job.output_tokens
        shortened.append(replace(job, output_tokens=length, max_new_tokens=limit))
    return shortened


def of_kinds(jobs: list[Job], parameters: Parameters, rng: np.random.Generator) -> list[Job]:
    """Return the requests with their classes, with other shares of these or other SLOs where the
    parameters say so.
    """
    slos_s = sorted({job.tpot_slo_s or 0.0 for job in jobs})
    jobs = [replace(job, kind=KINDS[slos_s.index(job.tpot_slo_s or 0.0)]) for job in jobs]
    if parameters.urgent is not None:
        by_kind = [[job for job in jobs if job.kind == kind] for kind in KINDS]
        rest = (1.0 - parameters.urgent) / 2.0
        drawn = rng.choice(len(KINDS), size=len(jobs), p=(parameters.urgent, rest, rest))
        chosen = [by_kind[kind][rng.integers(len(by_kind[kind]))] for kind in drawn]
        jobs = [
            replace(new, arrival_s=job.arrival_s) for new, job in zip(chosen, jobs, strict=True)
        ]
    if parameters.slo_scale != Parameters.slo_scale:
        slo_s = parameters.slo_scale * BASE_TPOT_S
        jobs = [replace(job, tpot_slo_s=slo_s) if job.kind == KINDS[0] else job for job in jobs]
    return jobs


def simulated(system: str, rate: str, parameters: Parameters, seed: int) -> Figures:
    """Return the figures of one system at one rate, or those of :data:`BOUND`."""
    jobs = jobs_at(rate, parameters, seed)
    rng = np.random.default_rng(seed + 1)
    model = TextModel(parameters.acceptance, parameters.spread)
    library = Library([model.write(rng, job.output_tokens) for job in jobs])
    if system == BOUND:
        bounds = bounds_of(jobs, library, parameters.hardware(OURS[0]), (*PUBLISHED, *OURS))
        own = {"attainment": bounds.attainment("adaserve"), "goodput": bounds.goodput("adaserve")}
        return {**own, "throughput": bounds.throughput(), "requests": len(jobs)}
    config = config_of(system)
    if config.admission == "priority":  # elsewhere priorities would change what the figures compare
        jobs = [replace(job, priority=KINDS.index(job.kind)) for job in jobs]
    if config.policy == "adaserve":
        config = config.model_copy(update={"token_budget": parameters.budget})
    simulation = Simulation(
        jobs, library, parameters.hardware(system), config, seed=seed, oracle=is_oracle(system)
    )
    figures = simulation.run(system).summary(METRICS["adaserve"])
    return {key: figures[key] for key in (*FIGURES, "requests")} | {
        "kinds": {kind: own["attainment"] for kind, own in figures["kinds"].items()}
    }


def published() -> dict[tuple[str, str, str], float]:
    """Return the published values by (figure, system, rate); none without the reference."""
    path = REFERENCE / "adaserve_llama70b_figures.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (row["figure"], row["system"], row["x"]): float(row["value"])
            for row in csv.DictReader(file)
        }


def main(
    systems: Annotated[
        str, typer.Option(help="Semicolon-separated, or `published`, `all`.")
    ] = "all",
    rates: Annotated[str, typer.Option(help="Comma-separated, or `all`, `fitted`.")] = "all",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each system and rate; means are shown.")
    ] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    parameters: Annotated[str, typer.Option(help="Fields of Parameters as JSON.")] = "{}",
    sensitivity: Annotated[
        bool, typer.Option(help="Also vary the unpublished parameters, at two rates.")
    ] = False,
    workloads: Annotated[
        bool, typer.Option(help="Only figures 1, 10, 11 and 15, a third of the trace.")
    ] = False,
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished runs, to resume from.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot attainment and goodput to this PNG.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate the figures."""
    logging.disable(logging.WARNING)
    chosen = Parameters(**json.loads(parameters))
    if workloads:
        other = by_workload(chosen, workers, kept)
        if json_path is not None:
            facts = provenance(parameters=vars(chosen), rate="4.0", span_s=SPAN_S)
            json_path.write_text(
                json.dumps({"provenance": facts, "results": other}, indent=1) + "\n"
            )
        return
    every = [*PUBLISHED, TRUE_PROBS, *OURS, *ORACLES, BOUND]
    names = {"all": every, "published": list(PUBLISHED)}.get(systems) or systems.split(";")
    at = {"all": RATES, "fitted": FITTED}.get(rates) or tuple(rates.split(","))
    runs = measured(names, at, chosen, seeds, workers, kept)
    found = {name: {rate: summary(runs[name][rate]) for rate in at} for name in runs}
    console = Console(width=180)
    errors = compared(found, console)
    record: dict[str, Any] = {
        "provenance": provenance(parameters=vars(chosen), fitted=FITTED, seeds=seeds),
        "results": found,
        "mean_absolute_error_of_attainment_points": errors,
        "share of the distance from the best other system": closed(runs, at, console),
    }
    if sensitivity:
        record["sensitivity"] = varied(chosen, console)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    if plot is not None:
        draw_figures(found, at, plot)


def by_workload(
    chosen: Parameters, workers: int, kept: Path | None
) -> dict[str, dict[str, Figures]]:
    """Print and return the figures of every workload and system."""
    tasks: dict[Key, partial[Figures]] = {
        (name, system): partial(
            simulated, system, "4.0", replace(chosen, span_s=SPAN_S, **change), 0
        )
        for name, change in WORKLOADS.items()
        for system in (*COMPARED, *(() if change else (PRIORITY,)))
    }
    found = resumed(tasks, workers, kept)
    results = dict[str, dict[str, Figures]]()
    for name, system in tasks:
        own = results.setdefault(name, {})[system] = found[name, system]
        kinds = ", ".join(f"{kind} {100.0 * share:.1f}" for kind, share in own["kinds"].items())
        print(
            f"{name}, {system}: attained {100.0 * own['attainment']:.1f} % ({kinds}), {own['goodput']:.0f} tokens/s"
        )
    return results


Runs = dict[str, dict[str, list[Figures]]]  # by system and rate, one for each seed


def measured(
    names: list[str],
    rates: tuple[str, ...],
    chosen: Parameters,
    seeds: int,
    workers: int,
    kept: Path | None,
) -> Runs:
    """Return the runs of every system and of the best oracle, figure by figure; see
    :func:`replays.resumed`.
    """
    parameters = json.dumps(vars(chosen))
    keys = [(name, rate, seed) for name in names for rate in rates for seed in range(seeds)]
    tasks: dict[Key, partial[Figures]] = {
        (parameters, name, rate, seed): partial(simulated, name, rate, chosen, 10 * seed)
        for name, rate, seed in keys
    }
    done = resumed(tasks, workers, kept)
    runs = {
        name: {
            rate: [done[parameters, name, rate, seed] for seed in range(seeds)] for rate in rates
        }
        for name in names
    }
    if oracles := [name for name in names if name in ORACLES]:
        runs[BEST] = {
            rate: [
                {
                    key: max(runs[name][rate][seed][key] for name in oracles)
                    for key in ("attainment", "goodput")
                }
                | {"requests": runs[oracles[0]][rate][seed]["requests"]}
                for seed in range(seeds)
            ]
            for rate in rates
        }
    return runs


def summary(runs: list[Figures]) -> dict[str, Any]:
    """Return means with 95 % intervals: Wilson's over the requests of all seeds, Student's over
    seeds for the rest.
    """
    number = sum(run["requests"] for run in runs)
    attained = sum(round(run["attainment"] * run["requests"]) for run in runs)
    found: dict[str, Any] = {
        key: interval_of([run[key] for run in runs]) for key in FIGURES if key in runs[0]
    }
    found["attainment"] = wilson(attained, number)
    if "kinds" in runs[0]:
        found["kinds"] = {
            kind: float(np.mean([run["kinds"][kind] for run in runs])) for kind in runs[0]["kinds"]
        }
    return found


def draw_figures(found: dict[str, Any], rates: tuple[str, ...], path: Path) -> None:
    """Plot attainment and goodput by rate."""
    panels = {
        "requests that attain their SLO, %": lines_of(found, rates, "attainment", 100.0),
        "goodput, tokens/s": lines_of(found, rates, "goodput", 1.0),
    }
    model = "Simulated: Llama-3.1-70B, draft of 1B, four A100"
    draw(panels, "requests per second", path, f"{model}; vertical lines: 95 % intervals")


def lines_of(
    found: dict[str, Any], rates: tuple[str, ...], key: str, factor: float
) -> dict[str, Any]:
    """Return what is plotted of one figure: by name and rate, with the best fixed system of each
    rate.
    """
    chosen = {label: found[name] for name, label in PLOTTED.items() if name in found}
    if fixed := [found[name] for name in FIXED if name in found]:
        chosen["best fixed"] = {
            rate: max((own[rate] for own in fixed), key=lambda o: o[key]["mean"]) for rate in rates
        }
    return {
        name: {rate: scaled(own[rate][key], factor) for rate in rates}
        for name, own in chosen.items()
    }


def closed(runs: Runs, rates: tuple[str, ...], console: Console) -> dict[str, Any]:
    """Print and return which share of the distance from the best published system to each reference
    ours close.
    """
    base = [name for name in PUBLISHED if name in runs]
    found = dict[str, Any]()
    references = [name for name in ("oracle", BEST, BOUND) if name in runs]
    ours = [name for name in OURS if name in runs]
    for key in ("attainment", "goodput") if base and references and ours else ():
        table = Table(
            "system",
            "reference",
            *rates,
            title=f"{key}: % of the distance from the best other to a reference",
        )
        for name in ours:
            for reference in references:
                own = found.setdefault(key, {}).setdefault(name, {}).setdefault(reference, {})
                for rate in rates:
                    seeds = [
                        {
                            system: runs[system][rate][seed][key]
                            for system in (*base, name, reference)
                        }
                        for seed in range(len(runs[name][rate]))
                    ]
                    values = shares_closed(seeds, base, reference, name)
                    own[rate] = interval_of(values) if values else None
                table.add_row(name, reference, *(shown(own[rate], 0, 100.0) for rate in rates))
        console.print(table)
    return found


def compared(found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print simulated and published values.  -> mean absolute errors of attainment by system"""
    printed = published()
    errors = {}
    for figure, key, factor, digits in (("fig8_llama_attain", "attainment", 100.0, 1),
                                        ("fig9_llama_goodput", "goodput", 1.0, 0),
                                        ("fig12_llama_meanacc", "tokens_per_request_and_step", 1.0, 2)):  # fmt: skip
        rates = list(next(iter(found.values())))
        table = Table(
            "system",
            *rates,
            "error",
            title=f"{figure}: simulated, with its 95 % interval / published",
        )
        for name, own in found.items():
            if key not in own[rates[0]]:  # Figures of the bound and the best oracle.
                continue
            values = [factor * own[rate][key]["mean"] for rate in rates]
            theirs = [printed.get((figure, PUBLISHED.get(name, ""), rate)) for rate in rates]
            cells = [
                shown(own[rate][key], digits, factor) + ("" if t is None else f" / {t:g}")
                for rate, t in zip(rates, theirs, strict=True)
            ]
            pairs = [
                (v, t, r) for v, t, r in zip(values, theirs, rates, strict=True) if t is not None
            ]
            error = ""
            if pairs:
                mean_error = float(np.mean([abs(v - t) for v, t, _ in pairs]))
                error = f"{mean_error:.{max(digits, 1)}f}"
                if key == "attainment":
                    unseen = [abs(v - t) for v, t, r in pairs if r not in FITTED]
                    errors[name] = {
                        "all": mean_error,
                        "not_fitted": float(np.mean(unseen)) if unseen else None,
                    }
            table.add_row(name, *cells, error)
        console.print(table)
    return errors


def varied(chosen: Parameters, console: Console) -> dict[str, Any]:
    """Attainment of AdaServe and of ours, one parameter changed at a time."""
    changes: list[dict[str, Any]] = [
        {}, {"budget": None}, {"budget": 128}, {"budget": 192}, {"budget": 512}, {"draft_ms": 2.0}, {"draft_ms": 8.0},
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
