"""Milliseconds to draw the noise of a sampled token, and to choose the token, by torch and by the
operators of compiled forwards.

    python -m benchmarks.noise [--rows 16] [--json FILE]

Both have the same bits. Run it on a machine with nothing else to do."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.options import write_results
from hf_slospec.cpu import operators
from hf_slospec.model.noise import BY_TORCH

VOCABULARIES = 49_152, 151_936  # of SmolLM2 and of Qwen3
REPEATS = 50


def measure(rows: int, vocab: int) -> dict[str, dict[str, float]]:
    """Return median milliseconds of each operator by who computes it, in turns."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.empty(rows, vocab)
    probs = torch.randn(rows, vocab, generator=generator).softmax(-1)
    functions = {
        (name, system): call
        for system, each in (("torch", BY_TORCH), ("hf_slospec", torch.ops.hf_slospec))
        for name, call in (
            ("draw", partial(each.exponential_, noise, generator)),
            ("choose", partial(each.choose, probs, noise.unbind())),
        )
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in functions}
    for _ in range(REPEATS):
        for key, call in functions.items():
            begun_s = time.perf_counter()
            call()
            seconds[key].append(time.perf_counter() - begun_s)
    found: dict[str, dict[str, float]] = {}
    for (name, system), values in seconds.items():
        found.setdefault(name, {})[system] = round(1000 * median(values), 4)
    return found


def main(
    rows: Annotated[int, typer.Option(help="Rows that draw a token each.")] = 16,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    operators.build()
    operators.load()
    results = {str(vocab): measure(rows, vocab) for vocab in VOCABULARIES}
    for vocab, found in results.items():
        print(vocab, found)
    if json_path is not None:
        write_results(json_path, provenance(rows=rows), results)


if __name__ == "__main__":
    typer.run(main)
