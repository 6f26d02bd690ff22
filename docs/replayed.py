"""Tables of what was simulated: the papers' experiments beside published values, routing, the
simulator itself.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from docs.tables import find, markdown, result

PUBLISHED = Path(__file__).with_name("published.json")
RATES = ("2.6", "2.8", "3.0", "3.4", "3.6", "4.0", "4.2", "4.4", "4.8")
SYSTEMS = {
    "vllm": "vLLM",
    "sarathi": "Sarathi",
    "adaserve": "AdaServe",
    "vllm-spec4": "vLLM-Spec4",
    "vllm-spec6": "vLLM-Spec6",
    "vllm-spec8": "vLLM-Spec8",
    "auto": "`auto`",
    'auto {"admission": "fcfs", "prefill": "first", "prefill_chunk": 1024}': "`auto`, prompts first",
}
OTHERS = [name for name in SYSTEMS if not name.startswith("auto")]
LENGTHS = ("Org", "k=1", "k=3", "k=5", "k=7")
TABLES: dict[str, Callable[[], str]] = {}


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Register a table under the name of its function, with hyphens."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


@functools.cache
def published() -> Any:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


# --- AdaServe
# --------------------------------------------------------------------------------------------------------


def adaserve_rows(figure: str, scale: float, digits: int) -> list[list[str]]:
    """Return the simulated values of every system, published ones in brackets, and their mean
    absolute error.
    """
    results = result("papers-adaserve.json")["results"]
    printed = published()["adaserve"][figure]
    lines = []
    for system, name in SYSTEMS.items():
        values = {rate: scale * results[system][rate][figure]["mean"] for rate in RATES}
        if system not in printed:
            lines.append([name, *(f"{values[rate]:.{digits}f}" for rate in RATES), ""])
            continue
        error = statistics.fmean(abs(values[rate] - printed[system][rate]) for rate in RATES)
        cells = [f"{values[rate]:.{digits}f} ({printed[system][rate]:g})" for rate in RATES]
        lines.append([name, *cells, f"{error:.{max(digits, 1)}f}"])
    return lines


@table
def adaserve_attainment() -> str:
    return markdown(f" | {' | '.join(RATES)} | error", adaserve_rows("attainment", 100, 1))


@table
def adaserve_goodput() -> str:
    return markdown(f" | {' | '.join(RATES)} | error", adaserve_rows("goodput", 1, 0))


@table
def adaserve_accepted() -> str:
    lines = adaserve_rows("tokens_per_request_and_step", 1, 2)
    drafting = [line for line in lines if line[0] not in ("vLLM", "Sarathi")]
    return markdown(f" | {' | '.join(RATES)} | error", drafting)


@table
def adaserve_oracle() -> str:
    results = result("papers-adaserve.json")["results"]
    bounds = "papers-adaserve-bounds.json"
    earlier = f"{datetime.fromisoformat(result(bounds)['provenance']['date']):%B %-d}"

    def attained(name: str) -> list[float]:
        return [100 * results[name][rate]["attainment"]["mean"] for rate in RATES]

    def share(figure: str, to: str, file: str = "papers-adaserve.json") -> list[str]:
        shares = result(file)["share of the distance from the best other system"][figure]["auto"][
            to
        ]
        return [f"{100 * shares[rate]['mean']:.0f}" for rate in RATES]

    best = [max(values) for values in zip(*(attained(name) for name in OTHERS), strict=True)]
    lines: list[Sequence[str]] = [
        [name, *(f"{value:.1f}" for value in values)]
        for name, values in (
            ("best other system, attained %", best), ("`auto`", attained("auto")), ("oracle", attained("oracle")),
            ("AdaServe, acceptance known, attained %", attained("adaserve-oracle")),
        )
    ]  # fmt: skip
    lines += [
        ["share of the distance to the oracle, %", *share("attainment", "oracle")],
        ["the same for goodput, %", *share("goodput", "oracle")],
        [f"{earlier}: share to the best oracle, %", *share("attainment", "oracle, best", bounds)],
        [f"{earlier}: share to the bound, %", *share("attainment", "bound", bounds)],
        [f"{earlier}: goodput, to the bound, %", *share("goodput", "bound", bounds)],
    ]
    return markdown(f" | {' | '.join(RATES)}", lines)


@table
def adaserve_sensitivity() -> str:
    lines = []
    for changed, values in result("papers-adaserve.json")["sensitivity"].items():
        changes = json.loads(changed).items()
        shown = ((key, "measured" if value is None else f"{value:g}") for key, value in changes)
        name = ", ".join(f"`{key}` = {value}" for key, value in shown) or "nothing"
        lines.append([name, *(f"{value:.1f}" for value in values)])
    return markdown("changed | AdaServe 3.4 | AdaServe 4.8 | `auto` 3.4 | `auto` 4.8", lines)


WORKLOADS = {
    "as published": "6 in 10 urgent, SLO 1.2",
    "urgent 0.9": "9 in 10 urgent",
    "scale 0.8": "SLO 0.8",
}


@table
def adaserve_workloads() -> str:
    results = result("papers-adaserve-workloads.json")["results"]
    lines = []
    for system in results["as published"]:
        cells = []
        for workload in WORKLOADS:
            if own := results[workload].get(system):
                attained = 100 * own["attainment"]
                urgent = 100 * own["kinds"]["urgent"]
                cells.append(f"{attained:.1f} ({urgent:.1f}), {own['goodput']:.0f}")
        name = {"vllm-priority": "vLLM, by priority"}.get(
            system.split(" ")[0], SYSTEMS.get(system, system)
        )
        lines.append([name, *cells, *[""] * (len(WORKLOADS) - len(cells))])
    return markdown(f" | {' | '.join(WORKLOADS.values())}", lines)


# --- TurboSpec
# -------------------------------------------------------------------------------------------------------


@table
def turbospec() -> str:
    found = result("papers-turbospec.json")["cells"]
    cells = {
        (cell["setup"], cell["rate"], cell["column"]): cell["latency_s"]["mean"] for cell in found
    }
    lines = []
    for setup, rates in published()["turbospec"].items():
        for rate, printed in rates.items():
            row = [
                f"{cells[setup, int(rate), column]:.2f} ({printed[column]:.2f})"
                for column in (*LENGTHS, "TS")
            ]
            lines.append([setup, rate, *row, f"{cells[setup, int(rate), 'auto-1']:.2f}"])
    return markdown(f"target, data | QPS | {' | '.join(LENGTHS)} | TS | auto-1", lines)


@table
def turbospec_errors() -> str:
    summary = result("papers-turbospec.json")["summary"]
    names = {
        "draft rows": "draft rows",
        "draft rows, not fitted": "of these, not fitted",
        "prompt lookup rows": "prompt lookup rows",
        "prompt lookup rows, not fitted": "of these, not fitted",
    }
    return markdown(
        " | cells | median error",
        [
            [name, summary[key]["cells"], f"{100 * summary[key]['median_error']:.1f} %"]
            for key, name in names.items()
        ],
    )


def cells_by_seed() -> dict[tuple[str, int, int], dict[str, float]]:
    """Return latencies by column, of each set-up, rate and seed of the newer runs of `auto`."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for cell in result("papers-turbospec-auto-cells.json")["cells"]:
        found.setdefault((cell["setup"], cell["rate"], cell["seed"]), {})[cell["column"]] = cell[
            "latency_s"
        ]
    return found


