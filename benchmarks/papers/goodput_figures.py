"""Figures of SmartSpec and TurboSpec (arXiv 2406.14066) of which the texts print a few numbers, in
the simulator.

    python benchmarks/papers/goodput_figures.py --runs runs.jsonl --workers 2

The plots' values are not published, so docs/papers.md compares what the texts say of them. Nothing
is fitted here. Costs of the 7B model are Vidur's profiles, with the time to read its K/V from the
cards' bandwidth; acceptance is the papers' where they fix it. ``LEVELS_MS`` has the two times per
draft level that TurboSpec's figures 2 and 16 imply."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from replays import Figures, Key, resumed
from turbospec import AUTO, COLUMNS, LIMITS, SHAREGPT, SONNET, drafting, lengths

from hf_slospec.cli.benchmark import provenance
from hf_slospec.lab.hardware import HARDWARE, Hardware, lines
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job, poisson

RESULTS = Path(__file__).parent.parent / "results" / "papers-goodput-figures.json"
OURS = AUTO["auto-1"]
CHAINS = {**COLUMNS, "auto": OURS}
SHORTER = {name: system for name, system in CHAINS.items() if name != "k=7"}
SMARTSPEC = {name: "smartspec" if name == "TS" else system for name, system in SHORTER.items()}
HEADS = {
    "Org": "vllm",
    "top 1": 'vllm-spec2 {"max_depth": 3}',
    "SmartSpec": f'{{"policy": "smartspec-tree", "max_depth": 3, "max_width": 8, {LIMITS}}}',
    "auto": f'auto {{"max_depth": 3, "max_width": 8, {LIMITS}}}',
}

KEY_BYTES = 2**19  # bytes of the K/V of one token of a 7B model
LEVELS_MS = {
    "2.2": 2.2,
    "0.47": 0.47,
}  # figure 2 (7.4 and 12.6 ms a step); figure 16 (7 levels: 35 % to 60 %)
FITTING = "0.47"  # the one with which the published lengths of chains are the best ones


def reading(hardware: Hardware, bytes_per_s: float, kv_tokens: int) -> Hardware:
    """Return the hardware with the time to read the K/V of a 7B model, and memory for so many
    tokens of it.
    """
    target = replace(hardware.target, per_key_s=KEY_BYTES / bytes_per_s)
    return replace(hardware, target=target, kv_tokens=kv_tokens)


H100 = reading(HARDWARE["llama-7b-h100"], 3.35e12, 112_000)
A100 = reading(HARDWARE["llama-7b-a100"], 2.04e12, 112_000)
# Weights of 13.5 GB at 864 GB/s, and 13.4 GFLOP a token at three fifths of 362 TFLOP/s.
L40S = reading(Hardware(lines((15.6, 0.004), (0.0, 0.062)), lines((2.2, 0.003))), 0.864e12, 57_000)
# Three levels of EAGLE are 17.7 % of a step (section 7.1); its acceptance is not published.
EAGLE = replace(HARDWARE["llama-8b-h100"], draft=lines((0.50, 0.002)))
EAGLE_TEXTS = drafting(0.75, 12.0)


def constant(acceptance: float, num_children: int = 1) -> TextModel:
    """Return texts of which every proposed token is accepted with the same probability,
    independently.
    """
    return TextModel(
        acceptance, math.inf, evenness=math.inf, sibling=acceptance if num_children > 1 else 0.5,
        num_children=num_children,
    )  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """Poisson arrivals during an interval; requests differ in lengths and texts between phases."""

    name: str
    rate: float
    seconds: float
    input_tokens: tuple[float, float]  # mean and standard deviation
    output_tokens: tuple[float, float]
    texts: TextModel


# outputs of the 7B model, table 2
CHAT = (256.0, 249.0)
POEMS = (141.0, 22.0)
ACCEPTANCE = {source: (chat, poems) for source, chat, poems in (
    ("table 3", drafting(0.62, 12.8), drafting(0.53, 6.2)),  # published for the 7B model
    ("33B", drafting(0.760, 12.8), drafting(0.851, 6.2)),  # fitted to the 33B's rows of table 5
)}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One simulation."""

    phases: Sequence[Phase]
    hardware: Hardware
    system: str
    at_once: int = 0  # requests that arrive together, of the only phase; 0: by the rates

    def run(self) -> Figures:
        """Return the figures of the run, and of each phase where there are several."""
        rng = np.random.default_rng(0)
        jobs = list[Job]()
        begin_s = 0.0
        for phase in self.phases:
            number = self.at_once or round(phase.rate * phase.seconds)
            arrivals_s = (
                np.zeros(number) if self.at_once else begin_s + poisson(rng, phase.rate, number)
            )
            sizes = (
                lengths(rng, moments, number)
                for moments in (phase.input_tokens, phase.output_tokens)
            )
            jobs += [
                Job(*job, kind=phase.name) for job in zip(arrivals_s.tolist(), *sizes, strict=True)
            ]
            begin_s += phase.seconds
        texts = {phase.name: phase.texts for phase in self.phases}
        library = Library([texts[job.kind].write(rng, job.output_tokens) for job in jobs])
        run = Simulation(jobs, library, self.hardware, config_of(self.system)).run()
        summary = run.summary()
        found = dict[str, Any]()
        for kind in (None, *texts) if len(texts) > 1 else (None,):
            own = [outcome for outcome in run.outcomes if kind in (None, outcome.kind)]
            latencies_s = [outcome.finish_s - outcome.arrival_s for outcome in own]
            steps = sum(outcome.steps for outcome in own)
            found |= {f"{kind}, " * (kind is not None) + figure: value for figure, value in (
                ("latency_s", float(np.mean(latencies_s))),
                ("p99_s", float(np.percentile(latencies_s, 99))),
                ("steps", steps / len(own)),
                # Tokens per request and step
                ("drafted", sum(outcome.drafted for outcome in own) / steps),
            )}  # fmt: skip
        return found | {
            figure: summary[figure] for figure in ("requests_per_step", "draft_share", "throughput")
        }


