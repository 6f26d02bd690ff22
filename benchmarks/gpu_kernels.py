"""Where the time of a packed forward goes on a GPU: its kernels, and what linear layers of few rows
could take.

    python -m benchmarks.gpu_kernels --json benchmarks/results/gpu-kernels-h200-8b.json

Two models of random and trained weights in the shapes of Llama-3.1-8B and Llama-3.2-1B, in bf16.
Their packed forwards are captured and replayed, and a profiler adds up the time of their kernels by
name, beside the time to read the weights at the bandwidth that is measured; the same for some sizes
without the kernels that join layers of few rows. Products of the model's linear layers are timed by
themselves: by cuBLAS, cuBLASLt and the Triton kernel for few rows, each over eight weights in turn,
so that none is in a cache."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu.bandwidth import read_bandwidth
from benchmarks.gpu.floor import weight_bytes
from hf_slospec import SLOSpecConfig
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cuda import few_rows
from hf_slospec.cuda.few_row_kernels import joint_products
from hf_slospec.cuda.graphs import capturer_for, replayed_s
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating
from hf_slospec.server.loading import load_pair

SIZES = (Size(1), Size(10), Size(16), Size(8, 8), Size(72, 8), Size(64, 64), Size(128, 64))
NUM_APART = 3  # sizes that are also timed with every layer by itself
SHAPES = {  # outputs and inputs of linear layers of Llama-3.1-8B
    "q, o": (4096, 4096), "k, v": (1024, 4096), "q+k+v": (6144, 4096), "gate, up": (14336, 4096),
    "gate+up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096),
}  # fmt: skip
ROWS = (1, 10, 64)
Product = Callable[[torch.Tensor], torch.Tensor]  # takes a weight
NUM_WEIGHTS = 8
LONGEST_NAME = 90


def kernels_of(packed: PackedModel, size: Size, repeats: int = 5) -> dict[str, Any]:
    """Return milliseconds of a replayed forward, and of its kernels by name."""
    forward_s = Forwards(packed)
    for _ in range(3):
        forward_s(size)
    host_ms = 1e3 * statistics.median(forward_s(size) for _ in range(10))
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            forward_s(size)
    total_us = defaultdict[str, float](float)
    counts = defaultdict[str, int](int)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            total_us[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    kernels = [
        {
            "kernel": name[:LONGEST_NAME],
            "count": counts[name] / repeats,
            "us": round(us / repeats, 1),
        }
        for name, us in sorted(total_us.items(), key=lambda item: -item[1])
    ]
    graphs = packed.path("cuda_graphs").counts
    return {
        "tokens": size.num_tokens, "requests": size.num_requests, "keys_each": size.keys_each,
        "forward_ms": round(host_ms, 4), "kernels_ms": round(sum(total_us.values()) / repeats / 1e3, 4),
        "captures": graphs.captures, "replays": graphs.replays, "kernels": kernels[:25],
    }  # fmt: skip


def replay_ms(packed: PackedModel, repeats: int = 7) -> tuple[float, float]:
    """Return milliseconds of the last captured forward's graph, on the device and until its launch
    returns.
    """
    graphs = packed.path("cuda_graphs").on(packed.kv_cache.pool)
    assert graphs is not None, "there are no CUDA graphs here"
    replay, times, launches = (
        next(reversed(graphs._captured.values())).replay,
        list[float](),
        list[float](),
    )
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        begun_s = time.perf_counter()
        replay()
        launches.append(1e3 * (time.perf_counter() - begun_s))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 4), round(statistics.median(launches), 4)


def product_us(product: Product, weights: list[torch.Tensor]) -> float:
    """Return the median microseconds of a product, of those by all weights in one captured graph."""
    device = weights[0].device
    capturer = capturer_for(device)
    assert capturer is not None, "there are no CUDA graphs here"
    return round(
        1e6
        * replayed_s(capturer, lambda: [product(weight) for weight in weights], device)
        / len(weights),
        2,
    )


def ways_for(states: torch.Tensor) -> dict[str, Product]:
    """Return the ways to multiply these states."""
    ways: dict[str, Product] = {
        name: functools.partial(by_library, name, states) for name in ("cublas", "cublaslt")
    }
    return ways | {"few rows": lambda weight: joint_products(states, [weight], [None])[0]}


def by_library(name: str, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a product as torch computes it by one of its libraries."""
    torch.backends.cuda.preferred_blas_library(name)
    return F.linear(states, weight)


