"""Milliseconds to draw the noise of a sampled token, and to choose the token, by torch and by the
operators of compiled forwards.

    python -m benchmarks.noise [--rows 16] [--json FILE]

Both have the same bits. Run it on a machine with nothing else to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.products import seconds
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.options import write_results
from hf_slospec.cpu import operators
from hf_slospec.model.noise import BY_TORCH

VOCABULARIES = 49_152, 151_936  # sizes of SmolLM2's and Qwen3's
ROUNDS = 50


def measure(rows: int, vocab: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each operator in its fastest round by who computes it, in turns."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.empty(rows, vocab)
    probs = torch.randn(rows, vocab, generator=generator).softmax(-1)
    systems = {"torch": BY_TORCH, "hf_slospec": torch.ops.hf_slospec}
    functions: dict[str, dict[str, list[Callable[[], Any]]]] = {
        "draw": {
            name: [partial(each.exponential_, noise, generator)] for name, each in systems.items()
        },
        "choose": {
            name: [partial(each.choose, probs, noise.unbind())] for name, each in systems.items()
        },
    }
    return {
        name: {system: round(1000 * s, 4) for system, s in seconds(calls, ROUNDS).items()}
        for name, calls in functions.items()
    }


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
