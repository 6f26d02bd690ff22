"""Tables of what was simulated: the papers' experiments beside published values, routing, the simulator itself."""

from __future__ import annotations

import functools
import json
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


# --- AdaServe --------------------------------------------------------------------------------------------------------


def adaserve_rows(figure: str, scale: float, digits: int) -> list[list[str]]:
    """Return the simulated values of every system, published ones in brackets, and their mean absolute error."""
    results, printed = result("papers-adaserve.json")["results"], published()["adaserve"][figure]
    lines = []
    for system, name in SYSTEMS.items():
        values = {rate: scale * results[system][rate][figure]["mean"] for rate in RATES}
        if system not in printed:
            lines.append([name, *(f"{values[rate]:.{digits}f}" for rate in RATES), ""])
            continue
        error = statistics.fmean(abs(values[rate] - printed[system][rate]) for rate in RATES)
        cells = [f"{values[rate]:.{digits}f} ({printed[system][rate]:g})" for rate in RATES]
        lines.append([name, *cells, f"{error:.1f}"])
    return lines


@table
def adaserve_attainment() -> str:
    return markdown(f" | {' | '.join(RATES)} | error", adaserve_rows("attainment", 100, 1))


@table
def adaserve_goodput() -> str:
    return markdown(f" | {' | '.join(RATES)} | error", adaserve_rows("goodput", 1, 0))


@table
def adaserve_oracle() -> str:
    results = result("papers-adaserve.json")["results"]
    shares = result("papers-adaserve.json")["share of the distance from the best other system"]

    def attained(name: str) -> list[float]:
        return [100 * results[name][rate]["attainment"]["mean"] for rate in RATES]

    def share(figure: str, to: str) -> list[str]:
        return [f"{100 * shares[figure]['auto'][to][rate]['mean']:.0f}" for rate in RATES]

    best = [max(values) for values in zip(*(attained(name) for name in OTHERS), strict=True)]
    lines: list[Sequence[str]] = [
        [name, *(f"{value:.1f}" for value in values)]
        for name, values in (
            ("best other system, attained %", best), ("`auto`", attained("auto")), ("oracle", attained("oracle"))
        )
    ]  # fmt: skip
    lines += [
        ["share of the distance to the oracle, %", *share("attainment", "oracle")],
        ["share to the best oracle, %", *share("attainment", "oracle, best")],
        ["share to the bound, %", *share("attainment", "bound")],
        ["the same for goodput, to the oracle, %", *share("goodput", "oracle")],
        ["goodput, to the bound, %", *share("goodput", "bound")],
    ]
    return markdown(f" | {' | '.join(RATES)}", lines)


@table
def adaserve_sensitivity() -> str:
    lines = []
    for changed, values in result("papers-adaserve.json")["sensitivity"].items():
        name = ", ".join(f"`{key}` = {value:g}" for key, value in json.loads(changed).items()) or "nothing"
        lines.append([name, *(f"{value:.1f}" for value in values)])
    return markdown("changed | AdaServe 3.4 | AdaServe 4.8 | `auto` 3.4 | `auto` 4.8", lines)


# --- TurboSpec -------------------------------------------------------------------------------------------------------


@table
def turbospec() -> str:
    found = result("papers-turbospec.json")["cells"]
    cells = {(cell["setup"], cell["rate"], cell["column"]): cell["latency_s"]["mean"] for cell in found}
    lines = []
    for setup, rates in published()["turbospec"].items():
        for rate, printed in rates.items():
            row = [f"{cells[setup, int(rate), column]:.2f} ({printed[column]:.2f})" for column in (*LENGTHS, "TS")]
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
        [[name, summary[key]["cells"], f"{100 * summary[key]['median_error']:.1f} %"] for key, name in names.items()],
    )


