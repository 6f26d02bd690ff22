"""What it costs and gains to keep OpenMP threads from spinning while they wait for each other.

    python -m benchmarks.spinning --target CHECKPOINT [--repeats 5] [--json FILE]

Processes with several values of ``GOMP_SPINCOUNT`` take turns: each decodes the same text without
drafts, with stock ``generate`` and with compiled forwards, alone and beside a process that keeps
one core busy. Run it on a machine with nothing else to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.options import write_results

COUNTS = "default", "100000", "10000", "1000", "0"
NEW_TOKENS = 48
BUSY = "while True: pass"


def measure(target: str, dtype: str) -> dict[str, float]:
    """Return this process's milliseconds per token, of stock ``generate`` and of ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_slospec import SLOSpecConfig, SLOSpecGenerator

    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(target)
    ours = SLOSpecGenerator(
        model, None, tokenizer, SLOSpecConfig(policy="none", compile="wait"), drafter="lookup"
    )
    inputs = tokenizer(["Tell me a story about a"], return_tensors="pt")
    found = dict[str, float]()
    for name, generate in (("stock", model.generate), ("ours", ours.generate)):
        for tokens in (1, NEW_TOKENS):  # the first call is not measured
            begun_s = time.perf_counter()
            generate(**inputs, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
        found[f"{name}_ms"] = round(1e3 * (time.perf_counter() - begun_s) / NEW_TOKENS, 2)
    return found


def main(
    target: Annotated[str, typer.Option(help="A checkpoint.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    repeats: Annotated[int, typer.Option()] = 5,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    is_measured: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
) -> None:
    """Measure in processes that take turns, and print the medians."""
    if is_measured:
        print(json.dumps(measure(target, dtype)))
        return
    arguments = ["--target", target, "--dtype", dtype, "--measure"]
    command = [sys.executable, "-m", "benchmarks.spinning", *arguments]
    samples = dict[str, dict[str, list[float]]]()
    for _ in range(repeats):
        for count in COUNTS:
            for place in ("alone", "beside a busy process"):
                busy = [subprocess.Popen([sys.executable, "-c", BUSY])] if place != "alone" else []
                environment = os.environ | ({} if count == "default" else {"GOMP_SPINCOUNT": count})
                try:
                    output = subprocess.run(
                        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                finally:
                    for process in busy:
                        process.kill()
                        process.wait()
                for name, value in json.loads(output.splitlines()[-1]).items():
                    found = samples.setdefault(f"{count}, {place}", {})
                    found.setdefault(name, []).append(value)
    results = {
        key: {name: round(median(values), 2) for name, values in found.items()}
        for key, found in samples.items()
    }
    print(json.dumps(results, indent=2))
    if json_path is not None:
        about = provenance(target=Path(target).name, dtype=dtype, repeats=repeats)
        write_results(json_path, about, results)


if __name__ == "__main__":
    typer.run(main)
