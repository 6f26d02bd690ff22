"""A mixed load on the batcher: attainment, goodput and latencies of several systems under the same
arrivals.

    python -m benchmarks.serving load --json benchmarks/results/serving-cpu-2core.json \
        --plot docs/images/serving-load.png
    python -m benchmarks.serving load --target build/checkpoints/SmolLM2-135M-Instruct --json ...    # real questions
    python -m benchmarks.serving throughput --json ...      # all requests at once, compared with generate_batch
    python -m benchmarks.serving long-prompt --json ...     # running streams while a 2,000-token prompt arrives
    python -m benchmarks.serving overhead --json ...        # time of the scheduler by running requests, without models

Requests belong to three classes with TPOT and TTFT SLOs, which are multiples of the time per token
of plain decoding, measured again before every load, because the speed of a shared machine changes
by the minute. The systems take turns with the same arrivals in real time. A file of ``load`` is
continued where it was interrupted.

A target that is named gets Spec-Bench's questions in its chat template, and the classes are
AdaServe's: code (MT-Bench's coding questions), chat (its other ones) and summaries (of long texts,
and answers by retrieved ones), with TPOT SLOs of 1.2, 5/3 and 5 times the time per token of a
single stream, as 36, 50 and 150 ms are of the paper's 30 ms. The paper has no TTFT SLOs;
``attained_tpot`` counts requests as it does. Answers end where the model ends them. """

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.intervals import Interval, draw, scaled, wilson
from benchmarks.spec_bench import CHAT, NUM_RESAMPLES, QUESTIONS, TASKS, Contest, questions_of
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from hf_slospec.server.loading import Pair, draft_method, load_models
from hf_slospec.server.model_options import ModelOptions, only_errors_logged
from hf_slospec.tiny.shapes import SHAPES

app = typer.Typer(add_completion=False)
OURS = "auto"
SYSTEMS: dict[str, dict[str, Any]] = {
    OURS: dict(policy="auto", admission="slo"),
    "auto-fcfs": dict(
        policy="auto", admission="fcfs"
    ),  # differs from the others by its policy only
    "plain": dict(policy="none", admission="fcfs"),
    "fixed-2": dict(policy="fixed", max_depth=2, max_width=1, admission="fcfs"),
    "fixed-4": dict(policy="fixed", max_depth=4, max_width=1, admission="fcfs"),
    **{
        name: dict(policy=name, admission="fcfs")
        for name in ("adaserve", "smartspec", "turbospec", "vllm-adaptive", "thesis-slo")
    },
}
# share of requests, TPOT SLO and TTFT SLO, as multiples of the time per token of plain decoding
CLASSES = {
    "tight": (0.4, 0.8, 15.0),
    "middling": (0.4, 1.2, 30.0),
    "relaxed": (0.2, 3.0, 100.0),
}  # at batch 8
ADASERVE_CLASSES = {
    "code": (0.6, 1.2, 50.0),
    "chat": (0.2, 5 / 3, 100.0),
    "summary": (0.2, 5.0, 300.0),
}  # at batch 1
PROMPT_TOKENS = (16, 64)
NEW_TOKENS = (16, 64)
BATCH = 8  # requests of plain decoding, whose throughput is a load of 1
DRAFTER = "suffix+lookup"  # for a named target without an assistant
Json = Annotated[Path | None, typer.Option("--json")]
Size = Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")]
Dtype = Annotated[str, typer.Option()]


