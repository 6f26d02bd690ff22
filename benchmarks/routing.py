"""Capacity of several replicas by router: requests per second of which 90 % attain their SLOs,
simulated.

    python benchmarks/routing.py                       # all points; those that the JSON file has are not run again
    python benchmarks/routing.py --loads adaserve --replicas 4 --routers guarantees,shortest-queue
    python benchmarks/routing.py --linear 64 --loads adaserve    # one rate instead of a search
    python benchmarks/routing.py --plot build/routing.png      # plots what the JSON file has

Times are those of the virtual clock, so that results do not depend on the machine. Every router
gets the same requests and texts. Rates rise or fall by a constant factor until they enclose the
capacity, which is interpolated."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.intervals import interval_of
from hf_slospec.cli.benchmark import provenance
from hf_slospec.lab.comparison import COLOURS, MARKERS, Load
from hf_slospec.lab.hardware import HARDWARE
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import OURS, ROUTERS, config_of
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, Kind, arrivals, jobs_of, mix_of

RESULTS = Path(__file__).parent / "results" / "routing.json"
SYSTEM = "auto"
BASELINE = "shortest-queue"
ATTAINED = 0.9
NUMBER = 60  # requests per replica
FACTOR = 1.15  # ratio of neighbouring rates
VARIATION = 3.0  # coefficient of variation of the gaps of bursts
SEEDS = {1: 4, 4: 1, 16: 1, 64: 1}  # by the number of replicas
MAX_SEEDS = 10
TTFT_SLOWDOWN = (
    5.0  # TTFT SLO of mixes that have none of their own, as a multiple of the prompt's time alone
)


@dataclass(frozen=True)
class Scenario:
    """A load and its hardware."""

    hardware: str
    mixes: tuple[str, ...]
    guess: float  # requests per second and replica, to begin with
    has_ttft: bool = False  # AdaServe's mix gets TTFT SLOs, too

    def load(self, process: str, rate: float, replicas: int, seed: int) -> Load:
        """Return the requests at a rate per replica; lengths and texts are the same at all rates."""
        hardware = HARDWARE[self.hardware]
        jobs = list[Job]()
        for place, name in enumerate(self.mixes):
            times_rng, jobs_rng = (
                np.random.default_rng([seed, place, stream]) for stream in range(2)
            )
            number, own_rate = (
                NUMBER * replicas // len(self.mixes),
                rate * replicas / len(self.mixes),
            )
            times_s = arrivals(process, times_rng, own_rate, number, VARIATION)
            kinds = [_with_ttft(kind) if self.needs_ttft(name) else kind for kind in mix_of(name)]
            jobs += jobs_of(kinds, times_s, jobs_rng, lambda n: float(hardware.target(n, 1, n)))
        jobs.sort(key=lambda job: job.arrival_s)
        return Load.of(f"{rate:g}/s", jobs, TextModel(), np.random.default_rng([seed, 99]))

    def needs_ttft(self, mix: str) -> bool:
        """Return whether the requests of a mix without TTFT SLOs get some."""
        return mix.startswith("azure") or (mix == "adaserve" and self.has_ttft)


def _with_ttft(kind: Kind) -> Kind:
    return replace(kind, ttft_slowdown=TTFT_SLOWDOWN)


SCENARIOS = {
    "adaserve": Scenario("llama-70b-4xa100", ("adaserve",), 6.0),
    "adaserve-ttft": Scenario("llama-70b-4xa100", ("adaserve",), 5.0, has_ttft=True),
    "mixed": Scenario("opt-13b-a100", ("mixed",), 2.8),
    "azure-code": Scenario("llama-70b-4xh100", ("azure-code",), 2.0),
    "azure-conversation": Scenario("llama-70b-4xh100", ("azure-conversation",), 3.0),
    "all": Scenario(
        "llama-70b-4xh100", ("adaserve", "mixed", "azure-code", "azure-conversation"), 4.0
    ),
}
PROCESSES = {"poisson": (1, 4, 16, 64), "gamma": (4,)}


def attainment(
    scenario: Scenario, process: str, replicas: int, router: str, rate: float, seed: int
) -> float:
    """Return the share of requests that attain their SLOs."""
    load = scenario.load(process, rate, replicas, seed)
    hardware = HARDWARE[scenario.hardware]
    simulation = Simulation(
        load.jobs,
        load.library,
        hardware,
        config_of(SYSTEM),
        replicas=replicas,
        router=router,
        seed=seed,
    )
    return float(simulation.run().summary()["attainment"])


def capacity(attained_at: Callable[[float], float], guess: float) -> tuple[float, dict[str, float]]:
    """Return the rate with :data:`ATTAINED`, interpolated between two rates, and the attainment at
    all tried ones.
    """
    tried = {0: attained_at(guess)}
    low = high = 0  # powers of FACTOR
    while tried[high] >= ATTAINED:
        low = high
        high = high + 1
        tried[high] = attained_at(guess * FACTOR**high)
    while tried[low] < ATTAINED:
        low, high = low - 1, low
        tried[low] = attained_at(guess * FACTOR**low)
    power = low + (tried[low] - ATTAINED) / (tried[low] - tried[high])
    return guess * FACTOR**power, {
        f"{guess * FACTOR**p:.3f}": round(tried[p], 4) for p in sorted(tried)
    }


def key_of(load: str, process: str, replicas: int, router: str, seed: int) -> str:
    """Return the name of a point in the results."""
    return f"{load}, {process}, {replicas}, {'any' if replicas == 1 else router}, {seed}"


def capacities(
    points: dict[str, Any], load: str, process: str, replicas: int, router: str
) -> dict[int, float]:
    """Return the capacity of all replicas in requests per second, by measured seed."""
    keys = {seed: key_of(load, process, replicas, router, seed) for seed in range(MAX_SEEDS)}
    return {
        seed: replicas * points[key]["capacity_per_replica"]
        for seed, key in keys.items()
        if key in points
    }


def measured(
    points: dict[str, Any], load: str, process: str, replicas: int, router: str
) -> float | None:
    """Return the mean capacity of all replicas over the measured seeds; None without any."""
    found = capacities(points, load, process, replicas, router)
    return float(np.mean(list(found.values()))) if found else None


def interval(
    points: dict[str, Any], load: str, process: str, replicas: int, router: str
) -> dict[str, float] | None:
    """Return the mean capacity with its 95 % interval over seeds; None without any."""
    found = capacities(points, load, process, replicas, router)
    return interval_of(list(found.values())) if found else None


def ratio(
    points: dict[str, Any], load: str, process: str, replicas: int, router: str
) -> dict[str, float] | None:
    """Return the ratio to the baseline's capacity over the seeds that both have; None without any."""
    own, base = (capacities(points, load, process, replicas, name) for name in (router, BASELINE))
    seeds = sorted(own.keys() & base.keys())
    return interval_of([own[seed] / base[seed] for seed in seeds]) if seeds else None