def auto_to_best(latencies: dict[str, float]) -> tuple[str, float]:
    """Return the best fixed length of a cell, and how much slower `auto` with chains is than it, in
    per cent.
    """
    best = min(LENGTHS, key=lambda name: latencies[name])
    return best, 100 * (latencies["auto-1"] / latencies[best] - 1)


@table
def turbospec_auto() -> str:
    cells = cells_by_seed()
    lines = []
    for setup, rates in published()["turbospec"].items():
        for rate in rates:
            row = []
            for seed in (0, 1):
                latencies = cells[setup, int(rate), seed]
                best, slower = auto_to_best(latencies)
                row += [f"{best} {latencies[best]:.2f}", f"{slower:+.1f} %"]
            lines.append([setup, rate, *row])
    return markdown(
        "target, data | QPS | best fixed, seed 0 | auto-1 | best fixed, seed 1 | auto-1", lines
    )


def faster(cells: dict[str, Any], names: Sequence[str], figure: str = "latency_s") -> str:
    """Return by how much each of some columns is faster than plain decoding."""
    power = 1 if figure == "latency_s" else -1
    return " / ".join(
        f"{(cells['Org'][figure] / cells[name][figure]) ** power:.2f}" for name in names
    )


def of_columns(cells: dict[str, Any], names: Sequence[str], figure: str, form: str = ".1f") -> str:
    """Return a figure of each of some columns."""
    return " / ".join(format(cells[name][figure], form).replace("%", " %") for name in names)