@dataclass
class Texts:
    """Classes of requests with their prompts."""

    classes: dict[str, tuple[float, float, float]]  # as CLASSES
    prompts: dict[str, list[list[int]]]  # token ids, by class
    slo_batch: int  # batch of plain decoding whose time per token is the unit of the SLOs
    new_tokens: tuple[int, int]  # least and greatest length of an answer
    mean_new: float  # mean length of answers
    excerpt: tuple[int, int] | None = (
        None  # lengths of excerpts that are prompts; None: whole prompts, real answers
    )

    @property
    def mean_prompt(self) -> float:
        """Return the mean number of tokens of a prompt."""
        if self.excerpt is not None:
            return sum(self.excerpt) / 2
        lengths = {
            name: np.mean([len(ids) for ids in prompts]) for name, prompts in self.prompts.items()
        }
        return float(sum(share * lengths[name] for name, (share, *_) in self.classes.items()))

    def job(self, rng: np.random.Generator, name: str, number: int) -> dict[str, Any]:
        """Return prompt, length and options of a random request."""
        ids = self.prompts[name][rng.integers(len(self.prompts[name]))]
        if self.excerpt is None:  # questions repeat, so they must not find each other's K/V
            return dict(ids=ids, new=self.new_tokens[1], options=dict(cache_salt=str(number)))
        begin = int(rng.integers(0, 32))
        ids = ids[begin : begin + int(rng.integers(*self.excerpt))] or ids[:8]
        return dict(
            ids=ids, new=int(rng.integers(*self.new_tokens)), options=dict(eos_token_id=None)
        )


def tiny_texts(tokenizer: Any, is_adaserve: bool = False) -> Texts:
    """Return the embedded pair's texts, with answers of random lengths, in the classes of this
    benchmark or of AdaServe.
    """
    prompts = [tokenizer(text)["input_ids"] for text in tiny_prompts()]
    classes = ADASERVE_CLASSES if is_adaserve else CLASSES
    return Texts(
        classes,
        dict.fromkeys(classes, prompts),
        1 if is_adaserve else BATCH,
        NEW_TOKENS,
        sum(NEW_TOKENS) / 2,
        PROMPT_TOKENS,
    )


def real_texts(pair: Pair, new_tokens: int, max_prompt: int) -> Texts:
    """Return Spec-Bench's first turns by class, encoded with the chat template, if there is one."""
    contest = Contest(pair.target, None, pair.tokenizer, new_tokens, 0.0, max_prompt)
    prompts: dict[str, list[list[int]]] = {name: [] for name in ADASERVE_CLASSES}
    by_task = {CHAT: "chat", TASKS["summarization"]: "summary", TASKS["rag"]: "summary"}
    for question in questions_of(QUESTIONS, 80):
        name = "code" if question.category == "coding" else by_task.get(question.task)
        if name is not None:
            prompts[name].append(contest.encoded([question.turns[:1]])["input_ids"][0].tolist())
    return Texts(ADASERVE_CLASSES, prompts, 1, (1, new_tokens), float(new_tokens))


def plain_token_s(generator: SLOSpecGenerator, texts: Texts, batch: int = BATCH) -> float:
    """Return the seconds per token of plain decoding of a batch."""
    prompts = [ids[:64] for own in texts.prompts.values() for ids in own][:batch]
    handles = [generator.submit(ids, max_new_tokens=40, eos_token_id=None) for ids in prompts]
    return median(handle.result().metrics.tpot_s or 0.0 for handle in handles)


def arrivals(rng: np.random.Generator, kind: str, rate: float, number: int) -> np.ndarray:
    """Return arrival times in seconds: Poisson, or bursty (gamma gaps with a coefficient of
    variation of 3).
    """
    shape = {"poisson": 1.0, "bursty": 1.0 / 9.0}[kind]
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), number))


def load_of(
    seed: int, kind: str, rate: float, number: int, unit_s: float, texts: Texts
) -> list[dict[str, Any]]:
    """Return a load: arrival, class, prompt, output length and SLOs of every request."""
    rng = np.random.default_rng(seed)
    names = list(texts.classes)
    shares = [share for share, *_ in texts.classes.values()]
    made = []
    for index, at_s in enumerate(arrivals(rng, kind, rate, number)):
        name = names[rng.choice(len(names), p=shares)]
        _, tpot, ttft = texts.classes[name]
        slos = dict(slo_tpot=tpot * unit_s, slo_ttft=ttft * unit_s)
        made.append(dict(at_s=float(at_s), name=name, targets=slos, **texts.job(rng, name, index)))
    return made