def half_width(own: dict[str, float] | None) -> float:
    """Return half of an interval's width; 0 without one."""
    return 0.0 if own is None or "high" not in own else own["high"] - own["mean"]


def summarised(points: dict[str, Any]) -> dict[str, Any]:
    """Return every measured capacity, and its ratio to the baseline's, with intervals over seeds."""
    return {
        f"{load}, {process}, {number}, {router}": {
            "capacity": own, "ratio": ratio(points, load, process, number, router)
        }
        for process, numbers in PROCESSES.items() for load in SCENARIOS for number in numbers for router in ROUTERS
        if (own := interval(points, load, process, number, router)) is not None
    }  # fmt: skip


def add_linear(results: dict[str, Any], load: str, replicas: int) -> None:
    """Add the attainment of many replicas with our router at 0.95 times their number of one
    replica's capacity.
    """
    one = measured(results["points"], load, "poisson", 1, OURS)
    assert one is not None, "measure one replica first"
    begun_s = time.perf_counter()
    rate = 0.95 * one
    attained = attainment(SCENARIOS[load], "poisson", replicas, OURS, rate, 0)
    seconds = round(time.perf_counter() - begun_s, 1)
    found = {
        "rate_per_replica": round(rate, 3),
        "attainment": round(attained, 4),
        "seconds": seconds,
    }
    results.setdefault("linear", {})[f"{load}, {replicas}"] = found
    print(f"{load}, {replicas} replicas: {found}", flush=True)


def near(points: dict[str, Any], load: str, process: str, replicas: int) -> float | None:
    """Return a capacity per replica that was found for the same load, if possible with as many
    replicas.
    """
    for prefix in (f"{load}, {process}, {replicas},", f"{load}, {process},", f"{load},"):
        if known := [
            own["capacity_per_replica"] for key, own in points.items() if key.startswith(prefix)
        ]:
            return round(float(np.median(known)), 2)
    return None


