"""Attempts to speed up forwards on CPUs: prepacked weights, torch's compiler, the thread that runs
them.

    python benchmarks/cpu_forwards.py [--shape 0.3B] [--repeats 9] [--json FILE]

Plain forwards of a whole model over a few tokens, without packed batches. All variants run in every
round; medians over rounds. The compilation needs a C++ compiler and takes about a minute.
"""

from __future__ import annotations

import argparse
import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_slospec import load_tiny_pair
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cpu.packed_weights import PackedWeights
from hf_slospec.model.linear_overrides import Overrides
from hf_slospec.model.machine import release_openmp_threads
from hf_slospec.model.version import ModelVersion
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

TOKENS = (1, 4, 8, 16, 32, 64)


def timed(model: Any, num_tokens: int) -> float:
    """Return the seconds of one forward."""
    input_ids = torch.arange(num_tokens)[None]
    with torch.no_grad():
        begun_s = time.perf_counter()
        model(input_ids, use_cache=False)
        return time.perf_counter() - begun_s


def by_variant(model: Any, repeats: int) -> tuple[list[dict[str, float]], float]:
    """Return milliseconds by tokens and variant, and the seconds of the compilation."""
    linears = Overrides(model, [PackedWeights(model, True)])
    linears.renew(ModelVersion(model))
    begun_s = time.perf_counter()
    torch._inductor.config.freezing = (
        True  # weights become constants, which the compiler also prepacks
    )
    compiled = torch.compile(copy.deepcopy(model), dynamic=True)
    for num_tokens in (8, 9, 24, 1):
        timed(compiled, num_tokens)
    compile_s = time.perf_counter() - begun_s

    def prepacked(num_tokens: int) -> float:
        with linears.in_force():
            return timed(model, num_tokens)

    variants: dict[str, Callable[[int], float]] = {
        "as loaded": lambda n: timed(model, n),
        "prepacked": prepacked,
        "compiled": lambda n: timed(compiled, n),
    }
    rows = []
    for num_tokens in TOKENS:
        rounds = [{name: run(num_tokens) for name, run in variants.items()} for _ in range(repeats)]
        rows.append(
            {"tokens": num_tokens}
            | {name: round(1e3 * median(r[name] for r in rounds), 2) for name in variants}
        )
    return rows, compile_s


def by_thread(model: Any, repeats: int) -> dict[str, float]:
    """Return the slow-down of forwards in a second thread while the first one keeps, or released,
    its OpenMP team.
    """

    def own() -> float:
        timed(model, 8)
        return median(timed(model, 8) for _ in range(5))

    def in_thread() -> float:
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(own()))
        thread.start()
        thread.join()
        return found[0]

    kept = []
    released = []
    for _ in range(repeats):
        here = own()
        kept.append(in_thread() / here)
        here = own()
        release_openmp_threads()
        released.append(in_thread() / here)
    return {"team kept": round(median(kept), 3), "team released": round(median(released), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.3B")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tiny, draft, _ = load_tiny_pair(torch.bfloat16)
    target = inflate(tiny, SHAPES[arguments.shape])
    threads = {
        name: by_thread(model, arguments.repeats)
        for name, model in (("target", target), ("draft", draft))
    }
    rows, compile_s = by_variant(target, arguments.repeats)
    print(f"slow-down in a second thread: {threads}\ncompilation took {compile_s:.0f} s")
    for row in rows:
        print(row)
    if arguments.json:
        facts = provenance(shape=arguments.shape, dtype="bfloat16", repeats=arguments.repeats)
        results = {"in_a_second_thread": threads, "compile_s": round(compile_s, 1), "ms": rows}
        arguments.json.write_text(json.dumps({"provenance": facts, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