@table
def goodput_figures() -> str:
    found = result("papers-goodput-figures.json")
    rates, batches, offline, growth = (
        found[part] for part in ("rates", "batches", "offline", "growth")
    )
    chains = LENGTHS[1:]
    # milliseconds of a draft level
    slow = "2.2"
    fast = "0.47"

    def at_rates(name: str) -> str:
        return " / ".join(faster(cells, [name]) for cells in rates.values())

    def of_both(row: Callable[[str], str]) -> list[str]:
        return [row(slow), row(fast)]

    def lengths(level: str) -> str:
        return " / ".join(
            of_columns(batches[level][a]["1"], ["TS"], "drafted") for a in ("0.5", "0.9")
        )

    lines = [
        ["SmartSpec 1", "k=3 at 4 / 12 / 16 / 24 requests/s, speed-up", "below 1 beyond 16", at_rates("k=3"), ""],
        ["SmartSpec 1", "k=5, the same", "at most 1 beyond 12", at_rates("k=5"), ""],
        ["SmartSpec 3", "requests per step at 16 requests/s, Org / k=1 / 3 / 5", "",
         of_columns(rates["16"], LENGTHS[:4], "requests_per_step"), ""],
        ["SmartSpec 3", "steps per request, the same", "", of_columns(rates["16"], LENGTHS[:4], "steps", ".0f"), ""],
        ["TurboSpec 9", "k=1 / 3 / 5 / 7 at batch 16, acceptance 0.5, speed-up", "below 1",
         *of_both(lambda level: faster(batches[level]["0.5"]["16"], chains))],
        ["TurboSpec 9", "`TS`, the same", "0.97", *of_both(lambda level: faster(batches[level]["0.5"]["16"], ["TS"]))],
        ["TurboSpec 10", "length of `TS` at batch 1, acceptance 0.5 / 0.9", "3 / 7", *of_both(lengths)],
        ["TurboSpec 11", "L40S, acceptance 0.9, throughput with k=1 / 3 / 5 / `TS`", "up to nearly 2", "",
         faster(offline["L40S"]["0.9"], ("k=1", "k=3", "k=5", "TS"), "throughput")],
        *(["TurboSpec 11", f"H100, prompts of 1024, acceptance {a}, the same", "1.1 to 1.5", "",
           faster(offline["H100"][a], ("k=1", "k=3", "k=5", "TS"), "throughput")] for a in ("0.5", "0.9")),
        ["TurboSpec 15", "length of `TS` at 1 / 4 / 8 / 12 requests/s, ShareGPT", "0 from 8 on",
         *of_both(lambda level: " / ".join(f"{growth[level]['TS'][f'{r}, drafted']:.1f}" for r in (1, 4, 8, 12)))],
        *(["TurboSpec 15", f"length of `TS` in Sonnet / ShareGPT, acceptance of {name}", "6 / 2 to 3", "",
           " / ".join(f"{found['shift'][source]['TS'][f'{data}, drafted']:.1f}" for data in ("Sonnet", "ShareGPT"))]
          for source, name in (("table 3", "table 3"), ("33B", "the 33B's rows"))),
        ["TurboSpec 16", "share of a step that k=1 / 7 draft, batch 16", "15 % / 35 %",
         *of_both(lambda level: of_columns(batches[level]["0.5"]["16"], ("k=1", "k=7"), "draft_share", ".0%"))],
    ]  # fmt: skip
    return markdown("figure | what | published | here, 2.2 ms a level | here, 0.47 ms", lines)


@table
def goodput_shift() -> str:
    lines = []
    for source, name in (("table 3", "as table 3"), ("33B", "as the 33B's")):
        for data in ("Sonnet", "ShareGPT"):
            cells = result("papers-goodput-figures.json")["shift"][source].values()
            lines.append(
                [
                    f"{data}, acceptance {name}",
                    *(f"{own[f'{data}, latency_s']:.2f}" for own in cells),
                ]
            )
    return markdown(" | Org | k=3 | k=7 | TS | `auto`", lines)


@table
def goodput_steps() -> str:
    found = result("papers-goodput-figures.json")["rate steps"]
    lines = []
    for figure, unit in (("latency_s", "mean"), ("p99_s", "99th percentile")):
        for rate in ("1", "16", "48"):
            cells = (f"{own[f'{rate}, {figure}']:.2f}" for own in found.values())
            lines.append([f"{rate} per second, {unit}", *cells])
    return markdown(f" | {' | '.join(found)}".replace("auto", "`auto`"), lines)


@table
def goodput_heads() -> str:
    lines = []
    for acceptance, by_rate in result("papers-goodput-figures.json")["heads"].items():
        for rate, cells in by_rate.items():
            row = (f"{own['latency_s']:.2f} ({1 + own['drafted']:.1f})" for own in cells.values())
            lines.append([acceptance, rate, *row])
    return markdown("acceptance | requests/s | Org | top 1 | SmartSpec | `auto`", lines)


# --- SLOs-Serve and Delacourt's thesis
# -------------------------------------------------------------------------------

CAPACITIES = {
    "vLLM": "vLLM",
    "vLLM, speculating 4": "vLLM, speculating 4",
    "Sarathi, smaller": "Sarathi, smaller chunk",
    "Sarathi, larger": "Sarathi, larger chunk",
    "SLOs-Serve": "SLOs-Serve",
    "ours": "`auto`",
}
# The paper's ratios.
PARTS = {
    "chatbot": "1.41-1.70",
    "coder": "up to 2.1",
    "summarizer": "1.14-1.17",
    "mixed": "",
    "toolllm": "up to 1.90",
}
RATIOS = {
    "chatbot": (1.41, 1.7),
    "coder": (1.0, 2.1),
    "summarizer": (1.14, 1.17),
    "toolllm": (1.0, 1.9),
}


