"""The command line: ``python -m hf_slospec`` or ``hf_slospec``."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_slospec import __version__, profiling
from hf_slospec import bench as benchmark
from hf_slospec import simulate as simulation
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError
from hf_slospec.inflate import SHAPES, inflate
from hf_slospec.sim.hardware import HARDWARE, hardware_of
from hf_slospec.sim.outcomes import METRICS, write_requests
from hf_slospec.sim.systems import SYSTEMS, config_of
from hf_slospec.sim.texts import Recording, TextModel
from hf_slospec.sim.traces import read_trace
from hf_slospec.sim.workload import ARRIVALS, MIXES, jobs_of, mix_of
from hf_slospec.sim.workload import arrivals as arrival_times
from hf_slospec.tiny import load_tiny_pair, tiny_prompts
from hf_slospec.trace import write_chrome_trace

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tree speculation with a speed target per request.")


# Options that several commands have.
TargetModel = Annotated[
    str | None, typer.Option(help="A model from the Hub or a folder. Default: the embedded target.")
]
Assistant = Annotated[str | None, typer.Option(help="Its draft; required with --target.")]
Size = Annotated[str, typer.Option(help=f"Inflate the embedded target to: tiny, {', '.join(SHAPES)}.")]
DType = Annotated[str, typer.Option(help="bfloat16 for speed on CPU, float32 for identity; or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
ResultPath = Annotated[Path | None, typer.Option("--json", help="Write results with provenance to this file.")]


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tree speculation with a speed target per request."""


@app.command()
def bench(
    target: TargetModel = None,
    assistant: Assistant = None,
    size: Size = "0.6B",
    dtype: DType = "bfloat16",
    device: Device = "cpu",
    batch: Annotated[list[int], typer.Option(help="Batch sizes; give several times.")] = [1, 8],  # noqa: B006
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are cut to this many tokens.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens every row writes.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Times each contestant runs, each time on other prompts.")] = 5,
    tune: Annotated[
        bool, typer.Option(help="Also try assisted generation with 1..8 constant assistant tokens.")
    ] = True,
    config: Annotated[str, typer.Option(help="SLOSpecConfig fields as JSON, e.g. '{\"max_depth\": 4}'.")] = "{}",
    trace: Annotated[
        Path | None, typer.Option(help="Write the steps of our last run as a Chrome trace to this file.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write how the draft saw our texts, for `simulate --recording`, to this file.")
    ] = None,
    json_path: ResultPath = None,
) -> None:
    """Compare ours with stock generate, assisted generation and prompt lookup on this machine.

    All contestants are interleaved in one process; speed-ups are medians of ratios within a repeat.
    """
    settings = _settings(config)
    models = _models(target, assistant, size, dtype, device)
    facts = benchmark.provenance(
        target=target or f"embedded, {size}", assistant=assistant or "embedded", dtype=dtype, device=device,
        parameters=[model.num_parameters() for model in models[:2]], prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, repeats=repeats,
        config=settings.model_dump(),
    )  # fmt: skip
    runner = benchmark.Bench(*models, tiny_prompts(), prompt_tokens, new_tokens, settings)
    contestants = runner.contestants(sorted(set(batch)), list(range(1, 9)) if tune else [])
    samples = runner.run(contestants, repeats)
    rows = benchmark.summarize(samples, new_tokens)
    Console().print(_table(rows))
    if trace is not None:
        write_chrome_trace(samples[benchmark.OURS, max(batch)][-1].steps, trace)
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        Recording(provenance=facts, texts=runner.record(samples)).write(record)
    if json_path is not None:
        _write(json_path, facts, rows)


