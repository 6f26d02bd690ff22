"""A mixed load on the batcher: attainment, goodput and latencies of several systems under the same arrivals.

    python benchmarks/serving.py load --json benchmarks/results/serving-cpu-2core.json \
        --plot docs/images/serving-load.png
    python benchmarks/serving.py throughput --json ...      # all requests at once, compared with generate_batch
    python benchmarks/serving.py long-prompt --json ...     # running streams while a 2,000-token prompt arrives
    python benchmarks/serving.py overhead --json ...        # time of the scheduler by running requests, without models

Requests belong to three classes with TPOT and TTFT SLOs, which are multiples of the time per token of plain decoding at
batch 8, measured again before every load, because the speed of a shared machine changes by the minute. The systems take
turns with the same arrivals in real time.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.algo.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.request import Request, RequestParams, Stage
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler, Limits
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.intervals import draw, scaled, wilson
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

app = typer.Typer(add_completion=False)
OURS = "auto"
SYSTEMS: dict[str, dict[str, Any]] = {
    OURS: dict(policy="auto", admission="slo"),
    "auto-fcfs": dict(policy="auto", admission="fcfs"),  # differs from the others by its policy only
    "plain": dict(policy="none", admission="fcfs"),
    "fixed-2": dict(policy="fixed", max_depth=2, max_width=1, admission="fcfs"),
    "fixed-4": dict(policy="fixed", max_depth=4, max_width=1, admission="fcfs"),
    "adaserve": dict(policy="adaserve", admission="fcfs"),
}
# share of requests, TPOT SLO and TTFT SLO, as multiples of the time per token of plain decoding at batch 8
CLASSES = {"tight": (0.4, 0.8, 15.0), "middling": (0.4, 1.2, 30.0), "relaxed": (0.2, 3.0, 100.0)}
PROMPT_TOKENS, NEW_TOKENS = (16, 64), (16, 64)
Json = Annotated[Path | None, typer.Option("--json")]
Size = Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")]
Dtype = Annotated[str, typer.Option()]


def models(size: str, dtype: str) -> tuple[Any, Any, Any]:
    """Return the inflated target, the draft and the tokenizer."""
    target, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    return inflate(target, SHAPES[size]), draft, tokenizer


def plain_token_s(generator: SLOSpecGenerator, tokenizer: Any, batch: int = 8) -> float:
    """Return the seconds per token of plain decoding of a batch."""
    prompts = [tokenizer(text)["input_ids"][:64] for text in tiny_prompts()[:batch]]
    handles = [generator.submit(ids, max_new_tokens=40, eos_token_id=None) for ids in prompts]
    return median(handle.result().metrics.tpot_s or 0.0 for handle in handles)


def arrivals(rng: np.random.Generator, kind: str, rate: float, number: int) -> np.ndarray:
    """Return arrival times in seconds: Poisson, or bursty (gamma gaps with a coefficient of variation of 3)."""
    shape = {"poisson": 1.0, "bursty": 1.0 / 9.0}[kind]
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), number))


def load_of(seed: int, kind: str, rate: float, number: int, token_s: float, tokenizer: Any) -> list[dict[str, Any]]:
    """Return a load: arrival, class, prompt, output length and SLOs of every request."""
    rng = np.random.default_rng(seed)
    texts = [tokenizer(text)["input_ids"] for text in tiny_prompts()]
    names, shares = list(CLASSES), [share for share, *_ in CLASSES.values()]
    made = []
    for at_s in arrivals(rng, kind, rate, number):
        name = names[rng.choice(len(names), p=shares)]
        text, begin = texts[rng.integers(len(texts))], int(rng.integers(0, 32))
        _, tpot, ttft = CLASSES[name]
        made.append(
            dict(
                at_s=float(at_s),
                name=name,
                ids=text[begin : begin + int(rng.integers(*PROMPT_TOKENS))] or text[:8],
                new=int(rng.integers(*NEW_TOKENS)),
                targets=dict(slo_tpot=tpot * token_s, slo_ttft=ttft * token_s),
            )
        )
    return made


def serve(generator: SLOSpecGenerator, load: list[dict[str, Any]]) -> dict[str, Any]:
    """Submit a load in real time.  -> figures of its requests"""
    begun_s = time.perf_counter()
    handles = []
    for job in load:
        time.sleep(max(job["at_s"] - (time.perf_counter() - begun_s), 0.0))
        handles.append(
            generator.submit(
                job["ids"], max_new_tokens=job["new"], eos_token_id=None, do_sample=False, **job["targets"]
            )
        )
    metrics = [handle.result().metrics for handle in handles]
    seconds = time.perf_counter() - begun_s
    by_class: dict[str, list[Any]] = defaultdict(list)
    for job, own in zip(load, metrics, strict=True):
        by_class[job["name"]].append(own)
    guaranteed = [own for own in metrics if own.guaranteed]
    return {
        "requests": len(metrics),
        "attained": sum(bool(own.attained) for own in metrics),
        "guaranteed": len(guaranteed),
        "guaranteed_attained": sum(bool(own.attained) for own in guaranteed),
        "goodput": sum(own.tokens for own in metrics if own.attained) / seconds,
        "tokens_per_s": sum(own.tokens for own in metrics) / seconds,
        "classes": {
            name: {
                "requests": len(rows),
                "attained": sum(bool(own.attained) for own in rows),
                "ttft_s": np.percentile([own.ttft_s for own in rows], (50, 90, 99)).round(4).tolist(),
                "tpot_s": np.percentile([own.tpot_s for own in rows], (50, 90, 99)).round(4).tolist(),
            }
            for name, rows in by_class.items()
        },
    }


def totals(runs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system over all runs, and relative to ours under the same arrivals."""
    count = {
        key: sum(run[key] for run in runs) for key in ("requests", "attained", "guaranteed", "guaranteed_attained")
    }
    missed, missed_by_ours = (sum(run["requests"] - run["attained"] for run in own) for own in (runs, ours))
    return {
        **count,
        "attainment": wilson(count["attained"], count["requests"]),
        "goodput": median(run["goodput"] for run in runs),
        "tokens_per_s": median(run["tokens_per_s"] for run in runs),
        "misses_vs_ours": missed / missed_by_ours if missed_by_ours else None,
        "goodput_of_ours_vs_it": median(
            own["goodput"] / max(run["goodput"], 1e-9) for run, own in zip(runs, ours, strict=True)
        ),
        "classes": {
            name: {
                "attained": sum(own[name]["attained"] for own in found) / sum(own[name]["requests"] for own in found),
                "tpot_s": median(own[name]["tpot_s"][0] for own in found),
                "ttft_s": median(own[name]["ttft_s"][0] for own in found),
            }
            for name in CLASSES
            if (found := [run["classes"] for run in runs if name in run["classes"]])
        },
    }


