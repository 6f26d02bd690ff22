"""Capacity as defined by SLOs-Serve: the highest load per GPU at which 90 % of the requests attain
all SLOs.

    python benchmarks/papers/slos_serve.py                  # all parts
    python benchmarks/papers/slos_serve.py --parts coder --seeds 3 --runs runs.jsonl

All systems are simulated with the same requests, texts and latencies. Rates are bisected, and the
capacity is interpolated between the last two. docs/papers.md lists the assumptions and the
published values."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, Key, bounds_of, resumed, shares_closed, shown
from rich.console import Console
from rich.table import Table

from benchmarks.intervals import interval_of
from hf_slospec.cli.benchmark import provenance
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.comparison import Load
from hf_slospec.lab.hardware import HARDWARE, lines
from hf_slospec.lab.outcomes import METRICS, Run
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import OURS as GUARANTEES
from hf_slospec.lab.systems import config_of, is_oracle
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, arrivals, in_rounds, jobs_of, mix_of

RESULTS = Path(__file__).parent.parent / "results" / "papers-slos-serve.json"
ATTAINED = 0.9
PRECISION = 1.08  # ratio of the two rates that are interpolated
PAIRS = 2.7, 1.1  # mean and deviation of the prefill-decode pairs of a ToolLLM request (table 4)
TIGHT_S = 0.05  # tight TPOT SLO (table 3)
OURS = "auto"
THEIRS = "slos-serve"
SEQUENTIAL = "sequential"  # their router
BOUND = "bound"  # no schedule attains more at any rate, see bounds.py
BEST = "oracle, best"  # the oracle with the higher capacity, by seed
SYSTEMS = {
    "vLLM": "vllm",
    "vLLM, speculating 4": "vllm-spec4",
    "Sarathi, smaller": 'sarathi {{"prefill_chunk": {small}}}',
    "Sarathi, larger": 'sarathi {{"prefill_chunk": {large}}}',
    "SLOs-Serve": THEIRS,
    "ours": OURS,
    "oracle": "oracle",
    "oracle, larger chunk": 'oracle {{"prefill_chunk": 2048}}',
    "bound": BOUND,
}
# For ToolLLM the paper has no draft model. Without drafts, the policies are plain decoding, and the
# schedulers differ.
WITHOUT_DRAFTS = {
    **{name: SYSTEMS[name] for name in ("vLLM", "Sarathi, smaller", "Sarathi, larger")},
    "SLOs-Serve": THEIRS + ' {{"policy": "none"}}',
    "ours": OURS + ' {{"max_depth": 0}}',
}
# The paper's figure 14 takes one part off after the other; what is left starts all prefill before
# any decoding. The whole is measured with the other systems.
ABLATION = {
    "without speculation": WITHOUT_DRAFTS["SLOs-Serve"],
    "without admission": THEIRS
    + ' {{"policy": "none", "admission": "fcfs", "prefill": "first", "guarantee": null}}',
}
ORACLES = ("oracle", "oracle, larger chunk")
REFERENCES = (*ORACLES, BEST, "bound")
# The paper's 13B runs on two GPUs, so the load per GPU is half of theirs.
HARDWARES = {
    "opt-13b-a100": HARDWARE["opt-13b-a100"],
    "opt-13b-2xa100": replace(
        HARDWARE["opt-13b-a100"], target=lines((24.5, 0.0872), (27.4, 0.0905), per_key_ms=2.24e-4)
    ),
    "llama-7b-a100": HARDWARE["llama-7b-a100"],
    "llama-8b-h100": HARDWARE["llama-8b-h100"],
}


@dataclass(frozen=True)
class Scenario:
    """A load and its hardware."""

    mixes: tuple[str, ...]
    number: int
    chunks: tuple[
        int, int
    ]  # Sarathi's prefill chunks: with a reserve for K/V, and the largest within the tightest SLO
    process: dict[str, str]  # arrival process by mix
    variation: float = 1.0  # coefficient of variation in a gamma process
    acceptance: float = 0.7
    is_in_pairs: bool = (
        False  # each request is several, one after the other: calls of tools, then the answer
    )
    pause_s: float | None = (
        # Mean seconds of a tool, after which a request goes on with its text; None: see in_pairs
        None
    )
    hardware: str = "opt-13b-a100"

    def prompt_s(self, num_tokens: int) -> float:
        """Return the prefill seconds of a prompt alone."""
        return float(HARDWARES[self.hardware].target(num_tokens, 1, num_tokens))

    def load(self, rate: float, replicas: int, seed: int) -> Load:
        """Return ``rate`` requests per second and replica; lengths and texts are the same at all
        rates.
        """
        jobs: list[Job] = []
        for place, mix in enumerate(self.mixes):
            number = self.number * replicas // len(self.mixes)
            times_rng, jobs_rng = (
                np.random.default_rng([seed, place, stream]) for stream in range(2)
            )
            own_rate = rate * replicas / len(self.mixes)
            times_s = arrivals(self.process[mix], times_rng, own_rate, number, self.variation)
            jobs += jobs_of(mix_of(mix), times_s, jobs_rng, self.prompt_s)
        jobs.sort(key=lambda job: job.arrival_s)
        if self.is_in_pairs:
            jobs = in_pairs(jobs, self.prompt_s, np.random.default_rng([seed, 98]), self.pause_s)
        return Load.of(
            f"{rate:g}/s",
            jobs,
            TextModel(acceptance=self.acceptance),
            np.random.default_rng([seed, 99]),
        )


def in_pairs(
    jobs: Sequence[Job],
    prompt_s: Callable[[int], float],
    rng: np.random.Generator,
    pause_s: float | None,
) -> list[Job]:
    """Return the prefill-decode pairs of requests with tools; see :func:`in_rounds` for
    ``pause_s``.

    The given requests are the answers, with a loose TPOT SLO. The calls before them have the tight
    one."""
    (call,) = mix_of("toolllm")
    return in_rounds(jobs, replace(call, tpot_slo_s=TIGHT_S), PAIRS, rng, prompt_s, pause_s)


STABLE = "poisson"
BURSTY = "on-off"
PROCESS = {"chatbot": STABLE, "coder": BURSTY, "summarizer": STABLE, "toolllm": BURSTY}
SCENARIOS = {
    "chatbot": Scenario(("chatbot",), 400, (384, 512), PROCESS),
    "coder": Scenario(("coder",), 800, (128, 192), PROCESS),
    "summarizer": Scenario(("summarizer",), 400, (384, 512), PROCESS),
    "mixed": Scenario(("chatbot", "coder", "summarizer"), 480, (128, 192), PROCESS),
    "toolllm": Scenario(
        ("toolllm",), 300, (512, 756), PROCESS, is_in_pairs=True, hardware="llama-7b-a100"
    ),
}
CODER = replace(SCENARIOS["coder"], number=400)
CHATBOT = replace(SCENARIOS["chatbot"], number=200)
SENSITIVITY = {
    "coder, Poisson": replace(CODER, process={"coder": "poisson"}),
    "coder, gamma CV 3": replace(CODER, process={"coder": "gamma"}, variation=3.0),
    "coder, gamma CV 6": replace(CODER, process={"coder": "gamma"}, variation=6.0),
    "chatbot, acceptance 0.5": replace(CHATBOT, acceptance=0.5),
    "chatbot, two GPUs": replace(CHATBOT, hardware="opt-13b-2xa100"),
    "chatbot, 7B": replace(CHATBOT, hardware="llama-7b-a100"),
}


def attainment(system: str, scenario: Scenario, replicas: int, seed: int, rate: float) -> float:
    """Return the attainment of a system at a rate, or the bound of it."""
    load = scenario.load(rate, replicas, seed)
    hardware = HARDWARES[scenario.hardware]
    if system == BOUND:
        assert replicas == 1, "bounds are those of one replica"
        bounds = bounds_of(load.jobs, load.library, hardware, (OURS, THEIRS, "vllm"))
        return float(bounds.attainment("slos-serve") or 0.0)
    router = SEQUENTIAL if system.startswith(THEIRS) else GUARANTEES
    run = Simulation(
        load.jobs, load.library, hardware, config_of(system),
        replicas=replicas, router=router, seed=seed, oracle=is_oracle(system),
    ).run(system)  # fmt: skip
    return attained_share(load.jobs, run)


def attained_share(jobs: Sequence[Job], run: Run) -> float:
    """Return the share of requests that attain all SLOs; one of several pairs has to attain those
    of every pair.
    """
    first_of = list[int]()
    has_attained = dict[int, bool]()
    for index, (job, outcome) in enumerate(zip(jobs, run.outcomes, strict=True)):
        first_of.append(index if job.after is None else first_of[job.after])
        attained = METRICS["slos-serve"](outcome)
        has_attained[first_of[index]] = has_attained.get(first_of[index], True) and bool(attained)
    return float(np.mean(list(has_attained.values())))


def capacity(attained_at: Callable[[float], float], guess: float, factor: float) -> float:
    """Return the rate at which attainment falls below :data:`ATTAINED`, by bracketing, bisection
    and interpolation.
    """
    tried = {guess: attained_at(guess)}
    low = high = guess
    while tried[high] >= ATTAINED:
        low = high
        high = high * factor
        tried[high] = attained_at(high)
    while tried[low] < ATTAINED:
        low, high = low / factor, low
        tried[low] = attained_at(low)
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        tried[middle] = attained_at(middle)
        low, high = (middle, high) if tried[middle] >= ATTAINED else (low, middle)
    return low + (high - low) * (tried[low] - ATTAINED) / (tried[low] - tried[high])


def capacity_of(system: str, scenario: Scenario, replicas: int, guess: float, seed: int) -> Figures:
    """Return the capacity in requests per second of all replicas."""
    factor = 1.3 if replicas == 1 else 1.15
    return {
        "capacity": replicas
        * capacity(partial(attainment, system, scenario, replicas, seed), guess, factor)
    }


Part = dict[str, Callable[..., Figures]]  # by system or number of replicas; takes a seed


def capacities(scenario: Scenario, systems: dict[str, str]) -> Part:
    """Return the measurements of every system's capacity."""
    small, large = scenario.chunks
    return {
        name: partial(capacity_of, system.format(small=small, large=large), scenario, 1, 1.5)
        for name, system in systems.items()
    }