def part_name(part: str) -> str:
    return {"chatbot": "ChatBot", "toolllm": "ToolLLM"}.get(part, part.capitalize())


@functools.cache
def capacities(part: str) -> dict[str, float]:
    """Return capacities by system; parts of several seeds have intervals."""
    found = result("papers-slos-serve.json")[part]["capacity"]
    return {
        name: value["mean"] if isinstance(value, dict) else value for name, value in found.items()
    }


def capacity_ratios(part: str) -> list[tuple[float, float]]:
    """Return the capacities of SLOs-Serve and of `auto`, relative to the better of vLLM and
    Sarathi.

    The first ratio of each is to Sarathi with the larger chunk, the second to Sarathi with its
    better chunk."""
    found = capacities(part)
    larger = max(found["vLLM"], found["Sarathi, larger"])
    better = max(larger, found["Sarathi, smaller"])
    return [(found[name] / larger, found[name] / better) for name in ("SLOs-Serve", "ours")]


@table
def slos_serve_capacity() -> str:
    lines = []
    for part in PARTS:
        found = capacities(part)
        lines.append(
            [
                part_name(part),
                *(f"{found[name]:.2f}" if name in found else "" for name in CAPACITIES),
            ]
        )
    return markdown(f" | {' | '.join(CAPACITIES.values())}", lines)


@table
def slos_serve_ratios() -> str:
    lines = []
    for part, paper in PARTS.items():
        cells = [f"{larger:.2f} ({better:.2f})" for larger, better in capacity_ratios(part)]
        lines.append([part_name(part), paper, *cells])
    return markdown(" | published | SLOs-Serve's policy here | `auto` here", lines)


@table
def slos_serve_replicas() -> str:
    lines: list[list[str]] = []
    for part, published in (("chatbot", "2.18 / 3.36 / 4.61"), ("coder", "four: 6.2")):
        lines.append([f"{part_name(part)}, published", "", "", "", "", published])
        for key, name in (("slos-serve", "SLOs-Serve"), ("auto", "`auto`")):
            values = [
                capacities(f"replicas, {part}, {key}")[number] for number in ("1", "2", "3", "4")
            ]
            scaled = " / ".join(f"{value / values[0]:.2f}" for value in values[1:])
            lines.append(
                [f"{part_name(part)}, {name}", *(f"{value:.2f}" for value in values), scaled]
            )
    return markdown("replicas | 1 | 2 | 3 | 4 | times one: 2 / 3 / 4", lines)


def ablation_gains(part: str) -> list[float]:
    """Return how many times the capacity is with routing, with speculation, and with admission."""
    replicas = capacities(f"replicas, {part}, slos-serve")
    ablated = capacities(f"ablation, {part}")
    whole = capacities(part)["SLOs-Serve"]
    plain = ablated["without speculation"]
    return [
        replicas["4"] / (4 * replicas["1"]),
        whole / plain,
        plain / ablated["without admission"],
    ]


@table
def slos_serve_ablation() -> str:
    lines, here = (
        [["mean of four scenarios, published", "1.19", "1.66", "1.34"]],
        list[list[float]](),
    )
    for part, published in (
        ("chatbot", ["", "2.01", ""]), ("coder", ["1.92", "", "1.66"]), ("summarizer", ["", "2.02", ""]), ("mixed", [])
    ):  # fmt: skip
        lines += [[f"{part_name(part)}, published", *published]] if published else []
        here.append(ablation_gains(part))
        lines.append([f"{part_name(part)}, here", *(f"{gain:.2f}" for gain in here[-1])])
    means = (math.prod(gains) ** (1.0 / len(here)) for gains in zip(*here, strict=True))
    lines.insert(1, ["geometric mean of four scenarios, here", *(f"{gain:.2f}" for gain in means)])
    return markdown(" | routing over four replicas | speculation | admission in bursts", lines)


@table
def stages() -> str:
    lines = []
    names = {
        "reasoning": "Reasoning",
        "reasoning, three replicas": "on three replicas",
        "tools": "ToolLLM with pauses",
    }
    for part, name in names.items():
        for system, by_rate in result("stages.json")[part].items():
            for rate, run in by_rate.items():
                shares = (
                    f"{100 * run[key]:.0f} %"
                    for key in ("attained", "first_token_in_time", "windows_kept")
                )
                kept = f"{100 * run['reused_share']:.0f} %"
                cells = [
                    f"{run['latency_s']:.1f} s",
                    f"{run['tpot_ms']:.1f} ms",
                    f"{run['step_ms']:.1f} ms",
                    kept,
                ]
                lines.append([name, system.replace("auto", "`auto`"), rate, *shares, *cells])
    return markdown(
        " |  | requests/s | attained | first token in time | windows kept | latency | TPOT | step | prompts kept",
        lines,
    )


