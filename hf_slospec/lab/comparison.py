"""Comparison of systems under the same loads: as a table, as records and as plots."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.outcomes import METRICS, Run
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import OURS, config_of, is_oracle
from hf_slospec.lab.texts import NUM_CHILDREN, Library, Recording, TextModel
from hf_slospec.lab.workload import Job, check_rate


@dataclass(frozen=True)
class Load:
    """Requests with their texts, the same for all systems."""

    label: str  # name in tables and on axes of plots
    jobs: tuple[Job, ...]
    library: Library

    @classmethod
    def of(
        cls,
        label: str,
        jobs: Sequence[Job],
        source: TextModel | Recording,
        rng: np.random.Generator,
    ) -> Load:
        """Return the requests with synthetic texts, or with texts drawn from a recording.

        Recorded texts were decoded greedily. A request whose recorded text is shorter than its
        output ends with this text."""
        if isinstance(source, TextModel):
            texts = [source.write(rng, job.output_tokens) for job in jobs]
            return cls(label, tuple(jobs), Library(texts, source.matched))
        recorded = [text.text() for text in source.texts]
        drawn = [recorded[index] for index in rng.integers(len(recorded), size=len(jobs))]
        texts = [text.up_to(job.output_tokens) for text, job in zip(drawn, jobs, strict=True)]
        fitted = [
            replace(j, output_tokens=len(text), is_sampled=False)
            for j, text in zip(jobs, texts, strict=True)
        ]
        return cls(label, tuple(fitted), Library(texts))


def num_children_for(systems: Sequence[str]) -> int:
    """Return the number of children per position that synthetic texts need for these systems."""
    return max(NUM_CHILDREN, *(config_of(system).max_width for system in systems))


def at_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """Return the requests with their gaps scaled to ``rate`` arrivals per second on average.

    Raises:
        InvalidInputError: the rate is not positive, or all requests arrive at the same time.
    """
    check_rate(rate)
    first_s = jobs[0].arrival_s
    span_s = jobs[-1].arrival_s - jobs[0].arrival_s
    if len(jobs) > 1 and span_s <= 0.0:
        raise InvalidInputError(
            "all requests arrive at the same time, so their rate cannot be changed; leave it out"
        )
    factor = 1.0 if len(jobs) == 1 else (len(jobs) - 1) / rate / span_s
    return [replace(job, arrival_s=first_s + (job.arrival_s - first_s) * factor) for job in jobs]


def compare(
    systems: Sequence[str],
    loads: Sequence[Load],
    hardware: Hardware,
    *,
    replicas: int,
    seed: int,
    router: str = OURS,
) -> dict[str, list[Run]]:
    """Simulate every system under every load.

    Args:
        systems: names, or names with settings, as for :func:`~hf_slospec.lab.systems.config_of`.
        loads: the loads.
        hardware: latencies of the models.
        replicas: number of engines that share a load.
        seed: seed of router and drafters.
        router: one of :data:`~hf_slospec.lab.systems.ROUTERS`, for several replicas.

    Returns:
        For each system its runs, in the order of the loads.

    Raises:
        InvalidInputError: a system cannot serve a load; raised before any simulation runs.
    """
    configs = {system: config_of(system) for system in systems}
    simulations = []
    for load in loads:  # all are validated before the first one runs
        for system, config in configs.items():
            try:
                simulation = Simulation(
                    load.jobs, load.library, hardware, config,
                    replicas=replicas, router=router, seed=seed, oracle=is_oracle(system),
                )  # fmt: skip
            except InvalidInputError as error:
                raise InvalidInputError(f"system {system} at {load.label}: {error}") from error
            simulations.append((system, load, simulation))
    runs: dict[str, list[Run]] = {system: [] for system in configs}
    num_requests = sum(len(load.jobs) for _, load, _ in simulations)
    with tqdm(total=num_requests, unit=" requests", disable=not sys.stderr.isatty()) as bar:
        while simulations:
            # Removed from the list, so that its memory is freed after its run
            system, load, simulation = simulations.pop(0)
            bar.set_description(f"{system} at {load.label}")
            runs[system].append(simulation.run(system, on_end=bar.update))
    return runs


TABLE_WIDTH = 80  # columns that a table needs; longer names of systems are folded


def table(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str) -> Table:
    """Return a table with a line per load and system."""
    title = (
        f"Attainment by metric {metric}; goodput: tokens/s of requests that attained; "
        "nodes: verified per step"
    )
    caption = "systems but auto: scheduling rules emulated on this engine, not that system's code"
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
    result.add_column("load", no_wrap=True)
    result.add_column("system", overflow="fold", min_width=12)
    for heading in ("attained", "goodput", "tok/s", "TPOT", "TTFT", "tok/step", "nodes"):
        result.add_column(heading, justify="right", no_wrap=True)
    for index, load in enumerate(loads):
        for system, system_runs in runs.items():
            figures = system_runs[index].summary(METRICS[metric])
            attained = figures["attainment"]
            result.add_row(
                load.label,
                system,
                "" if attained is None else f"{attained:.1%}",
                f"{figures['goodput']:.0f}",
                f"{figures['throughput']:.0f}",
                f"{figures['tpot_ms'] or 0.0:.1f} ms",
                f"{figures['ttft_s']:.2f} s",
                f"{figures['tokens_per_request_and_step']:.2f}",
                f"{figures['nodes_per_step']:.0f}",
                style="bold" if system == "auto" else None,
                end_section=system == list(runs)[-1],
            )
    return result


def records(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str) -> list[dict[str, Any]]:
    """Return the figures of every load and system, as ``--json`` writes them."""
    return [
        {"load": load.label, "system": system, **system_runs[index].summary(METRICS[metric])}
        for index, load in enumerate(loads)
        for system, system_runs in runs.items()
    ]


COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D31",
    "#7F7F7F",
)
MARKERS = "osD^vP*Xd<>"


def draw(runs: dict[str, list[Run]], loads: Sequence[Load], metric: str, path: Path) -> None:
    """Plot attainment, goodput and tokens per step by load, and attainment by class under the last
    load.
    """
    need("plot", "a plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["text.parse_math"] = False  # class names may contain dollar signs
    summaries = {
        name: [run.summary(METRICS[metric]) for run in system_runs]
        for name, system_runs in runs.items()
    }
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(summaries)}
    titles = {
        "attainment": "requests that attained, %",
        "goodput": "goodput, tokens/s",
        "tokens_per_request_and_step": "tokens per request and step",
    }
    x = np.arange(len(loads))
    for panel, (key, title) in zip(panels.flat, titles.items(), strict=False):
        factor, top = (100.0, 103) if key == "attainment" else (1.0, None)
        for marker, (name, by_load) in zip(
            itertools.cycle(MARKERS), summaries.items(), strict=False
        ):
            panel.plot(
                x, _values([summary[key] for summary in by_load], factor),
                marker=marker, color=colours[name], label=name, linewidth=1.5, markersize=5,
            )  # fmt: skip
        panel.set(title=title, ylim=(0, top))
        panel.set_xticks(x, [load.label for load in loads])
        panel.grid(alpha=0.3)
    bars = panels[1, 1]
    kinds = sorted({job.kind for job in loads[-1].jobs})
    width = 0.8 / len(summaries)
    for index, (name, by_load) in enumerate(summaries.items()):
        values = _values([by_load[-1]["kinds"][kind]["attainment"] for kind in kinds], 100.0)
        offset = (index + 0.5) * width - 0.4
        bars.bar(np.arange(len(kinds)) + offset, values, width, color=colours[name])
    bars.set_xticks(np.arange(len(kinds)), kinds)
    bars.set(title=f"by class at {loads[-1].label}: requests that attained, %", ylim=(0, 103))
    bars.grid(alpha=0.3, axis="y")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _values(figures: Sequence[float | None], factor: float) -> list[float]:
    return [np.nan if figure is None else factor * figure for figure in figures]
