"""What decoding loses while its forwards are compiled, how long that takes, and what later
processes wait for it.

    python -m benchmarks.compiling --target CHECKPOINT [--batch 1] [--json FILE]

One process finds an empty cache and decodes until its forwards are compiled; another one after it
finds them compiled. Both decode short texts one after the other, without drafts: with eager
forwards only, while the compiler runs or the package is loaded, and compiled. Stock ``generate``
decodes in turns with the first two of these. A third process finds an empty cache, and waits for
the compiler (``compile="wait"``)."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.options import write_results

NEW_TOKENS = 16
TURNS = 12
LIMIT_S = 400.0  # within which forwards must be compiled


def loaded(target: str, dtype: str) -> tuple[Any, Any]:
    """Return model and tokenizer of a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
    return model, AutoTokenizer.from_pretrained(target)


def measure_waiting(target: str, dtype: str, batch: int) -> dict[str, Any]:
    """Return the seconds in which this process makes a generator that waits for the compiler, and
    calls it once; and the processors' seconds in the compiler and its processes, which other
    processes on the machine hardly change.
    """
    model, tokenizer = loaded(target, dtype)
    begun_s = time.perf_counter()
    ours = SLOSpecGenerator(
        model, None, tokenizer, SLOSpecConfig(policy="none", compile="wait"), drafter="lookup"
    )
    ours.generate(
        **tokenizer(["Tell me"] * batch, return_tensors="pt"), do_sample=False, max_new_tokens=1
    )
    if (path := ours.stats().forwards["target"]) != "compiled":
        raise RuntimeError(f"forwards were not compiled: {path}")
    elapsed_s = time.perf_counter() - begun_s
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "until_called_s": round(elapsed_s, 1),
        "compiler_cpu_s": round(compilers.ru_utime + compilers.ru_stime, 1),
    }


def measure(target: str, dtype: str, batch: int) -> dict[str, Any]:
    """Return the figures of this process, which decodes meanwhile."""
    model, tokenizer = loaded(target, dtype)
    inputs = tokenizer(["Tell me a story about a"] * batch, return_tensors="pt")
    options: dict[str, Any] = dict(
        do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
    )

    def stock() -> list[float]:
        begun_s = time.perf_counter()
        model.generate(**inputs, **options)
        return [(time.perf_counter() - begun_s) / NEW_TOKENS]

    def generator(compile: bool) -> tuple[SLOSpecGenerator, Callable[[], list[float]]]:
        ours = SLOSpecGenerator(
            model, None, tokenizer, SLOSpecConfig(policy="none", compile=compile), drafter="lookup"
        )

        def steps() -> list[float]:
            output = ours.generate(**inputs, **options, return_dict_in_generate=True)
            return [step.phases.total_s for step in output.steps if not step.is_prefill]

        return ours, steps

    def ms(samples: list[float]) -> dict[str, float]:
        return {
            "median_ms": round(1e3 * median(samples), 2),
            "longest_ms": round(1e3 * max(samples), 2),
        }

    figures = dict[str, Any]()
    for name, decode in (("stock", stock), ("eager", generator(False)[1])):
        decode()
        figures[name] = ms([sample for _ in range(TURNS) for sample in decode()])
    begun_s = time.perf_counter()
    compiling, ours = generator(True)
    during = list[float]()
    stock_during = list[float]()
    compiler_bytes = 0
    path = ""
    while (
        path := compiling.stats().forwards["target"]
    ) != "compiled" and time.perf_counter() - begun_s < LIMIT_S:
        during += ours()
        children = psutil.Process().children(recursive=True)
        compiler_bytes = max(compiler_bytes, sum(child.memory_info().rss for child in children))
        if "compiling" in path:
            stock_during += stock()
    figures["until_compiled_s"] = round(time.perf_counter() - begun_s, 1)
    if path != "compiled":
        raise RuntimeError(f"forwards were not compiled within {LIMIT_S:.0f} s: {path}")
    figures["meanwhile"] = ms(during) if during else None
    figures["stock_meanwhile"] = ms(stock_during) if stock_during else None
    figures["compiled"] = ms([sample for _ in range(TURNS) for sample in ours()])
    figures["compiler_gb"] = round(compiler_bytes / 2**30, 2)
    return figures


MEASURED = {"decoding": measure, "waiting": measure_waiting}


def in_own_process(cache: str, kind: str, *arguments: str) -> dict[str, Any]:
    """Return what a new process measures by a function of :data:`MEASURED`, with its packages in
    ``cache``.
    """
    environment = os.environ | {"HF_ASSETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.compiling", *arguments, "--measure", kind]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def main(
    target: Annotated[str, typer.Option(help="A checkpoint.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    batch: Annotated[int, typer.Option()] = 1,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    kind: Annotated[str, typer.Option("--measure", hidden=True)] = "",
) -> None:
    """Measure in a process with an empty cache, in one after it, and in one that waits."""
    if kind:
        print(json.dumps(MEASURED[kind](target, dtype, batch)))
        return
    arguments = "--target", target, "--dtype", dtype, "--batch", str(batch)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other_cache:
        results = {
            name: in_own_process(cache, "decoding", *arguments)
            for name in ("first process", "later process")
        }
        results["waiting process"] = in_own_process(other_cache, "waiting", *arguments)
    print(json.dumps(results, indent=2))
    if json_path is not None:
        write_results(
            json_path, provenance(target=Path(target).name, dtype=dtype, batch=batch), results
        )


if __name__ == "__main__":
    typer.run(main)
