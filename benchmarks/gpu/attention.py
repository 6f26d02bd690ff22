"""Kernels that can verify trees: their error against the reference, and their times.

    python -m benchmarks.gpu.attention --json attention.json

Triton's kernel, that of each installed package of FlashAttention, and torch's. A step's attention of one
layer (32 heads of 128, 8 KV heads, bf16) is replayed from a CUDA graph.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.gpu.failures import outcome_of
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cuda import flash_kernels
from hf_slospec.cuda.flash_attention import attend
from hf_slospec.cuda.flash_kernels import KernelUnavailable
from hf_slospec.cuda.graphs import capturer_for, replayed_s
from hf_slospec.cuda.tree_attention import TreeAttention
from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.sdpa import masked_attention, sdpa_attention
from hf_slospec.model.batch import AttentionRules, CachedSequence, PackedBatch, Span
from hf_slospec.model.tree_mask import causal_mask

HEADS, KV_HEADS, DIM = 32, 8, 128
TOLERANCE = 1.6e-2  # share of the largest value, as in the tests
NUM_EAGER = 3  # runs, where nothing can be captured


class Shape(NamedTuple):
    """A step's attention."""

    requests: int
    keys: int  # committed tokens of each
    nodes: int  # per request; a tree of two branches, or a chunk of a prompt
    is_chunk: bool = False


SHAPES = (
    Shape(1, 500, 16), Shape(8, 500, 16), Shape(64, 500, 4), Shape(64, 500, 1), Shape(1, 16_000, 16),
    Shape(1, 1000, 512, is_chunk=True),
)  # fmt: skip


def batch_of(shape: Shape) -> tuple[PackedBatch, int]:
    """Return the packed batch of a shape, and the number of slots of its pool."""
    spans = []
    room = shape.keys + shape.nodes
    mask = causal_mask(shape.nodes).clone()
    offsets = torch.arange(shape.nodes)
    if not shape.is_chunk:  # every other node after the root belongs to the other branch
        branch = torch.arange(shape.nodes) % 2
        mask[1:, 1:] &= branch[1:, None] == branch[None, 1:]
        offsets = (torch.arange(shape.nodes) + 1) // 2
    for index in range(shape.requests):
        sequence = CachedSequence(index * room, room, shape.keys)
        begin = index * shape.nodes
        positions = shape.keys + offsets
        is_chain = shape.is_chunk or shape.nodes == 1
        spans.append(Span(sequence, begin, begin + shape.nodes, mask, positions, is_chain))
    return PackedBatch(spans, [span.visible for span in spans]), shape.requests * room


def kernels(device: torch.device) -> dict[str, Backend | str]:
    """Return the backend of each kernel by name, or why it cannot be had."""
    found: dict[str, Backend | str] = {"triton": TreeAttention()}
    if device.type != "cuda":
        found = {"sdpa": sdpa_attention}
    for load in flash_kernels.KERNELS:
        name = str(getattr(load, "name", load))
        try:
            backend: Any = functools.partial(attend, load(device))
            found[name] = backend
        except KernelUnavailable as error:
            found[name] = str(error)
    return found


def measured(backend: Backend, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return the error of a backend, as a share of the largest value, and its microseconds."""
    batch, num_slots = batch_of(shape)
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    query, keys, values = (
        torch.randn(size, generator=draw).to(device, dtype)
        for size in (
            (HEADS, shape.requests * shape.nodes, DIM), (num_slots, KV_HEADS, DIM), (num_slots, KV_HEADS, DIM),
        )
    )  # fmt: skip
    rules = AttentionRules(DIM**-0.5)
    run: Callable[[], Any] = functools.partial(backend, query, keys, values, batch, rules)
    out = run()
    if isinstance(out, str):
        return {"status": "refused", "reason": out}
    reference = masked_attention if num_slots <= 2**15 else sdpa_attention
    expected = reference(query.float(), keys.float(), values.float(), batch, rules)
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    if (capturer := capturer_for(device)) is not None:
        seconds = replayed_s(capturer, run, device)
    else:
        seconds = statistics.median(map(_eager_s, [run] * NUM_EAGER))
    status = "measured" if error <= TOLERANCE else "failed"
    reason = {"reason": "its error is too large"} if status == "failed" else {}
    return {"status": status, "error": error, "us": round(1e6 * seconds, 2)} | reason


def _eager_s(run: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def main(
    device: Annotated[str, typer.Option()] = "cuda",
    keys: Annotated[int, typer.Option(help="Keys of each request, at most.")] = 10**6,
    json_path: Annotated[Path, typer.Option("--json")] = Path("attention.json"),
) -> None:
    """Compare and time all kernels; exit code 1: one is wrong."""
    where = torch.device(device)
    rows: list[dict[str, Any]] = []
    for name, backend in kernels(where).items():
        if isinstance(backend, str):
            rows.append({"kernel": name, "status": "not present", "reason": backend})
            continue
        for shape in SHAPES:
            short = shape._replace(keys=min(shape.keys, keys))
            try:
                record = measured(backend, short, where)
            except Exception as error:  # noqa: BLE001  recorded
                record = outcome_of(error)
            rows.append({"kernel": name} | short._asdict() | record)
        content = {"provenance": provenance(device=device), "results": rows}
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