@table
def thesis_throughput() -> str:
    measured = result("papers-thesis.json")
    sizes = ("1", "2", "4", "8", "16", "32")
    rows = {
        f"{name}, published": values for name, values in measured["published_tokens_per_s"].items()
    }
    names = {"dynamic": "dynamic", "static": "static", "ours": "`auto`", "plain": "plain decoding"}
    for key, name in names.items():
        rows[name] = [measured["throughput"][size][key]["throughput"]["mean"] for size in sizes]
    lines = [[name, *(f"{value:.0f}" for value in values)] for name, values in rows.items()]
    for above, below, name in (
        ("dynamic, published", "static, published", "dynamic to static, published"),
        ("dynamic", "static", "dynamic to static"),
    ):
        lines.append(
            [name, *(f"{a / b:.2f}" for a, b in zip(rows[above], rows[below], strict=True))]
        )
    return markdown(f" | {' | '.join(sizes)}", lines)


@table
def thesis_slos() -> str:
    lines = [
        [
            "published, Algorithm 2",
            "30.4 ms (27.8 with tuned drafts)",
            "",
            '"below expectations"',
            "under 20 %",
        ]
    ]
    for name, row in result("papers-thesis.json")["targets"].items():
        shares = (
            f"{100 * row[key]['mean']:.0f} %"
            for key in ("attained", "tight_attained", "below_20_ms")
        )
        lines.append(
            [name.replace("ours", "`auto`"), f"{row['mean_tpot_ms']['mean']:.1f} ms", *shares]
        )
    return markdown(" | mean time per token | attained | attained, 20 ms | all below 20 ms", lines)


@table
def thesis_tuned() -> str:
    sizes = list(result("papers-thesis-tuned.json")["throughput"])
    lines = []
    for file, name in (("papers-thesis.json", "before"), ("papers-thesis-tuned.json", "after")):
        measured = result(file)
        dynamic, static = (
            [measured["throughput"][size][key]["throughput"]["mean"] for size in sizes]
            for key in ("dynamic", "static")
        )
        lines += [
            [f"dynamic, {name}", *(f"{value:.0f}" for value in dynamic)],
            [f"static, {name}", *(f"{value:.0f}" for value in static)],
            [
                f"dynamic to static, {name}",
                *(f"{a / b:.2f}" for a, b in zip(dynamic, static, strict=True)),
            ],
        ]
    return markdown(f" | {' | '.join(sizes)}", lines)


# --- Routing, and the simulator beside real runs
# ---------------------------------------------------------------------

LOADS = {
    "adaserve, poisson": ("`adaserve`", "`llama-70b-4xa100`"),
    "adaserve-ttft, poisson": ("`adaserve`, with TTFT SLOs", "`llama-70b-4xa100`"),
    "mixed, poisson": ("`mixed`", "`opt-13b-a100`"),
    "azure-code, poisson": ("`azure-code`, with TTFT SLOs", "`llama-70b-4xh100`"),
    "azure-conversation, poisson": ("`azure-conversation`, with TTFT SLOs", "`llama-70b-4xh100`"),
    "all, poisson": ("a fourth of each mix, TTFT SLOs for Azure", "`llama-70b-4xh100`"),
    "adaserve, gamma": ("bursts (gamma, 3.0), `adaserve`", "`llama-70b-4xa100`"),
    "all, gamma": ("bursts (gamma, 3.0), a fourth of each mix", "`llama-70b-4xh100`"),
}


@table
def routing() -> str:
    points = result("routing.json")["points"]

    def capacity(load: str, replicas: int, router: str) -> float | None:
        keys = [f"{load}, {replicas}, {router}, {seed}" for seed in range(4)]
        values = [points[key]["capacity_per_replica"] for key in keys if key in points]
        return replicas * statistics.fmean(values) if values else None

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    lines = []
    for load, names in LOADS.items():
        one, ours, queue = (
            capacity(load, 1, "any"),
            *(capacity(load, 4, r) for r in ("guarantees", "shortest-queue")),
        )
        others = [f"`{r}` {shown(capacity(load, 4, r))}" for r in ("power-of-two", "round-robin", "oracle")
                  if capacity(load, 4, r)]  # fmt: skip
        ratio = f"{ours / queue:.2f}" if ours and queue else ""
        lines.append([*names, shown(one), shown(ours), shown(queue), ratio, ", ".join(others)])
    return markdown(
        "load | hardware | 1 | 4, `guarantees` | 4, `shortest-queue` | ratio | 4, others", lines
    )


