"""Policy auto against every constant shape of a sweep: tokens per second by batch size, greedy and
sampled.

    python benchmarks/shapes.py --json benchmarks/results/shapes-cpu-2core-0.3B-bf16.json

Shapes are chains and trees that are drafted and verified in every step. All take turns with the
same prompts in one process. The ratio of interest is that of `auto` to the best constant shape,
which is known only after the sweep."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_slospec import SLOSpecConfig, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import Bench, Method, Sample, provenance
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

OURS = "auto"
PLAIN = "no speculation"
SWEPT = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (4, 3))  # depth, width


def configs() -> dict[str, SLOSpecConfig]:
    """Return the configuration of every contestant."""
    swept = {
        f"chain of {depth}" if width == 1 else f"tree {depth} x {width}": (depth, width)
        for depth, width in SWEPT
    }
    return {
        OURS: SLOSpecConfig(),
        PLAIN: SLOSpecConfig(policy="fixed", max_depth=0),
        **{
            name: SLOSpecConfig(policy="fixed", max_depth=depth, max_width=width)
            for name, (depth, width) in swept.items()
        },
    }


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    found: list[float] = np.quantile(values, (0.25, 0.5, 0.75)).round(4).tolist()
    return found


def compared(samples: dict[str, list[Sample]], new_tokens: int, batch: int) -> dict[str, Any]:
    """Return the speed of every contestant, and that of auto relative to each in the same repeat."""
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    constant = [name for name in seconds if name != OURS]
    best = min(constant, key=lambda name: median(seconds[name]))
    steps = [step for sample in samples[OURS] for step in sample.steps if not step.is_prefill]
    return {
        "best constant": best,
        "auto to best": quartiles(
            [s / own for s, own in zip(seconds[best], seconds[OURS], strict=True)]
        ),
        "auto to plain": quartiles(
            [s / own for s, own in zip(seconds[PLAIN], seconds[OURS], strict=True)]
        ),
        "tokens_per_s": {
            name: round(batch * new_tokens / median(own), 2) for name, own in seconds.items()
        },
        "auto": {
            "depth": sum(step.depth for step in steps) / len(steps),
            "nodes_per_request": sum(step.nodes for step in steps)
            / sum(len(step.requests) for step in steps),
            "tokens_per_request": sum(step.committed for step in steps)
            / sum(len(step.requests) for step in steps),
            "steps_without_draft": sum(step.depth == 0 for step in steps) / len(steps),
        },
    }


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "0.3B",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,0.7",
    new_tokens: Annotated[int, typer.Option()] = 64,
    prompt_tokens: Annotated[int, typer.Option()] = 64,
    repeats: Annotated[int, typer.Option()] = 5,
    contestants: Annotated[
        str, typer.Option(help="Comma-separated, auto and plain decoding among them.")
    ] = ",".join(configs()),
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time auto and the sweep at every batch size and temperature."""
    target, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    target = inflate(target, SHAPES[size])
    results: dict[str, dict[str, Any]] = {}
    names = contestants.split(",")
    facts = provenance(
        size=size, dtype=dtype, new_tokens=new_tokens, prompt_tokens=prompt_tokens, repeats=repeats
    )
    for temperature in map(float, temperatures.split(",")):
        sampling = {"temperature": temperature} if temperature else None
        bench = Bench(
            target, draft, tokenizer, tiny_prompts(), prompt_tokens, new_tokens, sampling=sampling,
        )  # fmt: skip
        for batch in map(int, batches.split(",")):
            methods = [Method(name, batch, bench.ours(configs()[name])) for name in names]
            for method in methods:
                bench.time(method, repeats)  # warm-up, with other prompts
            samples: dict[str, list[Sample]] = {method.name: [] for method in methods}
            for repeat in range(repeats):
                for place in range(len(methods)):
                    method = methods[(place + repeat) % len(methods)]
                    samples[method.name].append(bench.time(method, repeat))
            label = f"{'greedy' if not temperature else f'T={temperature:g}'}, batch {batch}"
            results[label] = own = compared(samples, new_tokens, batch)
            print(
                f"{label}: auto {own['auto to best']} of {own['best constant']}, {own['auto to plain']} of plain"
            )
            if json_path is not None:
                json_path.write_text(
                    json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
                )
    table = Table(title=f"{size} {dtype}: tokens per second")
    for heading in ("", "auto to best", *names):
        table.add_column(heading, justify="right")
    for label, own in results.items():
        speeds = own["tokens_per_s"]
        table.add_row(
            label, f"{own['auto to best'][1]:.3f}", *(f"{speeds[name]:.0f}" for name in names)
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