def products(seconds: float) -> list[dict[str, Any]]:
    """Return microseconds of products by shape and number of rows, by each way to compute them."""
    found = []
    begun_s = time.monotonic()
    for name, (outputs, inputs) in SHAPES.items():
        number = 2 if outputs > 100_000 else NUM_WEIGHTS
        weights = [
            torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") * 0.02
            for _ in range(number)
        ]
        for rows in ROWS:
            if time.monotonic() - begun_s > seconds:
                break
            states = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            record: dict[str, Any] = {
                "layer": name,
                "outputs": outputs,
                "inputs": inputs,
                "rows": rows,
            }
            expected = F.linear(states, weights[0]).float()
            for way, product in ways_for(states).items():
                try:
                    error = float((product(weights[0]).float() - expected).norm() / expected.norm())
                    record[way] = (
                        product_us(product, weights) if error < 0.01 else f"off by {error:.3f}"
                    )
                except Exception as failure:  # noqa: BLE001  recorded
                    record[way] = repr(failure)[:120]
            found.append(record)
        weights.clear()
        torch.cuda.empty_cache()
    torch.backends.cuda.preferred_blas_library("default")
    return found


def main(
    seconds: Annotated[float, typer.Option(help="Time limit of the products.")] = 60.0,
    shape: Annotated[str, typer.Option()] = "8B",
    json_path: Annotated[Path, typer.Option("--json")] = Path("gpu-kernels.json"),
) -> None:
    """Time kernels and products."""
    results: dict[str, Any] = {"bandwidth": read_bandwidth(torch.device("cuda"))}
    facts = provenance(shape=shape)

    def write() -> None:
        json_path.write_text(
            json.dumps({"provenance": facts, "results": results}, indent=1) + "\n", encoding="utf-8"
        )

    pair = load_pair(None, None, shape, "bfloat16", "cuda")
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        results[name] = {"floor_ms": round(1e3 * weight_bytes(model) / results["bandwidth"], 4)}
        for kind, sizes in (("forwards", SIZES), ("apart", SIZES[:NUM_APART])):
            with evaluating(model):
                joins = few_rows.is_faster if kind == "forwards" else lambda *_: False
                with mock.patch.object(few_rows, "is_faster", joins):
                    packed = PackedModel(model, SLOSpecConfig())
                # the cache keeps the graphs
                cache = packed.kv_cache
                rows = list[dict[str, Any]]()
                results[name][kind] = rows
                for size in sizes:
                    rows.append(kernels_of(packed, size))
                    rows[-1]["graph_ms"], rows[-1]["launch_ms"] = replay_ms(packed)
                    write()
                del packed, cache
    for name, kind in itertools.product(("target", "draft"), ("forwards", "apart")):
        for row in results[name][kind]:
            print(
                name,
                kind,
                f"floor {results[name]['floor_ms']}",
                {k: v for k, v in row.items() if k != "kernels"},
            )
            for kernel in row["kernels"][:12] if row["requests"] in (1, 8) else ():
                print("   ", kernel)
    del pair, model
    torch.cuda.empty_cache()
    results["products"] = products(seconds)
    write()
    for record in results["products"]:
        best = min(((v, k) for k, v in record.items() if isinstance(v, float)), default=None)
        print(
            record["layer"],
            record["rows"],
            "cublas",
            record["cublas"],
            "lt",
            record["cublaslt"],
            "best",
            best,
        )


if __name__ == "__main__":
    typer.run(main)
