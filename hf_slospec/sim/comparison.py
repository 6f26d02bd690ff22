"""Several systems under the same loads, as table, records and picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from hf_slospec.errors import InvalidInputError
from hf_slospec.sim.hardware import Hardware
from hf_slospec.sim.outcomes import METRICS, Run
from hf_slospec.sim.simulation import Simulation
from hf_slospec.sim.systems import config_of, is_oracle
from hf_slospec.sim.texts import Library, Recording, TextModel
from hf_slospec.sim.workload import Job


@dataclass(frozen=True)
class Load:
    """Requests and what they will write, the same for all systems."""

    label: str  # where it stands on the axis of pictures
    jobs: tuple[Job, ...]
    library: Library

    @classmethod
    def of(cls, label: str, jobs: Sequence[Job], source: TextModel | Recording, rng: np.random.Generator) -> Load:
        """Texts made up, or drawn from a recording, whose were greedy; one shorter than a request's output ends it."""
        if isinstance(source, TextModel):
            texts = [source.write(rng, job.output_tokens) for job in jobs]
            return cls(label, tuple(jobs), Library(texts, source.matched))
        recorded = [text.text() for text in source.texts]
        drawn = [recorded[index] for index in rng.integers(len(recorded), size=len(jobs))]
        texts = [text.up_to(job.output_tokens) for text, job in zip(drawn, jobs, strict=True)]
        cut = [replace(job, output_tokens=len(text), is_sampled=False) for job, text in zip(jobs, texts, strict=True)]
        return cls(label, tuple(cut), Library(texts))


def widest(systems: Sequence[str]) -> int:
    """Children of a place that any of the systems may ask texts for."""
    return max(TextModel.num_children, *(config_of(system).max_width for system in systems))


def at_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same requests, faster or slower so that ``rate`` come per second on average."""
    if not (np.isfinite(rate) and rate > 0.0):
        raise InvalidInputError(f"rate must be a positive number of requests per second, got {rate}")
    first_s, span_s = jobs[0].arrival_s, jobs[-1].arrival_s - jobs[0].arrival_s
    if len(jobs) > 1 and span_s <= 0.0:
        raise InvalidInputError("all requests of the trace come at once, so they have no rate that could be changed")
    factor = 1.0 if len(jobs) == 1 else (len(jobs) - 1) / rate / span_s
    return [replace(job, arrival_s=first_s + (job.arrival_s - first_s) * factor) for job in jobs]


def compare(
    systems: Sequence[str], loads: Sequence[Load], hardware: Hardware, *, replicas: int, seed: int
) -> dict[str, list[Run]]:
    """Every system under every load, in the order of the loads."""
    configs = {system: config_of(system) for system in systems}
    made = []
    for load in loads:  # all are checked before any runs
        for system, config in configs.items():
            try:
                simulation = Simulation(
                    load.jobs, load.library, hardware, config,
                    replicas=replicas, seed=seed, hindsight=is_oracle(system),
                )  # fmt: skip
            except InvalidInputError as error:
                raise InvalidInputError(f"system {system} at {load.label}: {error}") from error
            made.append((system, load, simulation))
    runs: dict[str, list[Run]] = {system: [] for system in configs}
    number = sum(len(load.jobs) for _, load, _ in made)
    with tqdm(total=number, unit=" requests", disable=not sys.stderr.isatty()) as bar:
        while made:
            system, load, simulation = made.pop(0)  # and its requests are freed when it has run
            bar.set_description(f"{system} at {load.label}")
            runs[system].append(simulation.run(system, on_end=bar.update))
    return runs


def table(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str) -> Table:
    """A line per load and system."""
    title = f"Attainment as {metric} defines it; goodput: tokens/s of requests that attained; nodes: verified per step"
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=0)  # within 80 columns
    made.add_column("load", no_wrap=True)
    made.add_column("system", overflow="fold", min_width=12)
    for heading in ("attained", "goodput", "tok/s", "TPOT", "TTFT", "tok/step", "nodes"):
        made.add_column(heading, justify="right", no_wrap=True)
    for place, load in enumerate(loads):
        for system, own in runs.items():
            figures = own[place].summary(METRICS[metric])
            attained = figures["attainment"]
            made.add_row(
                load.label, system, "" if attained is None else f"{attained:.1%}", f"{figures['goodput']:.0f}",
                f"{figures['throughput']:.0f}", f"{figures['tpot_ms'] or 0.0:.1f} ms", f"{figures['ttft_s']:.2f} s",
                f"{figures['tokens_per_request_and_step']:.2f}", f"{figures['nodes_per_step']:.0f}",
                style="bold" if system == "auto" else None, end_section=system == list(runs)[-1],
            )  # fmt: skip
    return made


def records(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str) -> list[dict[str, Any]]:
    return [
        {"load": load.label, "system": system, **own[place].summary(METRICS[metric])}
        for place, load in enumerate(loads)
        for system, own in runs.items()
    ]


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7F7F7F")
MARKS = "osD^vP*Xd<>"


def draw(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str, path: Path) -> None:
    """Attainment, goodput and tokens per step by load, and attainment by class under the last load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["text.parse_math"] = False  # names are names
    figures = {system: [run.summary(METRICS[metric]) for run in own] for system, own in runs.items()}
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    titles = {
        "attainment": "requests that attained, %",
        "goodput": "goodput, tokens/s",
        "tokens_per_request_and_step": "tokens per request and step",
    }
    places = np.arange(len(loads))
    for panel, (key, title) in zip(panels.flat, titles.items(), strict=False):
        for at, (system, own) in enumerate(figures.items()):
            values = [np.nan if f[key] is None else f[key] * (100.0 if key == "attainment" else 1.0) for f in own]
            colour, mark = COLOURS[at % len(COLOURS)], MARKS[at % len(MARKS)]
            panel.plot(places, values, marker=mark, color=colour, label=system, linewidth=1.5, markersize=5)
        panel.set(title=title, ylim=(0, 103 if key == "attainment" else None))
        panel.set_xticks(places, [load.label for load in loads])
        panel.grid(alpha=0.3)
    kinds = sorted({job.kind for job in loads[-1].jobs})
    width = 0.8 / len(figures)
    for at, own in enumerate(figures.values()):
        shares = [own[-1]["kinds"][kind]["attainment"] for kind in kinds]
        values = [np.nan if share is None else 100.0 * share for share in shares]
        panels[1, 1].bar(np.arange(len(kinds)) + at * width - 0.4 + width / 2, values, width,
                         color=COLOURS[at % len(COLOURS)])  # fmt: skip
    panels[1, 1].set_xticks(np.arange(len(kinds)), kinds)
    panels[1, 1].set(title=f"by class at {loads[-1].label}: requests that attained, %", ylim=(0, 103))
    panels[1, 1].grid(alpha=0.3, axis="y")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