@table
def fidelity() -> str:
    rows = result("fidelity-cpu-2core.json")["results"]
    lines = []
    for system, name in (("auto", "`auto`"), ("plain", "plain")):
        for load in (0.4, 0.7):
            row = find(rows, system=system, pressure=load) or find(
                rows, system="none", pressure=load
            )
            real = row["real"]
            simulated = row["run"]["simulated"]
            error = 100 * (simulated["tpot_ms"] / real["tpot_ms"] - 1)
            lines.append([
                load, name, f"{real['tpot_ms']:.1f} / {simulated['tpot_ms']:.1f} ({error:+.0f} %)",
                f"{100 * real['attained']:.0f} / {100 * simulated['attained']:.0f} %",
                f"{real['steps']:.1f} / {simulated['steps']:.1f}",
            ])  # fmt: skip
    return markdown("load | system | time per token, ms | attained | steps per request", lines)


@table
def guarantees() -> str:
    rows = result("guarantees.json")["results"]
    lines = [
        [
            f"{row['rate']:.0f}/s, {row['arrivals']}", f"{1e3 * row['tpot_slo_s']:.0f} ms",
            "none" if row["stated"] is None else f"{100 * row['stated']:.0f} %",
            f"{row['guarantees']:,} of {row['requests']:,}",
            *(f"{100 * row[f'kept_{part}']:.1f} %" for part in ("ttft", "tpot", "windows", "all")),
            f"{100 * row['attained_by_all_requests']:.0f} %", f"{row['throughput']:.0f}",
        ]
        for row in sorted(rows, key=lambda row: (-row["tpot_slo_s"], row["stated"] or 0.0, row["arrivals"] != "steady"))
    ]  # fmt: skip
    header = (
        "load | TPOT SLO | stated | guaranteed | kept TTFT | mean TPOT | windows | all three | "
        "TTFT and mean TPOT, of all requests | tokens/s"
    )
    return markdown(header, lines)


@table
def request_shapes() -> str:
    found = result("request-shapes.json")["results"]
    lines = []
    for machine, load in dict.fromkeys(
        (row["machine"], row["load"]) for row in next(iter(found.values()))
    ):
        before, now, bound = (
            {key: statistics.fmean(row[key] for row in rows if (row["machine"], row["load"]) == (machine, load))
             for key in ("attainment", "throughput", "goodput")}
            for rows in (found["one depth per step"], found["depth by request"], found["widths at no cost"])
        )  # fmt: skip
        missed = [f"{100 * (1 - each['attainment']):.1f} %" for each in (before, now, bound)]
        changes = [
            f"{100 * (now[key] / before[key] - 1):+.1f} %" for key in ("throughput", "goodput")
        ]
        more = f"{100 * (bound['throughput'] / now['throughput'] - 1):+.1f} %"
        lines.append([machine, load, *missed[:2], *changes, missed[2], more])
    header = "machine | load | SLOs missed before | now | tokens/s | tokens/s of attained SLOs "
    return markdown(header + "| SLOs missed with free widths | tokens/s to now", lines)


@table
def predictors() -> str:
    names = ("random", "smartspec", "auto", "oracle")
    lines = []
    for row in result("predictors.json")["results"]:
        own = row["speedups"]
        best = row["best"]
        cells = [f"{own[name]:.2f}" for name in names]
        lines.append(
            [
                row["drafter"],
                row["hardware"],
                f"{row['rate']:g}",
                *cells,
                f"{own[best]:.2f} ({best})",
            ]
        )
    return markdown(
        "drafter | costs of | requests/s | random | moving average | `auto` | known | best constant",
        lines,
    )


# --- The first table of papers.md
# ------------------------------------------------------------------------------------


def _made(command: str, *provenances: dict[str, Any]) -> str:
    """Return the command that made a row, and when it ran."""
    dates = dict.fromkeys(
        f"{datetime.fromisoformat(each['date']):%B %-d, %Y}" for each in provenances
    )
    return f"`{command}`, {' and '.join(dates)}"


def _off(value: float, low: float, high: float) -> str:
    """Return by how much a value is outside of a published range, in per cent."""
    if low <= value <= high:
        return "within" if low < high else "0 %"
    return f"{100 * (value / (low if value < low else high) - 1):+.0f} %"


