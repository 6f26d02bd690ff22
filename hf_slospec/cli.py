"""The command line: ``python -m hf_slospec`` or ``hf_slospec``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from hf_slospec import __version__, profiling
from hf_slospec import bench as benchmark
from hf_slospec import simulate as simulation
from hf_slospec.commands.demo import demo
from hf_slospec.commands.generate import generate
from hf_slospec.commands.options import (
    Assistant,
    ConfigJSON,
    Device,
    DType,
    ResultPath,
    Size,
    TargetModel,
    pair_of,
    settings_of,
    write_results,
)
from hf_slospec.errors import InvalidInputError
from hf_slospec.sim.hardware import HARDWARE, hardware_of
from hf_slospec.sim.outcomes import METRICS, write_requests
from hf_slospec.sim.systems import SYSTEMS, config_of
from hf_slospec.sim.texts import Recording, TextModel
from hf_slospec.sim.workload import ARRIVALS, MIXES, jobs_of, mix_of, read_trace
from hf_slospec.sim.workload import arrivals as arrival_times
from hf_slospec.tiny import tiny_prompts
from hf_slospec.trace import write_chrome_trace

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tree speculation with a speed target per request.")


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


app.command()(generate)
app.command()(demo)


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
    config: ConfigJSON = "{}",
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

    Example:  hf_slospec bench --size 0.3B --batch 1 --batch 4 --json result.json
    """
    settings = settings_of(config)
    models = pair_of(target, assistant, size, dtype, device)
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
        write_results(json_path, facts, rows)


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
    """Measure what forwards of both models cost on this machine, and how well the fit predicts other sizes.

    Example:  hf_slospec profile --size 0.3B --seconds 20 --plot curves.png
    """
    models = dict(zip(("target", "draft"), pair_of(target, assistant, size, dtype, device)[:2], strict=True))
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
        write_results(json_path, facts, records)


@app.command()
def simulate(
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
    number: Annotated[int, typer.Option(help="Requests at each rate.")] = 400,
    recording: Annotated[
        Path | None, typer.Option(help="Texts of real runs, as `bench --record` writes them; else they are made up.")
    ] = None,
    acceptance: Annotated[float, typer.Option(help="Made-up texts: how often the first choice is right.")] = 0.8,
    spread: Annotated[float, typer.Option(help="Made-up texts: the larger, the more alike requests are.")] = 12.0,
    replicas: Annotated[int, typer.Option(help="Engines that share the load; who declines hands on.")] = 1,
    metric: Annotated[str, typer.Option(help=f"Attained as defined by {', '.join(METRICS)}.")] = "tpot",
    seed: Annotated[int, typer.Option(help="Everything follows from it.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write every request to this file.")] = None,
    json_path: ResultPath = None,
) -> None:
    """Replay a load under several systems on simulated models: the real scheduler and policies, a virtual clock.

    Example:  hf_slospec simulate --system auto --system vllm --rate 2 --rate 4 --plot attained.png
    """
    logging.getLogger("hf_slospec").setLevel(logging.ERROR)  # what becomes late is in the results
    if metric not in METRICS:
        raise typer.BadParameter(f"--metric must be one of {', '.join(METRICS)}")
    try:
        device = hardware_of(hardware)
        texts = Recording.read(recording) if recording else TextModel(acceptance, spread)
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
            load=str(trace) if trace else {"mix": mix, "arrivals": arrivals, "variation": variation, "number": number},
            texts=str(recording) if recording else {"acceptance": acceptance, "spread": spread},
            replicas=replicas, seed=seed,
        )  # fmt: skip
        write_results(json_path, facts, simulation.records(runs, loads, metric))


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
