"""Latency of a verify forward by batch size, context length and token budget.

    python benchmarks/costs.py [--shape 0.6B] [--repeats 5] [--json FILE] [--plot PNG]

Forwards of one model with and without prepacked weights; all sizes once per round, medians over
rounds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from hf_slospec import SLOSpecConfig, load_tiny_pair
from hf_slospec.cli.benchmark import provenance
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

# default nodes per request, root included, and cached tokens
NODES = 8
KEYS = 256
AXES = {
    "batch": [Size(NODES * batch, batch, KEYS) for batch in (1, 2, 4, 8, 16, 32, 64)],
    "context": [Size(NODES, 1, keys) for keys in (128, 256, 512, 1024, 2048, 4096)],
    "budget": [Size(tokens, 1, KEYS) for tokens in (1, 4, 8, 16, 32, 64, 128, 256)],
}
WEIGHTS = {"prepacked": True, "as loaded": False}


def measure(shape: str, repeats: int) -> list[dict[str, float | str]]:
    """Return the median milliseconds of every size, with and without prepacked weights."""
    tiny, _, _ = load_tiny_pair(torch.bfloat16)
    model = inflate(tiny, SHAPES[shape])
    configs = {
        weights: SLOSpecConfig(prepack=prepack, compile=False)
        for weights, prepack in WEIGHTS.items()
    }
    forwards = {
        weights: Forwards(PackedModel(model, config)) for weights, config in configs.items()
    }
    sizes = sorted({size for axis in AXES.values() for size in axis})
    seconds: dict[tuple[str, Size], list[float]] = {
        (weights, size): [] for weights in WEIGHTS for size in sizes
    }
    with evaluating(model):
        for weights in WEIGHTS:
            forwards[weights](Size(1))
        for _ in tqdm(range(repeats), desc="rounds"):
            for (weights, size), own in seconds.items():
                own.append(forwards[weights](size))
    return [
        dict(weights=weights, tokens=size.num_tokens, requests=size.num_requests, keys_each=size.keys_each,
             ms=round(1e3 * median(own), 2))
        for (weights, size), own in seconds.items()
    ]  # fmt: skip


def draw(rows: list[dict[str, float | str]], path: Path) -> None:
    """Plot the three axes, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = {
        "batch": (
            "batch",
            lambda size: size.num_requests,
            f"{NODES} nodes each, {KEYS} cached tokens",
        ),
        "context": (
            "context (cached tokens)",
            lambda size: size.keys_each,
            f"one request, {NODES} nodes",
        ),
        "budget": (
            "token budget",
            lambda size: size.num_tokens,
            f"one request, {KEYS} cached tokens",
        ),
    }
    ms = {(r["weights"], Size(r["tokens"], r["requests"], r["keys_each"])): r["ms"] for r in rows}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
    for axis, (name, (label, x_of, title)) in zip(axes, labels.items(), strict=True):
        for weights, color, marker in zip(WEIGHTS, ("#0072B2", "#D55E00"), "os", strict=True):
            x = [x_of(size) for size in AXES[name]]
            axis.plot(
                x,
                [ms[weights, size] for size in AXES[name]],
                color=color,
                marker=marker,
                markersize=4,
                label=weights,
            )
        axis.set(xscale="log", yscale="log", xlabel=label, title=title)
        axis.set_xticks(x, [str(n) for n in x])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    ticks = [50, 100, 200, 500, 1000, 2000]
    axes[0].set_yticks(ticks, [str(n) for n in ticks])
    axes[0].set_ylabel("ms of a verify forward")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.shape, arguments.repeats)
    for row in rows:
        print(row)
    if arguments.json:
        facts = provenance(shape=arguments.shape, dtype="bfloat16", repeats=arguments.repeats)
        arguments.json.write_text(json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