def scaling(scenario: Scenario, system: str) -> Part:
    """Return the measurements of the capacity of 1 to 4 replicas."""
    return {
        str(number): partial(capacity_of, system, scenario, number, 2.0) for number in range(1, 5)
    }


PARTS: dict[str, Part] = {
    **{
        name: capacities(scenario, WITHOUT_DRAFTS if scenario.is_in_pairs else SYSTEMS)
        for name, scenario in {**SCENARIOS, **SENSITIVITY}.items()
    },
    **{
        f"ablation, {name}": capacities(SCENARIOS[name], ABLATION)
        for name in ("chatbot", "coder", "summarizer", "mixed")
    },
    **{
        f"replicas, {name}, {system}": scaling(replace(SCENARIOS[name], number=number), system)
        for name, number, systems in (
            ("chatbot", 150, (THEIRS, OURS)),
            ("coder", 300, (THEIRS, OURS)),
            ("summarizer", 150, (THEIRS,)),  # this and the next one for the ablation only
            ("mixed", 180, (THEIRS,)),
        )
        for system in systems
    },
}


def closed(runs: list[dict[str, float]]) -> dict[str, dict[str, float] | None]:
    """Return the share of the distance from the best other system to each reference that ours
    closes.
    """
    others = [name for name in SYSTEMS if name not in (*REFERENCES, "ours")]
    return {
        reference: interval_of(shares)
        if (shares := shares_closed(runs, others, reference, "ours"))
        else None
        for reference in REFERENCES
    }