def serve(generator: SLOSpecGenerator, load: list[dict[str, Any]]) -> dict[str, Any]:
    """Submit a load in real time.  -> figures of its requests"""
    begun_s = time.perf_counter()
    handles = []
    for job in load:
        time.sleep(max(job["at_s"] - (time.perf_counter() - begun_s), 0.0))
        handles.append(
            generator.submit(
                job["ids"],
                max_new_tokens=job["new"],
                do_sample=False,
                **job["options"],
                **job["targets"],
            )
        )
    metrics = [handle.result().metrics for handle in handles]
    seconds = time.perf_counter() - begun_s
    by_class: dict[str, list[Any]] = defaultdict(list)
    for job, own in zip(load, metrics, strict=True):
        by_class[job["name"]].append(own)
    guaranteed = [own for own in metrics if own.guaranteed]
    return {
        "seconds": seconds,
        "requests": len(metrics),
        "attained": sum(bool(own.attained) for own in metrics),
        "guaranteed": len(guaranteed),
        "guaranteed_attained": sum(bool(own.attained) for own in guaranteed),
        "good_tokens": [own.tokens if own.attained else 0 for own in metrics],
        "tokens": sum(own.tokens for own in metrics),
        "tokens_per_step": float(
            np.mean([own.acceptance_length for own in metrics if own.steps] or [1.0])
        ),
        "classes": {
            name: {
                "requests": len(rows),
                "attained": sum(bool(own.attained) for own in rows),
                "attained_tpot": sum((own.tpot_s or 0.0) <= own.tpot_slo_s for own in rows),
                "ttft_s": np.percentile([own.ttft_s for own in rows], (50, 90, 99))
                .round(4)
                .tolist(),
                "tpot_s": np.percentile([own.tpot_s or 0.0 for own in rows], (50, 90, 99))
                .round(4)
                .tolist(),
            }
            for name, rows in by_class.items()
        },
    }


def goodput(runs: Sequence[dict[str, Any]]) -> Interval:
    """Return the tokens per second of requests that attained, over all runs, and its bootstrap
    interval.
    """
    rng = np.random.default_rng(0)
    seconds = sum(run["seconds"] for run in runs)
    drawn = sum(
        rng.choice(own, (NUM_RESAMPLES, len(own))).sum(1)
        for own in (run["good_tokens"] for run in runs)
    )
    low, high = np.quantile(drawn / seconds, (0.025, 0.975))
    return {
        "mean": sum(sum(run["good_tokens"]) for run in runs) / seconds,
        "low": float(low),
        "high": float(high),
    }


