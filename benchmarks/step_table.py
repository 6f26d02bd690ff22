"""Breakdown of step times, by sampling the main thread's stack while ``generate`` runs.

    pip install py-spy python benchmarks/step_table.py [--shape 0.6B] [--batches 1 8] [--seconds 40]
    [--json FILE]

py-spy samples from another process, so the measurement does not slow down the measured code. A
sample counts for the innermost frame of its stack that is in the tables below.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_slospec import SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

RATE = 500  # samples per second
NEW_TOKENS = 48
# Patterns of stack frames, "function (file:line)", by part of a step.
FORWARD = [
    (
        "linear layers",
        r"torch/nn/modules/linear\.py|hf_slospec/cpu/(packed_weights|kernels)\.py",
    ),
    ("attention", "hf_slospec/model/attention/"),
    ("norms", r"Norm\.forward \("),
    ("rotary embedding", r"rotary|rotate_half"),
    ("activations", r"torch/nn/modules/activation\.py|transformers/activations\.py"),
    ("the rest of the layers", "transformers/models/"),
    ("inputs and masks", r"hf_slospec/model/(packed_model|batch)\.py"),
]
PHASES = [
    ("verify", r"_verify \(.*model/target\.py"),
    ("draft", r"draft \(.*hf_slospec/drafters/assistant\.py"),
    ("plan and select", "hf_slospec/policies/"),
    ("accept", "hf_slospec/tree/accept.py"),
    ("commit", r"commit \(.*model/target\.py"),
    ("rest of the step", r"step \(.*engine/step\.py"),
    ("around the steps", r"generate \(.*hf_slospec/"),
]
IN_PHASE = {
    "verify": [*FORWARD, ("choosing tokens", "hf_slospec/model/sampling.py")],
    "draft": [*FORWARD, ("beam search", r"extend_beam \("), ("trees on the host", r"^_trees \(")],
}


def place_of(stack: list[str]) -> tuple[str, str] | None:
    """Return the phase and its part for a stack, innermost frame last; None outside of
    ``generate``.
    """
    phase = _first(PHASES, stack)
    return None if phase is None else (phase, _first(IN_PHASE.get(phase, []), stack) or "rest")


def _first(table: list[tuple[str, str]], stack: list[str]) -> str | None:
    found = (
        name for frame in reversed(stack) for name, pattern in table if re.search(pattern, frame)
    )
    return next(found, None)


def sampling(seconds: float, out: Path) -> subprocess.Popen[bytes]:
    """Start py-spy for this process; it writes its samples to a file at the end."""
    command = [
        "py-spy",
        "record",
        "--pid",
        str(os.getpid()),
        "--rate",
        str(RATE),
        "--duration",
        str(round(seconds)),
    ]
    return subprocess.Popen(
        [*command, "--format", "raw", "--full-filenames", "--nonblocking", "--output", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def counted(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """Count samples by phase and part in py-spy's raw lines: frames, outermost first, joined by
    ``;``, and a count.
    """
    counts = Counter[tuple[str, str]]()
    for line in lines:
        frames, _, number = line.rpartition(" ")
        if (place := place_of(frames.split(";"))) is not None:
            counts[place] += int(number)
    return counts


def measure(
    gen: SLOSpecGenerator, batch: int, seconds: float
) -> tuple[Counter[tuple[str, str]], int]:
    """Return the samples by phase and part, and the number of steps in the measured time."""
    prompts = (tiny_prompts() * batch)[:batch]
    encoded = gen.tokenizer(
        prompts, return_tensors="pt", padding=True, truncation=True, max_length=64
    )
    options = dict(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, return_dict_in_generate=True
    )
    gen.generate(**encoded, **options)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.txt"
        num_steps = 0
        spy = sampling(seconds, out)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            num_steps += len(gen.generate(**encoded, **options).steps)
        spy.wait()
        return counted(out.read_text().splitlines()), num_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=40.0, help="per batch size")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    gen = SLOSpecGenerator(inflate(tiny, SHAPES[arguments.shape]), draft, tokenizer)
    rows = []
    for batch in arguments.batches:
        counts, num_steps = measure(gen, batch, arguments.seconds)
        total = counts.total()
        print(
            f"\nbatch {batch}: {total} samples, {num_steps} steps\n\n| phase | | share of all |\n|---|---|---|"
        )
        phases = Counter[str]()
        for (phase, _), number in counts.items():
            phases[phase] += number
        for phase, number in phases.most_common():
            print(f"| **{phase}** | | **{number / total:.1%}** |")
            for (of, what), part in counts.most_common():
                if of == phase and part != number:
                    print(f"| | {what} | {part / total:.1%} |")
        shares = [
            dict(phase=p, what=w, share=round(n / total, 5)) for (p, w), n in counts.most_common()
        ]
        rows.append(dict(batch=batch, samples=total, steps=num_steps, shares=shares))
    if arguments.json:
        facts = provenance(shape=arguments.shape, dtype="bfloat16", new_tokens=NEW_TOKENS)
        arguments.json.write_text(json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