def main(
    parts: Annotated[
        str, typer.Option(help="Semicolon-separated, of: " + "; ".join(PARTS))
    ] = ";".join(PARTS),
    without: Annotated[
        str, typer.Option(help="Semicolon-separated systems to leave out, as bounds take hours.")
    ] = "",
    seeds: Annotated[
        int, typer.Option(min=1, help="Loads of each capacity, the first of seed 1.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished capacities, to resume from.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json")] = RESULTS,
) -> None:
    """Measure parts and update the results with them."""
    names = [name.strip() for name in parts.split(";")]
    if unknown := [name for name in names if name not in PARTS]:
        raise InvalidInputError(f"unknown parts {unknown}; known are: {'; '.join(PARTS)}")
    logging.disable(logging.WARNING)  # above capacity many requests miss their SLOs
    left_out = {system.strip() for system in without.split(";")}
    for name in names:
        measures = {own: measure for own, measure in PARTS[name].items() if own not in left_out}
        tasks: dict[Key, Callable[[], Figures]] = {
            (name, own, seed): partial(measure, seed=seed)
            for own, measure in measures.items()
            for seed in range(1, seeds + 1)
        }
        found = resumed(tasks, workers, kept)
        runs = [
            {own: found[name, own, seed]["capacity"] for own in measures}
            for seed in range(1, seeds + 1)
        ]
        is_compared = set(PARTS[name]) == set(SYSTEMS) == set(measures)
        for run in runs if is_compared else ():
            run[BEST] = max(run[own] for own in ORACLES)
        intervals = {own: interval_of([run[own] for run in runs]) for own in runs[0]}
        results: dict[str, Any] = json.loads(json_path.read_text()) if json_path.exists() else {}
        results[name] = {"provenance": provenance(seeds=seeds), "capacity": intervals}
        if is_compared:
            results[name]["share of the distance from the best other system"] = closed(runs)
        json_path.write_text(
            json.dumps({key: results[key] for key in PARTS if key in results}, indent=1) + "\n"
        )
        console = Console(width=180, file=sys.stdout)
        table = Table(*intervals, title=name)
        table.add_row(*(shown(interval, 2) for interval in intervals.values()))
        if is_compared:
            shares = closed(runs)
            table.add_row(
                *(
                    f"{shown(shares[own], 0, 100.0)} % closed" if own in shares else ""
                    for own in intervals
                )
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