def _adaserve_summary() -> list[list[str]]:
    record = result("papers-adaserve.json")
    link = "[AdaServe](#adaserve-figures-8-9-and-12-llama-3-1-70b-with-a-1b-draft-four-a100)"
    lines = []
    for figure, name, scale, digits, unit in (
        ("attainment", "figure 8, attained", 100.0, 1, " %"),
        ("goodput", "figure 9, goodput", 1.0, 0, " tokens/s"),
        ("tokens_per_request_and_step", "figure 12, tokens per request and step", 1.0, 2, ""),
    ):
        theirs = published()["adaserve"][figure]["adaserve"]
        own, auto = (
            {rate: scale * record["results"][system][rate][figure]["mean"] for rate in RATES}
            for system in ("adaserve", "auto")
        )
        error = statistics.fmean(abs(own[rate] - theirs[rate]) for rate in RATES)
        lines.append([
            f"{link}, {name}, at 4.8 requests/s", f"{theirs['4.8']:g}{unit}", f"{own['4.8']:.{digits}f}{unit}",
            f"{error:.{max(digits, 1)}f}{unit.replace(' %', ' points')}, mean over rates",
            f"{auto['4.8']:.{digits}f}{unit}", _made("adaserve.py", record["provenance"]),
        ])  # fmt: skip
    attained = 100 * record["results"]["adaserve-oracle"]["4.8"]["attainment"]["mean"]
    lines.insert(1, [
        f"{link}, figure 8 with true path probabilities (Algorithm 1)", "not published", f"{attained:.1f} %", "",
        lines[0][4], _made("adaserve.py", record["provenance"]),
    ])  # fmt: skip
    return lines


def _turbospec_summary() -> list[list[str]]:
    record = result("papers-turbospec.json")
    newer = result("papers-turbospec-auto-cells.json")
    cells = {
        (cell["setup"], cell["rate"], cell["column"]): cell["latency_s"]["mean"]
        for cell in record["cells"]
    }
    link, made = (
        "[TurboSpec](#turbospec-table-5-arxiv-2406-14066)",
        _made("turbospec.py", record["provenance"]),
    )
    lines = []
    for setup, rate in (("33B ShareGPT", 4), ("70B ShareGPT", 8)):
        theirs = published()["turbospec"][setup][str(rate)]["TS"]
        own = cells[setup, rate, "TS"]
        lines.append([
            f"{link}, table 5, {setup} at {rate} QPS, `TS`", f"{theirs:.2f} s", f"{own:.2f} s",
            _off(own, theirs, theirs), f"{cells[setup, rate, 'auto-1']:.2f} s", made,
        ])  # fmt: skip
    draft, lookup = (record["summary"][name] for name in ("draft rows", "prompt lookup rows"))
    slower = [auto_to_best(latencies)[1] for latencies in cells_by_seed().values()]
    lines.append([
        f"{link}, table 5, all cells", f"{draft['cells']} and {lookup['cells']} latencies", "below",
        f"{100 * draft['median_error']:.0f} % (draft), {100 * lookup['median_error']:.0f} % (lookup), medians",
        f"{min(slower):+.1f} to {max(slower):+.1f} % of the best fixed length",
        _made("turbospec.py", record["provenance"], newer["provenance"]),
    ])  # fmt: skip
    return lines


def _slos_serve_summary() -> list[list[str]]:
    record = result("papers-slos-serve.json")
    link = "[SLOs-Serve](#slos-serve-capacity)"
    lines = []
    for part, (low, high) in RATIOS.items():
        own, auto = (ratios[0] for ratios in capacity_ratios(part))
        lines.append([
            f"{link}, figure 9, {part_name(part)}: capacity to the better of vLLM and Sarathi", PARTS[part],
            f"{own:.2f}", _off(own, low, high), f"{auto:.2f}",
            _made(f"slos_serve.py --parts {part}", record[part]["provenance"]),
        ])  # fmt: skip
    lines.append(
        [
            f"{link}, figure 9, Reasoning",
            "2.4",
            "not simulated: no latencies of its model",
            "",
            "",
            "",
        ]
    )
    for app, published in (("chatbot", 4.61), ("coder", 6.2)):
        parts = [f"replicas, {app}, {system}" for system in ("slos-serve", "auto")]
        own, auto = (capacities(part)["4"] / capacities(part)["1"] for part in parts)
        lines.append([
            f"{link}, figure 13, {part_name(app)}: capacity of four replicas to one", f"{published:.2f}", f"{own:.2f}",
            _off(own, published, published), f"{auto:.2f}",
            _made("slos_serve.py", *(record[part]["provenance"] for part in parts)),
        ])  # fmt: skip
    routing, _, admission = ablation_gains("coder")
    for name, gain, published, part in (
        (
            "ChatBot: capacity to that without speculation",
            ablation_gains("chatbot")[1],
            2.01,
            "ablation, chatbot",
        ),
        (
            "Summarizer: capacity to that without speculation",
            ablation_gains("summarizer")[1],
            2.02,
            "ablation, summarizer",
        ),
        (
            "Coder: capacity of four replicas to four times one",
            routing,
            1.92,
            "replicas, coder, slos-serve",
        ),
        (
            "Coder: capacity with admission to that of prefill first",
            admission,
            1.66,
            "ablation, coder",
        ),
    ):
        made = _made(f'slos_serve.py --parts "{part}"', record[part]["provenance"])
        error = _off(gain, published, published)
        lines.append(
            [f"{link}, figure 14, {name}", f"{published:.2f}", f"{gain:.2f}", error, "", made]
        )
    return lines


