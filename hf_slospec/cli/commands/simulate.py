"""``hf_slospec simulate``: several systems under the same loads, on simulated models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from hf_slospec.cli.options import ResultPath, check_outputs, console, is_given, write_results
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab import comparison
from hf_slospec.lab.files import read_trace
from hf_slospec.lab.hardware import HARDWARE, hardware_of
from hf_slospec.lab.outcomes import METRICS, write_requests
from hf_slospec.lab.systems import OURS, ROUTERS, SYSTEMS, config_of
from hf_slospec.lab.texts import Recording, TextModel
from hf_slospec.lab.workload import ARRIVALS, MIXES, jobs_of, mix_of
from hf_slospec.lab.workload import arrivals as arrival_times
from hf_slospec.server.model_options import only_errors_logged

DEFAULT_RATE = 2.0  # requests per second


def simulate(
    context: typer.Context,
    system: Annotated[
        list[str],
        typer.Option(help=f"{', '.join(SYSTEMS)}; with settings: 'auto {{...}}'. Repeatable."),
    ] = ["auto", "adaserve", "vllm-spec4", "sarathi", "vllm"],  # noqa: B006  read only
    hardware: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(HARDWARE)}; or a latency file, such as `profile --json` writes."
        ),
    ] = "llama-70b-4xa100",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with arrival_s, input_tokens, output_tokens, slo; replaces --mix."
        ),
    ] = None,
    base_tpot: Annotated[
        float | None, typer.Option(help="Seconds per token that the trace's slo_ratio multiplies.")
    ] = None,
    mix: Annotated[str, typer.Option(help=f"Lengths and SLOs: {', '.join(MIXES)}.")] = "adaserve",
    arrivals: Annotated[
        str, typer.Option(help=f"Arrival process: {', '.join(ARRIVALS)}.")
    ] = "poisson",
    variation: Annotated[
        float, typer.Option(help="Coefficient of variation of gamma arrivals.")
    ] = 3.0,
    rate: Annotated[
        list[float],
        typer.Option(help="Requests per second; repeatable. Default: 2, or the rate of the trace."),
    ] = [],  # noqa: B006  read only
    number: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 400,
    recording: Annotated[
        Path | None,
        typer.Option(
            help="Texts recorded by `benchmarks/fidelity.py --record`. Default: synthetic texts."
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="Synthetic texts: acceptance rate of the draft's first choice.")
    ] = 0.8,
    spread: Annotated[
        float, typer.Option(help="Synthetic texts: the larger, the more alike requests are.")
    ] = 12.0,
    distance: Annotated[
        float,
        typer.Option(help="Synthetic texts: total variation distance between draft and target."),
    ] = 0.0,
    coupled: Annotated[
        bool, typer.Option(help="Synthetic texts: drafts sample with the target's noise.")
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the load.")] = 1,
    router: Annotated[
        str, typer.Option(help=f"Router of several replicas: {', '.join(ROUTERS)}.")
    ] = OURS,
    metric: Annotated[
        str, typer.Option(help=f"Definition of attainment: {', '.join(METRICS)}.")
    ] = "tpot",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Plot the results to this PNG.")] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write a line for every request to this file.")
    ] = None,
    json_path: ResultPath = None,
) -> None:
    """Simulate several systems under the same loads: the real scheduler and policies, simulated
    models and time.

    vllm, sarathi, adaserve and others name the scheduling rules of that system, emulated on this
    engine. None of its code runs, so they say nothing about its speed.

    Example:  hf_slospec simulate --system auto --system vllm --rate 2 --rate 4 --plot attained.png
    """
    if metric not in METRICS:
        raise typer.BadParameter(f"--metric must be one of {', '.join(METRICS)}, got {metric!r}")
    _refuse_unused(context, trace, recording, arrivals, replicas)
    check_outputs(plot, csv_path, json_path)
    try:
        device = hardware_of(hardware)
        num_children = comparison.num_children_for(system)
        texts = (
            Recording.read(recording)
            if recording
            else TextModel(
                acceptance, spread, num_children=num_children, distance=distance, coupled=coupled
            )
        )
        traced = None if trace is None else read_trace(trace, base_tpot)
        loads = []
        rates: list[float | None] = [*rate] or [None if traced else DEFAULT_RATE]
        for load_rate in rates:
            rng = np.random.default_rng(seed)
            if traced is None:
                assert load_rate is not None
                times_s = arrival_times(arrivals, rng, load_rate, number, variation)
                jobs = jobs_of(
                    mix_of(mix),
                    times_s,
                    rng,
                    lambda tokens: float(device.target(tokens, 1, tokens)),
                )
            else:
                jobs = traced if load_rate is None else comparison.at_rate(traced, load_rate)
            label = "as traced" if load_rate is None else f"{load_rate:g}/s"
            loads.append(comparison.Load.of(label, jobs, texts, rng))
        with only_errors_logged():
            runs = comparison.compare(
                system, loads, device, replicas=replicas, seed=seed, router=router
            )
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from error
    output = console(min_width=comparison.TABLE_WIDTH)
    output.print(comparison.table(runs, loads, metric))
    if plot is not None:
        comparison.draw(runs, loads, metric, plot)
        output.print(f"plotted to {plot}", soft_wrap=True)
    if csv_path is not None:
        pairs = [
            (load.label, run)
            for of_system in runs.values()
            for load, run in zip(loads, of_system, strict=True)
        ]
        write_requests(pairs, METRICS[metric], csv_path)
    if json_path is not None:
        from hf_slospec.cli import benchmark  # which imports torch

        facts = benchmark.provenance(
            systems={name: config_of(name).model_dump() for name in system}, hardware=hardware, metric=metric,
            rates=rate, base_tpot=base_tpot,
            load=str(trace) if trace else {"mix": mix, "arrivals": arrivals, "variation": variation, "number": number},
            texts=str(recording) if recording else {
                "acceptance": acceptance, "spread": spread, "distance": distance, "coupled": coupled,
            },
            replicas=replicas, router=router if replicas > 1 else None, seed=seed,
        )  # fmt: skip
        write_results(json_path, facts, comparison.records(runs, loads, metric))


def _refuse_unused(
    context: typer.Context, trace: Path | None, recording: Path | None, arrivals: str, replicas: int
) -> None:
    """Raise BadParameter for options that have no effect with the given ones."""
    without_effect = [
        (trace is not None, "--trace", ("mix", "arrivals", "variation", "number")),
        (trace is None, "no --trace", ("base_tpot",)),
        (recording is not None, "--recording", ("acceptance", "spread", "distance", "coupled")),
        (replicas == 1, "--replicas 1", ("router",)),
        (arrivals != "gamma", f"--arrivals {arrivals}", ("variation",)),
    ]
    for is_true, reason, names in without_effect:
        for name in names:
            if is_true and is_given(context, name):
                raise typer.BadParameter(f"--{name.replace('_', '-')} has no effect with {reason}")