def totals(runs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system over all runs, and relative to ours under the same arrivals."""
    count = {
        key: sum(run[key] for run in runs)
        for key in ("requests", "attained", "guaranteed", "guaranteed_attained")
    }
    missed, missed_by_ours = (
        sum(run["requests"] - run["attained"] for run in own) for own in (runs, ours)
    )
    return {
        **count,
        "attainment": wilson(count["attained"], count["requests"]),
        "goodput": goodput(runs),
        "tokens_per_s": sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs),
        "tokens_per_step": median(run["tokens_per_step"] for run in runs),
        "misses_vs_ours": missed / missed_by_ours if missed_by_ours else None,
        "goodput_of_ours_vs_it": goodput(ours)["mean"] / max(goodput(runs)["mean"], 1e-9),
        "classes": {
            name: {
                **{
                    key: wilson(
                        sum(own[name][key] for own in found),
                        sum(own[name]["requests"] for own in found),
                    )
                    for key in ("attained", "attained_tpot")
                },
                "tpot_s": median(own[name]["tpot_s"][0] for own in found),
                "ttft_s": median(own[name]["ttft_s"][0] for own in found),
            }
            for name in dict.fromkeys(name for run in runs for name in run["classes"])
            if (found := [run["classes"] for run in runs if name in run["classes"]])
        },
    }


def show(by_pressure: dict[str, dict[str, Any]], title: str, classes: Sequence[str]) -> None:
    """Print the totals of every system at every pressure."""
    table = Table(title=title)
    for heading in (
        "pressure",
        "system",
        "attained",
        "goodput",
        "tokens/s",
        "guaranteed",
        "kept",
        "misses",
        *classes,
    ):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for pressure, systems in by_pressure.items():
        for name, own in systems.items():
            share = own["attainment"]
            misses = own["misses_vs_ours"]
            guaranteed = own["guaranteed"]
            cells = (own["classes"].get(kind) for kind in classes)
            table.add_row(
                pressure, name, f"{share['mean']:.1%} ({100 * share['low']:.0f} to {100 * share['high']:.0f})",
                "{mean:.0f} ({low:.0f} to {high:.0f})".format(**own["goodput"]), f"{own['tokens_per_s']:.0f}",
                f"{guaranteed / own['requests']:.0%}",
                f"{own['guaranteed_attained'] / guaranteed:.0%}" if guaranteed else "",
                "" if misses is None else f"{misses:.2f}x",
                *(f"{c['attained']['mean']:.0%} {1e3 * c['tpot_s']:.0f} ms {c['ttft_s']:.1f} s" if c else ""
                  for c in cells),
                end_section=name == list(systems)[-1],
            )  # fmt: skip
    Console(width=180).print(table)


def write(path: Path | None, **record: Any) -> None:
    """Write a record as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


@app.command()
@only_errors_logged()
def load(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    target: Annotated[
        str | None, typer.Option(help="A model in place of the embedded pair.")
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="Its draft model.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help=f"For a target without an assistant: {DRAFTER}; for the embedded one also eagle3."
        ),
    ] = None,
    device: Annotated[str, typer.Option()] = "auto",
    adaserve: Annotated[
        bool, typer.Option("--adaserve", help="The embedded pair has AdaServe's classes, too.")
    ] = False,
    new_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer of a named target.")
    ] = 128,
    max_prompt: Annotated[
        int, typer.Option(help="Its prompts are truncated to this many tokens.")
    ] = 2048,
    number: Annotated[int, typer.Option()] = 150,
    pressures: Annotated[
        str,
        typer.Option(
            help="Loads as shares of the throughput of plain decoding at batch 8, comma-separated."
        ),
    ] = "0.4,0.6,0.8,1.0",
    repeats: Annotated[int, typer.Option()] = 2,
    systems: Annotated[str, typer.Option(help="Comma-separated; auto is one of them.")] = ",".join(
        SYSTEMS
    ),
    kinds: Annotated[str, typer.Option(help="poisson, bursty, or both.")] = "poisson,bursty",
    minutes: Annotated[
        float, typer.Option(help="Begin no load after so long; the same command continues.")
    ] = np.inf,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot attainment over pressure to this PNG.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Serve Poisson and bursty arrivals of three classes by every system."""
    ends = time.monotonic() + 60 * minutes
    if target is not None and assistant is None and drafter is None:
        drafter = DRAFTER
    options = ModelOptions(
        target=target,
        assistant=assistant,
        drafter=drafter,
        size=size if target is None else "tiny",
        dtype=dtype,
        device=device,
    )
    pair = load_models(options)
    texts = (
        tiny_texts(pair.tokenizer, adaserve)
        if target is None
        else real_texts(pair, new_tokens, max_prompt)
    )
    method = draft_method(options, pair)

    def generator_of(name: str) -> SLOSpecGenerator:
        return SLOSpecGenerator(
            pair.target, None, pair.tokenizer, SLOSpecConfig(**SYSTEMS[name]), drafter=method
        )

    generators = {name: generator_of(name) for name in systems.split(",")}
    plain = generators.get("plain") or generator_of("plain")
    verify = plain.decoder.speculator.costs.verify
    prefill_s = (
        float(verify(256) / 256) * texts.mean_prompt
    )  # per request, processed in a large step

    def units() -> tuple[float, float]:
        """Return the unit of the SLOs in seconds, and the requests per second that are a load of 1."""
        with plain:
            token_s = plain_token_s(plain, texts)
            unit_s = (
                token_s
                if texts.slo_batch == BATCH
                else plain_token_s(plain, texts, texts.slo_batch)
            )
        return unit_s, 1.0 / (prefill_s + token_s / BATCH * texts.mean_new)

    units()
    unit_s, most = units()
    before = {}
    if json_path is not None and json_path.exists():
        before = json.loads(json_path.read_text(encoding="utf-8"))
    runs: list[dict[str, Any]] = before.get("runs", [])
    warm_up = load_of(10**6, "poisson", most, 4 if runs else 16, unit_s, texts)
    for generator in generators.values():
        with generator:
            own = serve(generator, warm_up)
    if (
        texts.excerpt is None
    ):  # real answers end where they end, with every system at the same token
        texts.mean_new = before["provenance"]["mean_new"] if runs else own["tokens"] / len(warm_up)
    facts = provenance(
        target=None if target is None else Path(target).name, assistant=assistant and Path(assistant).name,
        drafter=method.kind, size=size if target is None else None, dtype=dtype, number=number, classes=texts.classes,
        systems=SYSTEMS, mean_prompt=texts.mean_prompt, mean_new=texts.mean_new,
    )  # fmt: skip
    names = list(generators)
    turns = [
        (p, kind, repeat)
        for repeat in range(repeats)
        for p in pressures.split(",")
        for kind in kinds.split(",")
    ]
    for turn, (pressure, kind, repeat) in enumerate(tqdm(turns, disable=not sys.stderr.isatty())):
        key = dict(pressure=pressure, kind=kind, repeat=repeat)
        if any(key.items() <= run.items() for run in runs):
            continue
        if time.monotonic() > ends:
            break
        unit_s, most = units()
        jobs = load_of(repeat, kind, float(pressure) * most, number, unit_s, texts)
        served = {}
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            with generators[name] as generator:
                served[name] = serve(generator, jobs)
        runs.append(
            key | dict(unit_s=unit_s, requests_per_s=float(pressure) * most, systems=served)
        )
        left = len(turns) - len(runs)
        write(
            json_path, provenance=facts, results=results_of(runs, names), turns_left=left, runs=runs
        )
    found = results_of(runs, names)
    model, unit_ms = (
        Path(target).name if target else size,
        1e3 * median([run["unit_s"] for run in runs] or [unit_s]),
    )
    for kind, by_pressure in found.items():
        title = f"{model} {dtype}, {kind} arrivals; plain decoding {unit_ms:.0f} ms/token at batch {texts.slo_batch}"
        show(by_pressure, title, list(texts.classes))
    if plot is not None:
        draw_attainment(found, facts, plot)


def draw_attainment(found: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    """Plot the requests that attained their SLOs by load, one panel per kind of arrivals.

    Args:
        found: results by kind of arrivals, load and system.
        facts: the provenance of the results.
    """
    panels = {
        f"{kind} arrivals: requests that attained, %": {
            name: {p: scaled(own[name]["attainment"], 100.0) for p, own in by_pressure.items()}
            for name in next(iter(by_pressure.values()))
        }
        for kind, by_pressure in found.items()
    }
    model = facts.get("target") or f"embedded pair, {facts['size']}"
    title = f"{model} in {facts['dtype']}, {facts['cpu']}; vertical lines: Wilson's 95 % intervals"
    draw(panels, "load / throughput of plain decoding", path, title)


def results_of(runs: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the totals by kind of arrivals, pressure and system."""
    found: dict[str, dict[str, Any]] = {}
    for kind, pressure in dict.fromkeys((run["kind"], run["pressure"]) for run in runs):
        own = [run["systems"] for run in runs if (run["kind"], run["pressure"]) == (kind, pressure)]
        by_name = {name: [systems[name] for systems in own] for name in names}
        found.setdefault(kind, {})[pressure] = {
            name: totals(by_name[name], by_name[OURS]) for name in names
        }
    return found