def _further_summary() -> list[list[str]]:
    goodput, workloads = (
        result("papers-goodput-figures.json"),
        result("papers-adaserve-workloads.json"),
    )
    link, made = "[SmartSpec, TurboSpec](#smartspec-and-turbospec-figures-without-tables)", _made(
        "goodput_figures.py", goodput["provenance"]
    )  # fmt: skip
    lines = []
    at_16 = goodput["rates"]["16"]
    k5, auto = (at_16["Org"]["latency_s"] / at_16[name]["latency_s"] for name in ("k=5", "auto"))
    lines.append([
        f"{link}, SmartSpec's figure 1, speed-up of k=5 at 16 requests/s", "at most 1", f"{k5:.2f}", _off(k5, 0.0, 1.0),
        f"{auto:.2f}", made,
    ])  # fmt: skip
    for acceptance, theirs in (("0.5", 3.0), ("0.9", 7.0)):
        cells = goodput["batches"]["0.47"][acceptance]["1"]
        own, auto = (cells[name]["drafted"] for name in ("TS", "auto"))
        lines.append([
            f"{link}, TurboSpec's figure 10, length at acceptance {acceptance}", f"{theirs:.0f}", f"{own:.1f}",
            _off(own, theirs, theirs), f"{auto:.1f}", made,
        ])  # fmt: skip
    link = "[AdaServe](#adaserve-figures-1-10-11-and-15)"
    made = _made("adaserve.py --workloads", workloads["provenance"])
    for figure, workload, theirs in (("10", "urgent 0.9", 4.3), ("11", "scale 0.8", 4.61)):
        cells = workloads["results"][workload]
        own, auto = ((1 - cells["vllm-spec4"]["attainment"]) / (1 - cells[name]["attainment"])
                     for name in ("adaserve", "auto"))  # fmt: skip
        lines.append([
            f"{link}, figure {figure}, {WORKLOADS[workload]}: SLO misses of vLLM-Spec4 to AdaServe's",
            f"up to {theirs} (best other)", f"{own:.1f}", _off(own, 1.0, theirs), f"{auto:.1f}", made,
        ])  # fmt: skip
    own, auto = (
        100 * workloads["results"]["as published"][name]["draft_share"]
        for name in ("adaserve", "auto")
    )
    lines.append([
        f"{link}, figure 15, share of speculation in a step", "31.5 %", f"{own:.1f} %", _off(own, 31.5, 31.5),
        f"{auto:.1f} %", made,
    ])  # fmt: skip
    return lines


def _tuned_summary() -> list[str]:
    record = result("papers-thesis-tuned.json")
    own, auto = (
        record["targets"][name]["mean_tpot_ms"]["mean"] for name in ("Algorithm 2", "ours")
    )
    before = result("papers-thesis.json")["targets"]["Algorithm 2"]["mean_tpot_ms"]["mean"]
    return [
        "[Thesis](#after-fine-tuning), Algorithm 2 after fine-tuning, time per token to that before (fitted)",
        f"{27.8 / 30.4:.2f}", f"{own / before:.2f}", _off(own / before, 27.8 / 30.4, 27.8 / 30.4), f"{auto:.1f} ms",
        _made(f"thesis.py --acceptance {record['provenance']['acceptance']}", record["provenance"]),
    ]  # fmt: skip


def _thesis_summary() -> list[list[str]]:
    record, link = (
        result("papers-thesis.json"),
        "[Thesis](#delacourts-thesis-dynamic-against-static-trees)",
    )
    made, theirs = (
        _made("thesis.py", record["provenance"]),
        record["published_tokens_per_s"]["dynamic"],
    )
    lines = []
    for size, printed in zip(("1", "2", "4", "8", "16", "32"), theirs, strict=True):
        own, auto = (
            record["throughput"][size][name]["throughput"]["mean"] for name in ("dynamic", "ours")
        )
        lines.append([
            f"{link}, dynamic trees at batch {size}, tokens/s", str(printed), f"{own:.0f}",
            _off(own, printed, printed), f"{auto:.0f}", made,
        ])  # fmt: skip
    own, auto = (
        record["targets"][name]["mean_tpot_ms"]["mean"] for name in ("Algorithm 2", "ours")
    )
    lines.append([
        f"{link}, Algorithm 2 at batch 4, time per token", "30.4 ms", f"{own:.1f} ms", _off(own, 30.4, 30.4),
        f"{auto:.1f} ms", made,
    ])  # fmt: skip
    return lines


@table
def papers_summary() -> str:
    lines = [*_adaserve_summary(), *_turbospec_summary(), *_further_summary()]
    lines += [*_slos_serve_summary(), *_thesis_summary(), _tuned_summary()]
    return markdown("experiment | published | reproduced | error | `auto` | made by, on", lines)