def even(
    acceptance: float, num_in: float, num_out: float, rate: float = 0.0, seconds: float = 30.0
) -> list[Phase]:
    """Return a single phase in which all requests are alike."""
    return [Phase("all", rate, seconds, (num_in, 1e-9), (num_out, 1e-9), constant(acceptance))]


def tasks() -> Iterator[tuple[Key, Task]]:
    """Yield all simulations with their keys: the experiment, what is varied, the column."""
    for rate in (4.0, 12.0, 16.0, 24.0):
        for name, system in SMARTSPEC.items():
            yield ("rates", f"{rate:g}", name), Task(even(0.7, 128, 128, rate), A100, system)
    for level, ms in LEVELS_MS.items():
        h100, l40s = (replace(hardware, draft=lines((ms, 0.002))) for hardware in (H100, L40S))
        for acceptance, (name, system) in itertools.product((0.5, 0.7, 0.9), CHAINS.items()):
            for batch in (1, 16):
                phases = even(acceptance, 256, 256)
                yield (
                    ("batches", level, f"{acceptance:g}", f"{batch}", name),
                    Task(phases, h100, system, batch),
                )
            for part, hardware, size in (("L40S", l40s, (256, 256)), ("H100", h100, (1024, 128))):
                if level == FITTING and acceptance != 0.7 and name not in ("k=7", "auto"):
                    phases = even(acceptance, *size)
                    yield (
                        ("offline", part, f"{acceptance:g}", name),
                        Task(phases, hardware, system, 120),
                    )
        for source, (chat, poems) in ACCEPTANCE.items():
            if source == "table 3":
                growing = [
                    Phase(f"{rate:g}", rate, 20.0, SHAREGPT, CHAT, chat)
                    for rate in (1.0, 4.0, 8.0, 12.0)
                ]
                yield ("growth", level, "TS"), Task(growing, h100, CHAINS["TS"])
            shifted = [Phase("Sonnet", 6.0, 30.0, SONNET, POEMS, poems)]
            shifted.append(Phase("ShareGPT", 6.0, 30.0, SHAREGPT, CHAT, chat))
            for name in ("Org", "k=3", "k=7", "TS", "auto") if level == FITTING else ():
                yield ("shift", source, name), Task(shifted, h100, CHAINS[name])
    for acceptance, rate, (name, system) in itertools.product(
        (0.6, 0.8), (4.0, 48.0), HEADS.items()
    ):
        phase = replace(
            even(acceptance, 128, 128, rate, 150 / rate)[0], texts=constant(acceptance, 8)
        )
        free = replace(A100, draft=lines((0.0, 0.0)))
        yield ("heads", f"{acceptance:g}", f"{rate:g}", name), Task([phase], free, system)
    steps = [
        Phase(f"{rate:g}", rate, 10.0, SHAREGPT, (227.0, 208.0), EAGLE_TEXTS)
        for rate in (1.0, 16.0, 48.0)
    ]
    for name, system in SHORTER.items():
        yield ("rate steps", name), Task(steps, EAGLE, system)


def nested(found: Mapping[Key, Figures]) -> dict[str, Any]:
    """Return figures by the parts of their keys, rounded."""
    tree: dict[str, Any] = {}
    for (*parts, name), figures in found.items():
        own = tree
        for part in parts:
            own = own.setdefault(part, {})
        own[name] = {figure: round(value, 4) for figure, value in figures.items()}
    return tree


def main(
    only: Annotated[str, typer.Option(help="Comma-separated experiments; all by default.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    kept: Annotated[
        Path | None, typer.Option("--runs", help="File of finished runs, to resume from.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json")] = RESULTS,
) -> None:
    """Simulate the experiments, and write their figures."""
    chosen: dict[Key, Callable[[], Figures]] = {
        key: task.run for key, task in tasks() if not only or key[0] in only.split(",")
    }
    found = resumed(chosen, workers, kept)
    ordered = {key: found[key] for key in chosen}
    for key, figures in ordered.items():
        print(*key, *(f"{figure} {value:.3g}" for figure, value in figures.items()), sep=", ")
    json_path.write_text(
        json.dumps({"provenance": provenance(), **nested(ordered)}, indent=1) + "\n"
    )


if __name__ == "__main__":
    typer.run(main)