def cells_by_seed() -> dict[tuple[str, int, int], dict[str, float]]:
    """Return latencies by column, of each set-up, rate and seed of the newer runs of `auto`."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for cell in result("papers-turbospec-auto-cells.json")["cells"]:
        found.setdefault((cell["setup"], cell["rate"], cell["seed"]), {})[cell["column"]] = cell["latency_s"]
    return found


def auto_to_best(latencies: dict[str, float]) -> tuple[str, float]:
    """Return the best fixed length of a cell, and how much slower `auto` with chains is than it, in per cent."""
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
    return markdown("target, data | QPS | best fixed, seed 0 | auto-1 | best fixed, seed 1 | auto-1", lines)


# --- SLOs-Serve and Delacourt's thesis -------------------------------------------------------------------------------

CAPACITIES = {
    "vLLM": "vLLM",
    "vLLM, speculating 4": "vLLM, speculating 4",
    "Sarathi, smaller": "Sarathi, smaller chunk",
    "Sarathi, larger": "Sarathi, larger chunk",
    "SLOs-Serve": "SLOs-Serve",
    "ours": "`auto`",
}
PARTS = {"chatbot": "1.41-1.70", "coder": "up to 2.1", "summarizer": "1.14-1.17", "mixed": ""}  # the paper's ratios


def part_name(part: str) -> str:
    return {"chatbot": "ChatBot"}.get(part, part.capitalize())


@table
def slos_serve_capacity() -> str:
    parts = result("papers-slos-serve.json")
    lines = [[part_name(part), *(f"{parts[part]['capacity'][name]:.2f}" for name in CAPACITIES)] for part in PARTS]
    return markdown(f" | {' | '.join(CAPACITIES.values())}", lines)


@table
def slos_serve_ratios() -> str:
    parts = result("papers-slos-serve.json")
    lines = []
    for part, paper in PARTS.items():
        capacity = parts[part]["capacity"]
        larger = max(capacity["vLLM"], capacity["Sarathi, larger"])
        better = max(larger, capacity["Sarathi, smaller"])
        cells = [f"{capacity[n] / larger:.2f} ({capacity[n] / better:.2f})" for n in ("SLOs-Serve", "ours")]
        lines.append([part_name(part), paper, *cells])
    return markdown(" | published | SLOs-Serve's policy here | `auto` here", lines)


@table
def slos_serve_replicas() -> str:
    parts = result("papers-slos-serve.json")
    lines: list[list[str]] = [["published", "", "", "", "", "2.18 / 3.36 / 4.61"]]
    for key, name in (("slos-serve", "SLOs-Serve"), ("auto", "`auto`")):
        capacity = parts[f"replicas, chatbot, {key}"]["capacity"]
        values = [capacity[number] for number in ("1", "2", "3", "4")]
        lines.append([name, *(f"{v:.2f}" for v in values), " / ".join(f"{v / values[0]:.2f}" for v in values[1:])])
    return markdown("replicas, ChatBot | 1 | 2 | 3 | 4 | times one: 2 / 3 / 4", lines)


@table
def thesis_throughput() -> str:
    measured = result("papers-thesis.json")
    sizes = ("1", "2", "4", "8", "16", "32")
    rows = {f"{name}, published": values for name, values in measured["published_tokens_per_s"].items()}
    names = {"dynamic": "dynamic", "static": "static", "ours": "`auto`", "plain": "plain decoding"}
    for key, name in names.items():
        rows[name] = [measured["throughput"][size][key]["throughput"]["mean"] for size in sizes]
    lines = [[name, *(f"{value:.0f}" for value in values)] for name, values in rows.items()]
    for above, below, name in (
        ("dynamic, published", "static, published", "dynamic to static, published"),
        ("dynamic", "static", "dynamic to static"),
    ):
        lines.append([name, *(f"{a / b:.2f}" for a, b in zip(rows[above], rows[below], strict=True))])
    return markdown(f" | {' | '.join(sizes)}", lines)


@table
def thesis_slos() -> str:
    lines = [["published, Algorithm 2", "30.4 ms (27.8 with tuned drafts)", "", '"below expectations"', "under 20 %"]]
    for name, row in result("papers-thesis.json")["targets"].items():
        shares = (f"{100 * row[key]['mean']:.0f} %" for key in ("attained", "tight_attained", "below_20_ms"))
        lines.append([name.replace("ours", "`auto`"), f"{row['mean_tpot_ms']['mean']:.1f} ms", *shares])
    return markdown(" | mean time per token | attained | attained, 20 ms | all below 20 ms", lines)


# --- Routing, and the simulator beside real runs ---------------------------------------------------------------------

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
        one, ours, queue = capacity(load, 1, "any"), *(capacity(load, 4, r) for r in ("guarantees", "shortest-queue"))
        others = [f"`{r}` {shown(capacity(load, 4, r))}" for r in ("power-of-two", "round-robin", "oracle")
                  if capacity(load, 4, r)]  # fmt: skip
        ratio = f"{ours / queue:.2f}" if ours and queue else ""
        lines.append([*names, shown(one), shown(ours), shown(queue), ratio, ", ".join(others)])
    return markdown("load | hardware | 1 | 4, `guarantees` | 4, `shortest-queue` | ratio | 4, others", lines)


@table
def fidelity() -> str:
    rows = result("fidelity-cpu-2core.json")["results"]
    lines = []
    for system, name in (("auto", "`auto`"), ("plain", "plain")):
        for load in (0.4, 0.7):
            row = find(rows, system=system, pressure=load) or find(rows, system="none", pressure=load)
            real, simulated = row["real"], row["run"]["simulated"]
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
    lines = []
    for arrivals in ("steady", "bursts"):
        for level in (None, 0.8, 0.9, 0.95, 0.99):
            runs = [row for row in rows if row["arrivals"] == arrivals and row["stated"] == level]
            shares = [100 * run["kept"] for run in runs]
            lines.append([
                arrivals, "constant margin" if level is None else f"{100 * level:.0f} %",
                f"{statistics.fmean(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f})",
                f"{statistics.fmean(run['guarantees'] for run in runs):.0f}",
                f"{statistics.fmean(run['tokens_per_s_of_kept'] for run in runs):.0f}",
                f"{statistics.fmean(run['throughput'] for run in runs):.0f}",
            ])  # fmt: skip
    header = "arrivals | stated | kept, mean (range) | guarantees of 1,000 | tokens/s of kept ones | tokens/s of all"
    return markdown(header, lines)


# --- The first table of papers.md ------------------------------------------------------------------------------------


def _date(provenance: dict[str, Any]) -> str:
    return f"{datetime.fromisoformat(provenance['date']):%B %-d, %Y}"


@table
def papers_summary() -> str:
    adaserve, turbo, cells, slos, thesis = (
        result(f"papers-{name}.json")
        for name in ("adaserve", "turbospec", "turbospec-auto-cells", "slos-serve", "thesis")
    )
    errors = [value["all"] for value in adaserve["mean_absolute_error_of_attainment_points"].values()]
    ours, theirs = (100 * adaserve["results"][n]["4.8"]["attainment"]["mean"] for n in ("auto", "adaserve"))
    slower = {cell: auto_to_best(latencies)[1] for cell, latencies in cells_by_seed().items()}
    better = [sum(value < 0 for (_, _, seed), value in slower.items() if seed == s) for s in (0, 1)]
    summary = turbo["summary"]
    gains = [slos[part]["capacity"]["ours"] / slos[part]["capacity"]["SLOs-Serve"] for part in PARTS]
    at_32 = thesis["throughput"]["32"]
    tokens = {name: at_32[name]["throughput"]["mean"] for name in ("ours", "dynamic", "static", "plain")}
    lines = [
        (
            "[AdaServe](#adaserve-figures-8-and-9-llama-3-1-70b-with-a-1b-draft-four-a100), figures 8 and 9",
            f"attained at 4.8 requests per second: `auto` {ours:.1f} %, AdaServe {theirs:.1f} %",
            f"{min(errors):.1f} to {max(errors):.1f} points of attainment, by system",
            _date(adaserve["provenance"]),
        ),
        (
            "[TurboSpec](#turbospec-table-5-arxiv-2406-14066), table 5",
            f"`auto` with chains against the best fixed length of each load: {min(slower.values()):+.1f} to "
            f"{max(slower.values()):+.1f} % of latency, faster in {better[0]} and {better[1]} of 24 cells",
            f"{100 * summary['draft rows']['median_error']:.0f} % (draft rows), "
            f"{100 * summary['prompt lookup rows']['median_error']:.0f} % (prompt lookup), medians",
            f"{_date(cells['provenance'])}; `TS` {_date(turbo['provenance'])}",
        ),
        (
            "[SLOs-Serve](#slos-serve-capacity), capacity",
            f"`auto` has {min(gains):.2f} to {max(gains):.2f} times the capacity of SLOs-Serve's policy",
            "only ratios are published",
            _date(slos["chatbot"]["provenance"]),
        ),
        (
            "[Delacourt's thesis](#delacourts-thesis-dynamic-against-static-trees)",
            f"tokens per second at batch 32: `auto` {tokens['ours']:.0f}, dynamic trees {tokens['dynamic']:.0f}, "
            f"static {tokens['static']:.0f}, plain decoding {tokens['plain']:.0f}",
            "its losses at batch 2 to 8 are not reproduced",
            _date(thesis["provenance"]),
        ),
    ]
    return markdown("paper | result here | error against published values | simulated on", lines)