@app.command()
def throughput(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    number: Annotated[int, typer.Option()] = 48,
    batch: Annotated[int, typer.Option(help="Concurrent requests of every system.")] = 16,
    repeats: Annotated[int, typer.Option()] = 3,
    json_path: Json = None,
) -> None:
    """Measure tokens per second of requests without SLOs, compared with continuous batching of
    transformers.
    """
    target, draft, tokenizer = load_models(ModelOptions(size=size, dtype=dtype))
    configs = {name: SLOSpecConfig(**options, max_batch=batch) for name, options in SYSTEMS.items()}
    generators = {
        name: SLOSpecGenerator(target, draft, tokenizer, config) for name, config in configs.items()
    }
    prompts = [
        tokenizer(tiny_prompts()[i % len(tiny_prompts())])["input_ids"][i % 7 :][:64]
        for i in range(number)
    ]

    def ours(name: str) -> None:
        with generators[name] as generator:
            for handle in [
                generator.submit(ids, max_new_tokens=40, eos_token_id=None) for ids in prompts
            ]:
                handle.result()

    def stock() -> None:
        # few blocks and tokens: with the defaults it is several times slower on a CPU
        own = ContinuousBatchingConfig(
            max_batch_tokens=256, num_blocks=2 * batch, max_requests_per_batch=batch
        )
        config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1)
        target.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=own
        )

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
            "vs_generate_batch": median(
                b / s for b, s in zip(seconds["generate_batch"], own, strict=True)
            ),
        }
        for name, own in seconds.items()
    }
    for name, figures in results.items():
        print(
            f"{name:>16} {figures['tokens_per_s']:7.0f} tokens/s  {figures['vs_generate_batch']:.2f}x generate_batch"
        )
    write(
        json_path,
        provenance=provenance(size=size, dtype=dtype, number=number, batch=batch),
        results=results,
    )