def main(
    loads: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(SCENARIOS)}.")
    ] = ",".join(SCENARIOS),
    processes: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(PROCESSES)}.")
    ] = ",".join(PROCESSES),
    replicas: Annotated[str, typer.Option(help="Comma-separated: 1, 4, 16, 64.")] = "1,4,16,64",
    routers: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(ROUTERS)}.")
    ] = ",".join(ROUTERS),
    linear: Annotated[
        int,
        typer.Option(
            help="Only test whether so many replicas attain at 0.95 times their number of one's capacity."
        ),
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Plot what was measured to this PNG, and measure nothing.")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=0, max=MAX_SEEDS, help="Seeds of each point. 0: more for few replicas."),
    ] = 0,
    json_path: Annotated[Path, typer.Option("--json")] = RESULTS,
) -> None:
    """Measure the missing points, and show all."""
    logging.disable(logging.WARNING)  # above capacity many requests miss their SLOs
    results: dict[str, Any] = (
        json.loads(json_path.read_text()) if json_path.exists() else {"points": {}}
    )
    points = results["points"]
    if linear:
        for load in loads.split(","):
            add_linear(results, load, linear)
            json_path.write_text(json.dumps(results, indent=1) + "\n")
        return
    chosen = [
        (load, process, number, router, seed)
        for number in map(int, replicas.split(","))
        for process in processes.split(",")
        for load in loads.split(",")
        for router in routers.split(",")
        for seed in range(seeds or SEEDS[number])
        if number in PROCESSES[process]
    ]
    for load, process, number, router, seed in chosen:
        key = key_of(load, process, number, router, seed)
        if plot is not None or key in points:
            continue
        scenario = SCENARIOS[load]
        begun_s = time.perf_counter()

        def attained_at(rate: float) -> float:
            return attainment(scenario, process, number, router, rate, seed)  # noqa: B023  called in this turn

        found, tried = capacity(attained_at, near(points, load, process, number) or scenario.guess)
        seconds = time.perf_counter() - begun_s
        points[key] = {
            "capacity_per_replica": round(found, 3),
            "attainment": tried,
            "seconds": round(seconds, 1),
        }
        results["provenance"] = provenance(
            system=SYSTEM, requests_per_replica=NUMBER, factor=FACTOR, variation=VARIATION, attained=ATTAINED,
            ttft_slowdown=TTFT_SLOWDOWN, scenarios={name: vars(own) for name, own in SCENARIOS.items()},
        )  # fmt: skip
        results["summary"] = summarised(points)
        json_path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{key}: {found:.2f} per replica, {tried}, {seconds:.0f} s", flush=True)
    show(points)
    if plot is not None:
        draw(points, plot)


def show(points: dict[str, Any]) -> None:
    """Print the capacities in requests per second, with their ratios to the shortest queue's."""
    for process, numbers in PROCESSES.items():
        table = Table(
            title=f"Requests/s of which 90 % attain, {process} arrivals, ± 95 %; in brackets: ratio to {BASELINE}"
        )
        table.add_column("load")
        table.add_column("replicas", justify="right")
        for router in ROUTERS:
            table.add_column(router, justify="right")
        for load in SCENARIOS:
            for number in numbers:
                table.add_row(
                    load,
                    str(number),
                    *(cell(points, load, process, number, router) for router in ROUTERS),
                )
        Console(width=130).print(table)


def cell(points: dict[str, Any], load: str, process: str, number: int, router: str) -> str:
    """Return a capacity and its ratio to the baseline's for the table, with half of their
    intervals' widths.
    """
    shown = []
    for own, digits in ((interval(points, load, process, number, router), 1),
                        (ratio(points, load, process, number, router), 2)):  # fmt: skip
        half = half_width(own)
        shown.append(
            ""
            if own is None
            else f"{own['mean']:.{digits}f}" + (f"±{half:.{digits}f}" if half else "")
        )
    return shown[0] + (f" ({shown[1]})" if shown[1] else "")


def draw(points: dict[str, Any], path: Path) -> None:
    """Plot the capacity per replica by their number, as a multiple of one replica's, and that of
    bursts.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 4, figsize=(16, 8), layout="constrained")
    for panel, load in zip(panels.flat, SCENARIOS, strict=False):
        one = measured(points, load, "poisson", 1, OURS) or math.nan
        for index, router in enumerate(ROUTERS):
            found = {n: interval(points, load, "poisson", n, router) for n in PROCESSES["poisson"]}
            values = {
                n: (own["mean"] / n / one, half_width(own) / n / one)
                for n, own in found.items()
                if own
            }
            means, halves = ([value[place] for value in values.values()] for place in range(2))
            panel.errorbar(
                list(values),
                means,
                halves,
                marker=MARKERS[index],
                color=COLOURS[index],
                label=router,
                capsize=2,
            )
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(PROCESSES["poisson"], [str(number) for number in PROCESSES["poisson"]])
        panel.set(
            title=f"{load} ({one:.1f}/s with 1)",
            xlabel="replicas",
            ylabel="capacity / (N x that of one)",
        )
        panel.grid(alpha=0.3)
    width = 0.8 / len(ROUTERS)
    x = np.arange(len(SCENARIOS))
    bars = panels.flat[len(SCENARIOS)]
    for index, router in enumerate(ROUTERS):
        ratios = [ratio(points, load, "gamma", 4, router) for load in SCENARIOS]
        heights, halves = (
            [math.nan if own is None else own["mean"] for own in ratios],
            list(map(half_width, ratios)),
        )
        bars.bar(x + (index + 0.5) * width - 0.4, heights, width, yerr=halves, color=COLOURS[index])
    bars.set_xticks(x, SCENARIOS, rotation=30, ha="right")
    bars.set(title=f"bursts, 4 replicas: capacity / that of {BASELINE}")
    bars.grid(alpha=0.3, axis="y")
    panels.flat[-1].axis("off")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