@app.command()
def profile(
    target: TargetModel = None,
    assistant: Assistant = None,
    size: Size = "0.6B",
    dtype: DType = "bfloat16",
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(min=1.0, help="Time to measure each model for.")] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the measured curves into this PNG.")] = None,
    json_path: ResultPath = None,
    keep: Annotated[bool, typer.Option(help="Use the result from now on, in place of a shorter measurement.")] = True,
) -> None:
    """Measure what forwards of both models cost on this machine, and how well the fit predicts other sizes."""
    models = dict(zip(("target", "draft"), _models(target, assistant, size, dtype, device)[:2], strict=True))
    records = {name: profiling.profile(name, model, seconds, keep) for name, model in models.items()}
    console = Console()
    for name, record in records.items():
        console.print(profiling.table(name, record))
    if plot is not None:
        profiling.draw(records, plot)
        console.print(f"drawn to {plot}")
    if json_path is not None:
        facts = benchmark.provenance(target=target or f"embedded, {size}", assistant=assistant or "embedded",
                                     dtype=dtype, device=device, seconds=seconds)  # fmt: skip
        _write(json_path, facts, records)


@app.command()
def simulate(
    context: typer.Context,
    system: Annotated[
        list[str],
        typer.Option(help=f"{', '.join(SYSTEMS)}; with settings: 'auto {{...}}'. Give several times."),
    ] = ["auto", "adaserve", "vllm-spec4", "sarathi", "vllm"],  # noqa: B006
    hardware: Annotated[
        str, typer.Option(help=f"{', '.join(HARDWARE)}; or a latency file, as `profile --json` writes it.")
    ] = "llama-70b-4xa100",
    trace: Annotated[
        Path | None, typer.Option(help="CSV: arrival_s, input_tokens, output_tokens, slo; in place of a mix.")
    ] = None,
    base_tpot: Annotated[float | None, typer.Option(help="Seconds that a trace's slo_ratio multiplies.")] = None,
    mix: Annotated[str, typer.Option(help=f"Lengths and targets: {', '.join(MIXES)}.")] = "adaserve",
    arrivals: Annotated[str, typer.Option(help=f"{', '.join(ARRIVALS)}.")] = "poisson",
    variation: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 3.0,
    rate: Annotated[list[float], typer.Option(help="Requests per second; give several times.")] = [],  # noqa: B006
    number: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 400,
    recording: Annotated[
        Path | None, typer.Option(help="Texts of real runs, as `bench --record` writes them; else they are made up.")
    ] = None,
    acceptance: Annotated[float, typer.Option(help="Made-up texts: how often the first choice is right.")] = 0.8,
    spread: Annotated[float, typer.Option(help="Made-up texts: the larger, the more alike requests are.")] = 12.0,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the load; who declines hands on.")] = 1,
    metric: Annotated[str, typer.Option(help=f"Attained as defined by {', '.join(METRICS)}.")] = "tpot",
    seed: Annotated[int, typer.Option(min=0, help="Everything follows from it.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write every request to this file.")] = None,
    json_path: ResultPath = None,
) -> None:
    """Replay a load under several systems on simulated models: the real scheduler and policies, a virtual clock."""
    logging.getLogger("hf_slospec").setLevel(logging.ERROR)  # what becomes late is in the results
    if metric not in METRICS:
        raise typer.BadParameter(f"--metric must be one of {', '.join(METRICS)}")
    _refuse_unused(context, trace, recording, arrivals)
    _prepare(plot, csv_path, json_path)
    try:
        device = hardware_of(hardware)
        num_children = simulation.widest(system)
        texts = Recording.read(recording) if recording else TextModel(acceptance, spread, num_children=num_children)
        traced = None if trace is None else read_trace(trace, base_tpot)
        loads = []
        for own_rate in rate or [None if traced else 2.0]:
            rng = np.random.default_rng(seed)
            if traced is None:
                times_s = arrival_times(arrivals, rng, own_rate, number, variation)
                jobs = jobs_of(mix_of(mix), times_s, rng, lambda tokens: float(device.target(tokens, 1, tokens)))
            else:
                jobs = traced if own_rate is None else simulation.at_rate(traced, own_rate)
            loads.append(simulation.Load.of("as traced" if own_rate is None else f"{own_rate:g}/s", jobs, texts, rng))
        runs = simulation.compare(system, loads, device, replicas=replicas, seed=seed)
    except (InvalidInputError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    console.print(simulation.table(runs, loads, metric))
    if plot is not None:
        simulation.draw(runs, loads, metric, plot)
        console.print(f"drawn to {plot}")
    if csv_path is not None:
        write_requests([run for own in runs.values() for run in own], csv_path)
    if json_path is not None:
        facts = benchmark.provenance(
            systems={name: config_of(name).model_dump() for name in system}, hardware=hardware, metric=metric,
            rates=rate, base_tpot=base_tpot,
            load=str(trace) if trace else {"mix": mix, "arrivals": arrivals, "variation": variation, "number": number},
            texts=str(recording) if recording else {"acceptance": acceptance, "spread": spread},
            replicas=replicas, seed=seed,
        )  # fmt: skip
        _write(json_path, facts, simulation.records(runs, loads, metric))


def _refuse_unused(context: typer.Context, trace: Path | None, recording: Path | None, arrivals: str) -> None:
    """Options that what else was given leaves without any effect."""
    without_effect = [
        (trace is not None, "--trace", ("mix", "arrivals", "variation", "number")),
        (trace is None, "no --trace", ("base_tpot",)),
        (recording is not None, "--recording", ("acceptance", "spread")),
        (arrivals != "gamma", f"--arrivals {arrivals}", ("variation",)),
    ]
    for is_so, reason, names in without_effect:
        for name in names:
            source = context.get_parameter_source(name)
            if is_so and source is not None and source.name == "COMMANDLINE":
                raise typer.BadParameter(f"--{name.replace('_', '-')} has no effect with {reason}")


def _prepare(plot: Path | None, *others: Path | None) -> None:
    """Refuse places that nothing can be written to, before any work."""
    if plot is not None:
        if plot.suffix.lower() != ".png":
            raise typer.BadParameter(f"--plot writes a PNG, and {plot} does not end in .png")
        if importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("--plot needs matplotlib: pip install 'hf_slospec[plot]'")
    for path in (plot, *others):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise typer.BadParameter(f"{path}: cannot be written ({error.strerror})") from error
            if path.is_dir():
                raise typer.BadParameter(f"{path} is a folder")


def _write(path: Path, facts: dict[str, Any], results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": facts, "results": results}, indent=2) + "\n")


def _settings(config: str) -> SLOSpecConfig:
    try:
        return SLOSpecConfig.model_validate_json(config)
    except ValidationError as error:
        raise typer.BadParameter(f"--config: {error}") from error


def _models(target: str | None, assistant: str | None, size: str, dtype: str, device: str) -> tuple[Any, Any, Any]:
    if (target is None) != (assistant is None):
        raise typer.BadParameter("--target and --assistant go together")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter("--dtype must be bfloat16, float16 or float32")
    if target is not None and assistant is not None:
        load = AutoModelForCausalLM.from_pretrained
        tokenizer = AutoTokenizer.from_pretrained(target)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return load(target, dtype=dtype).to(device), load(assistant, dtype=dtype).to(device), tokenizer
    if size != "tiny" and size not in SHAPES:
        raise typer.BadParameter(f"--size must be tiny or one of {', '.join(SHAPES)}")
    model, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    model, draft = model.to(device), draft.to(device)
    return model if size == "tiny" else inflate(model, SHAPES[size]), draft, tokenizer


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Speed against stock generate, same batch, same repeat (medians)")
    table.add_column("batch", justify="right")
    table.add_column("method", no_wrap=True)
    for heading in ("speed-up", "tokens/s", "ms/token", "host", "accept", "equal"):
        table.add_column(heading, justify="right")
    for row in rows:
        style = "bold" if row["name"] == benchmark.OURS else None
        length = row["acceptance_length"]
        table.add_row(
            str(row["batch"]), row["name"], f"{row['speedup_vs_generate']:.2f}x", f"{row['tokens_per_s']:.1f}",
            f"{row['ms_per_token_and_row']:.1f}", f"{row['host_share']:.1%}", f"{length:.2f}" if length else "",
            row["rows_equal_to_generate"], style=style,
        )  # fmt: skip
    return table