@app.command()
def long_prompt(
    size: Size = "0.3B",
    dtype: Dtype = "bfloat16",
    tokens: Annotated[int, typer.Option()] = 2000,
    repeats: Annotated[int, typer.Option()] = 3,
    json_path: Json = None,
) -> None:
    """Submit a long prompt beside four streams: the longest gap between a stream's tokens, and the
    prompt's TTFT.
    """
    target, draft, tokenizer = load_models(ModelOptions(size=size, dtype=dtype))
    text = "\n".join(tiny_prompts())
    long = (tokenizer(text)["input_ids"] * 10)[:tokens]
    results: dict[str, dict[str, list[float]]] = {}
    systems = {"chunked": SLOSpecConfig(), "at once": SLOSpecConfig(prefill_chunk=tokens)}
    generators = {
        name: SLOSpecGenerator(target, draft, tokenizer, config) for name, config in systems.items()
    }
    for _ in range(repeats):
        for name, generator in generators.items():
            figures = results.setdefault(name, defaultdict(list))
            with generator:
                figures["ttft alone, s"].append(
                    generator.submit(long, max_new_tokens=1).result().metrics.ttft_s
                )
                streams = [
                    generator.submit(tiny_prompts()[i], max_new_tokens=400, eos_token_id=None)
                    for i in range(4)
                ]
                while min(len(stream.token_ids) for stream in streams) < 20:
                    time.sleep(0.01)
                before = [len(stream.token_ids) for stream in streams]
                arrived = generator.submit(long, max_new_tokens=1)
                gaps = []
                last = [time.perf_counter()] * 4
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
    medians = {
        name: {key: median(values) for key, values in own.items()} for name, own in results.items()
    }
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
            scheduler.add(
                Request(
                    index,
                    RequestParams([1] * 100, 200, targets, ttft_slo_s=5.0 if index % 2 else None),
                )
            )
        scheduler.schedule(0.0)
        spent = []
        for step in range(200):
            for request in scheduler.running:
                if not request.num_emitted:
                    request.emit(1)
                    request.kv.num_cached = 100
                    request.stats.first_token_s = 0.0
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
        results[str(number)] = {
            "median": 1e3 * median(spent),
            "mean": 1e3 * sum(spent) / 200,
            "max": 1e3 * max(spent),
        }
        figures = "  ".join(f"{key} {value:.3f}" for key, value in results[str(number)].items())
        print(f"{number:>5} running requests, ms per step: {figures}")
    write(json_path, provenance=provenance(), ms=results)


if __name__ == "__main__":
    app()
