"""Rollouts: several sampled continuations of one prompt, the same as stock ``generate`` writes,
faster.

    python examples/rollouts.py [TEMPERATURE]

The draft model knows the noise that chooses the target's tokens; the third row shows what that is
worth. Runs on the embedded pair, its target inflated to about 0.3 B parameters, in the dtype that
this CPU is fast in; nothing is downloaded. In bf16, near-ties may be decided differently.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.server.loading import load_pair

PROMPT = 'class Queue:\n    """A first-in, first-out container."""\n\n    def __init__(self'


def timed(generate: Any, seed: int, **options: Any) -> tuple[Any, float]:
    torch.manual_seed(seed)
    begun_s = time.perf_counter()
    out = generate(**options)
    return out, time.perf_counter() - begun_s


def main(
    temperature: float = 1.0,
    size: str = "0.3B",
    dtype: str = "fast",
    repeats: int = 3,
    new_tokens: int = 64,
) -> None:
    model, draft, tokenizer = load_pair(None, None, size, dtype, "cpu")
    model.generation_config.eos_token_id = None  # every rollout gets all its tokens
    methods = {
        "stock generate": model.generate,
        "hf_slospec": SLOSpecGenerator(model, draft).generate,
        "without the noise": SLOSpecGenerator(
            model, draft, config=SLOSpecConfig(coupling=False)
        ).generate,
    }
    options: dict[str, Any] = dict(
        **tokenizer(PROMPT, return_tensors="pt"), do_sample=True, temperature=temperature, top_k=0,
        num_return_sequences=8, max_new_tokens=new_tokens, return_dict_in_generate=True,
    )  # fmt: skip
    for generate in methods.values():  # warm-up, in which step times are measured
        timed(generate, -1, **options)
    runs = [
        {name: timed(generate, seed, **options) for name, generate in methods.items()}
        for seed in range(repeats)
    ]

    table = Table("method", "tokens/step", "speed", "same rollouts")
    for name in methods:
        outputs = [run[name][0] for run in runs]
        rows = [row for out in outputs for row in getattr(out, "slo", None) or []]
        length = (
            sum(row.tokens - 1 for row in rows) / sum(row.steps for row in rows) if rows else 1.0
        )
        speed = median(run["stock generate"][1] / run[name][1] for run in runs)
        pairs = [
            zip(run[name][0].sequences, run["stock generate"][0].sequences, strict=True)
            for run in runs
        ]
        same = [torch.equal(ours, theirs) for pair in pairs for ours, theirs in pair]
        table.add_row(name, f"{length:.2f}", f"{speed:.2f}x", f"{sum(same)} of {len(same)}")
    Console(width=120).print(table)  # complete in a narrow terminal, too


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