def show(by_pressure: dict[str, dict[str, Any]], title: str) -> None:
    """Print the totals of every system at every pressure."""
    table = Table(title=title)
    for heading in ("pressure", "system", "attained", "goodput", "tokens/s", "guaranteed", "kept", "misses", *CLASSES):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for pressure, systems in by_pressure.items():
        for name, own in systems.items():
            share, misses, guaranteed = own["attainment"], own["misses_vs_ours"], own["guaranteed"]
            table.add_row(
                pressure, name, f"{share['mean']:.1%} ({100 * share['low']:.0f} to {100 * share['high']:.0f})",
                f"{own['goodput']:.0f}", f"{own['tokens_per_s']:.0f}", f"{guaranteed / own['requests']:.0%}",
                f"{own['guaranteed_attained'] / guaranteed:.0%}" if guaranteed else "",
                "" if misses is None else f"{misses:.2f}x",
                *(f"{c['attained']:.0%} {1e3 * c['tpot_s']:.0f} ms {c['ttft_s']:.1f} s"
                  for c in own["classes"].values()),
                end_section=name == list(systems)[-1],
            )  # fmt: skip
    Console(width=160).print(table)


def write(path: Path | None, **record: Any) -> None:
    """Write a record as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


@app.command()
def load(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    number: Annotated[int, typer.Option()] = 150,
    pressures: Annotated[
        str, typer.Option(help="Loads as shares of the throughput of plain decoding at batch 8, comma-separated.")
    ] = "0.4,0.6,0.8,1.0",
    repeats: Annotated[int, typer.Option()] = 2,
    systems: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SYSTEMS),
    kinds: Annotated[str, typer.Option(help="poisson, bursty, or both.")] = "poisson,bursty",
    plot: Annotated[Path | None, typer.Option(help="Also plot attainment over pressure to this PNG.")] = None,
    json_path: Json = None,
) -> None:
    """Serve Poisson and bursty arrivals of three classes by every system."""
    target, draft, tokenizer = models(size, dtype)
    generators = {
        name: SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(**SYSTEMS[name])) for name in systems.split(",")
    }
    plain = SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(**SYSTEMS["plain"]))
    verify = plain.decoder.speculator.costs.verify
    prefill_s = float(verify(256) / 256) * sum(PROMPT_TOKENS) / 2  # per request, processed in a large step

    def unit() -> tuple[float, float]:
        """Return seconds per token of plain decoding, and the requests per second that are a load of 1."""
        with plain:
            token_s = plain_token_s(plain, tokenizer)
        return token_s, 1.0 / (prefill_s + token_s / 8 * sum(NEW_TOKENS) / 2)

    unit()
    token_s, most = unit()
    for generator in generators.values():
        with generator:  # warm-up
            serve(generator, load_of(10**6, "poisson", most, 16, token_s, tokenizer))
    facts = provenance(size=size, dtype=dtype, number=number, classes=CLASSES, systems=SYSTEMS)
    token_seconds: list[float] = []
    names, runs = list(generators), defaultdict[tuple[str, str, str], list[dict[str, Any]]](list)
    turns = [(p, kind, repeat) for repeat in range(repeats) for p in pressures.split(",") for kind in kinds.split(",")]
    found: dict[str, dict[str, Any]] = {}
    for turn, (pressure, kind, repeat) in enumerate(tqdm(turns, disable=not sys.stderr.isatty())):
        token_s, most = unit()
        token_seconds.append(token_s)
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            with generators[name] as generator:
                own = serve(generator, load_of(repeat, kind, float(pressure) * most, number, token_s, tokenizer))
            runs[kind, pressure, name].append(own)
        ours = runs[kind, pressure, OURS]
        found.setdefault(kind, {})[pressure] = {name: totals(runs[kind, pressure, name], ours) for name in names}
        write(json_path, provenance={**facts, "plain_token_s": token_seconds}, results=found)
    token_ms = 1e3 * median(token_seconds)
    for kind, by_pressure in found.items():
        show(by_pressure, f"{size} {dtype}, {kind} arrivals; plain decoding {token_ms:.0f} ms/token at batch 8")
    if plot is not None:
        panels = {
            f"{kind}: requests that attained, %": {
                name: {p: scaled(own[name]["attainment"], 100.0) for p, own in by_pressure.items()} for name in names
            }
            for kind, by_pressure in found.items()
        }
        draw(panels, "load / throughput of plain decoding", plot)


@app.command()
def throughput(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    number: Annotated[int, typer.Option()] = 48,
    batch: Annotated[int, typer.Option(help="Concurrent requests of every system.")] = 16,
    repeats: Annotated[int, typer.Option()] = 3,
    json_path: Json = None,
) -> None:
    """Measure tokens per second of requests without SLOs, compared with continuous batching of transformers."""
    target, draft, tokenizer = models(size, dtype)
    configs = {name: SLOSpecConfig(**options, max_batch=batch) for name, options in SYSTEMS.items()}
    generators = {name: SLOSpecGenerator(target, draft, tokenizer, config) for name, config in configs.items()}
    prompts = [tokenizer(tiny_prompts()[i % len(tiny_prompts())])["input_ids"][i % 7 :][:64] for i in range(number)]

    def ours(name: str) -> None:
        with generators[name] as generator:
            for handle in [generator.submit(ids, max_new_tokens=40, eos_token_id=None) for ids in prompts]:
                handle.result()

    def stock() -> None:
        # few blocks and tokens: with the defaults it is several times slower on a CPU
        own = ContinuousBatchingConfig(max_batch_tokens=256, num_blocks=2 * batch, max_requests_per_batch=batch)
        config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1)
        target.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=own)

    seconds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name in (*generators, "generate_batch"):
            begun_s = time.perf_counter()
            stock() if name == "generate_batch" else ours(name)
            if repeat:  # the first one is a warm-up
                seconds[name].append(time.perf_counter() - begun_s)
    results = {
        name: {
            "tokens_per_s": number * 40 / median(own),
            "vs_generate_batch": median(b / s for b, s in zip(seconds["generate_batch"], own, strict=True)),
        }
        for name, own in seconds.items()
    }
    for name, figures in results.items():
        print(f"{name:>16} {figures['tokens_per_s']:7.0f} tokens/s  {figures['vs_generate_batch']:.2f}x generate_batch")
    write(json_path, provenance=provenance(size=size, dtype=dtype, number=number, batch=batch), results=results)


@app.command()
def long_prompt(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    tokens: Annotated[int, typer.Option()] = 2000,
    repeats: Annotated[int, typer.Option()] = 3,
    json_path: Json = None,
) -> None:
    """Submit a long prompt beside four streams: the longest gap between a stream's tokens, and the prompt's TTFT."""
    target, draft, tokenizer = models(size, dtype)
    text = "\n".join(tiny_prompts())
    long = (tokenizer(text)["input_ids"] * 10)[:tokens]
    results: dict[str, dict[str, list[float]]] = {}
    systems = {"chunked": SLOSpecConfig(), "at once": SLOSpecConfig(prefill_chunk=tokens)}
    generators = {name: SLOSpecGenerator(target, draft, tokenizer, config) for name, config in systems.items()}
    for _ in range(repeats):
        for name, generator in generators.items():
            figures = results.setdefault(name, defaultdict(list))
            with generator:
                figures["ttft alone, s"].append(generator.submit(long, max_new_tokens=1).result().metrics.ttft_s)
                streams = [generator.submit(tiny_prompts()[i], max_new_tokens=400, eos_token_id=None) for i in range(4)]
                while min(len(stream.token_ids) for stream in streams) < 20:
                    time.sleep(0.01)
                before = [len(stream.token_ids) for stream in streams]
                arrived = generator.submit(long, max_new_tokens=1)
                gaps, last = [], [time.perf_counter()] * 4
                while not arrived.done():
                    time.sleep(0.001)
                    now_s = time.perf_counter()
                    for index, stream in enumerate(streams):
                        if len(stream.token_ids) > before[index]:
                            gaps.append(now_s - last[index])
                            before[index], last[index] = len(stream.token_ids), now_s
                gaps += [time.perf_counter() - at_s for at_s in last]
                figures["ttft beside streams, s"].append(arrived.result().metrics.ttft_s)
                figures["longest gap, s"].append(max(gaps))
                plain = [stream.metrics.tpot_s for stream in streams]
                figures["time per token, s"].append(median(value or 0.0 for value in plain))
                for stream in streams:
                    stream.cancel()
    medians = {name: {key: median(values) for key, values in own.items()} for name, own in results.items()}
    for name, own in medians.items():
        print(f"{name:>8}: " + "  ".join(f"{key} {value:.3f}" for key, value in own.items()))
    write(json_path, provenance=provenance(size=size, dtype=dtype, tokens=tokens), results=medians)


@app.command()
def overhead(json_path: Json = None) -> None:
    """Measure the scheduler's time per step, without models."""
    costs = StepCosts(
        ForwardCost(LatencyCurve((1, 64, 512, 2048), (0.02, 0.024, 0.06, 0.2))),
        ForwardCost(LatencyCurve((1, 64, 512), (0.001, 0.0012, 0.002))),
    )
    results = {}
    for number in (1, 8, 64, 256, 1024):
        scheduler = ContinuousScheduler(Limits(number, 10**9, 36, 512, 30.0), costs)
        for index in range(number):
            targets = (Stage(0.05 if index % 2 else None),)
            scheduler.add(Request(index, RequestParams([1] * 100, 200, targets, ttft_slo_s=5.0 if index % 2 else None)))
        scheduler.schedule(0.0)
        spent = []
        for step in range(200):
            for request in scheduler.running:
                if not request.num_emitted:
                    request.emit(1)
                    request.kv.num_cached, request.stats.first_token_s = 100, 0.0
            if step % 10 == 0:  # one request ends, another one arrives
                scheduler.remove(scheduler.running[step % number])
                tpot_slo_s, ttft_slo_s = (0.05, 5.0) if step % 20 else (None, None)
                arrived_s = 0.001 * step
                scheduler.add(
                    Request(
                        number + step,
                        RequestParams([1] * 100, 200, (Stage(tpot_slo_s),), ttft_slo_s=ttft_slo_s),
                        arrived_s,
                    )
                )
            begun_s = time.perf_counter()
            scheduler.schedule(0.001 * step)
            spent.append(time.perf_counter() - begun_s)
        results[str(number)] = {"median": 1e3 * median(spent), "mean": 1e3 * sum(spent) / 200, "max": 1e3 * max(spent)}
        figures = "  ".join(f"{key} {value:.3f}" for key, value in results[str(number)].items())
        print(f"{number:>5} running requests, ms per step: {figures}")
    write(json_path, provenance=provenance(), ms=results)


if __name__ == "__main__":
    app()
