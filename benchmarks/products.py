"""Seconds of the products of a few rows with packed weights, beside their floors on this CPU.

    python -m benchmarks.products [--dtypes bfloat16 float32] [--shapes 1536x576 ...] [--json FILE]

The memory floor of a product is the time to read as many bytes of a large tensor, the compute floor
that of its operations at the speed of torch's products of 512 rows (in fp32 where torch emulates
the dtype). All are measured in turn, and the fastest round counts.
``--codes`` adds weights of 4 and 8 bits. Run it on a machine with nothing else to do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hf_slospec.cli.benchmark import provenance
from hf_slospec.cpu import operators
from hf_slospec.cpu.kernels import PACKING, works
from hf_slospec.cpu.quantised import PackedMatrix, quantise
from hf_slospec.model.machine import native_dtypes

ROWS = 1, 2, 4, 8, 16, 64, 256
SHAPES = "1536x576", "576x1536", "960x576", "49152x576"  # layers of SmolLM2-135M
READ_BYTES = 2**28  # larger than caches
WEIGHT_BYTES = 2**26  # bytes of weights of one shape that are multiplied in turn
COMPUTE_ROWS = 512


def seconds(functions: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Return the seconds of each function in its fastest round."""
    fastest: dict[str, float] = {}
    for round in range(rounds + 1):
        for name, calls in functions.items():
            begun_s = time.perf_counter()
            for call in calls:
                call()
            spent_s = (time.perf_counter() - begun_s) / len(calls)
            if round:  # the first one is a warm-up
                fastest[name] = min(spent_s, fastest.get(name, spent_s))
    return fastest


def measure(shape: tuple[int, int], dtype: torch.dtype, codes: bool, rounds: int) -> dict[str, Any]:
    """Return milliseconds by number of rows: of each kernel, and of the floors."""
    outputs, inputs = shape
    count = max(1, WEIGHT_BYTES // (outputs * inputs * dtype.itemsize))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    matrices: dict[str, list[Any]] = {"torch": [partial(F.linear, weight=w) for w in weights]}
    for name, make in PACKING.items():
        if works(name, dtype):
            packed = [make(weight) for weight in weights]
            matrices[name] = [partial(_product, matrix) for matrix in packed]
    for bits in (8, 4) if codes else ():
        matrices[f"int{bits}"] = [PackedMatrix(quantise(weight, bits)) for weight in weights]
    large = torch.ones(READ_BYTES // 4)
    fast = dtype if native_dtypes().get(dtype, True) else torch.float32
    square, rows = (torch.randn(size, 1024).to(fast) for size in (1024, COMPUTE_ROWS))
    found: dict[str, Any] = {}
    for number in ROWS:
        x = torch.randn(number, inputs).to(dtype)
        calls = {name: [partial(each, x) for each in own] for name, own in matrices.items()}
        calls["read"] = [large.sum]
        calls["compute"] = [partial(F.linear, rows, square)]
        took = seconds(calls, rounds)
        read_s = took.pop("read") / READ_BYTES * outputs * inputs * dtype.itemsize
        per_product_s = took.pop("compute") / (COMPUTE_ROWS * 1024 * 1024)
        found[str(number)] = {
            "ms": {name: 1000 * spent_s for name, spent_s in took.items()},
            "memory_floor_ms": 1000 * read_s,
            "compute_floor_ms": 1000 * per_product_s * number * outputs * inputs,
        }
    return found


def _product(matrix: Any, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = matrix(x, None)
    return product


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="OUTPUTSxINPUTS")
    parser.add_argument("--codes", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    operators.build()
    results: dict[str, dict[str, Any]] = {}
    for name in options.dtypes:
        for shape in options.shapes:
            outputs, inputs = map(int, shape.split("x"))
            found = measure((outputs, inputs), getattr(torch, name), options.codes, options.rounds)
            results.setdefault(name, {})[shape] = found
            for number, record in found.items():
                floor_ms = max(record["memory_floor_ms"], record["compute_floor_ms"])
                times = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in record["ms"].items())
                ratio = record["ms"].get("Blocks", record["ms"]["torch"]) / floor_ms
                print(f"{name} {shape}, {number} rows: {times}; Blocks / floor {ratio:.2f}")
    if options.json is not None:
        text = json.dumps({"provenance": provenance(), "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
