"""Frequency and margins of differences between bf16 output of the embedded pair and stock
``generate``.

OMP_NUM_THREADS=1 python benchmarks/bf16_divergence.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from hf_slospec import Divergence, SLOSpecGenerator, divergence_report, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.divergence import find_divergences

STRIDE = 24  # tokens between the windows cut from one held-out text
LENGTHS = range(32, 65)  # tokens of consecutive windows, so that batches are padded


def windows(texts: list[list[int]], count: int) -> list[list[int]]:
    """Return distinct windows: the first one of every text, then the second one of every text, and
    so on.
    """
    found: dict[tuple[int, ...], None] = {}  # used as an ordered set
    starts = range(0, max(map(len, texts)), STRIDE)
    for start, text in ((start, text) for start in starts for text in texts):
        window = text[start : start + LENGTHS[len(found) % len(LENGTHS)]]
        if len(window) >= LENGTHS[0] and len(found) < count:
            found[tuple(window)] = None
    if len(found) < count:
        raise typer.BadParameter(
            f"the held-out texts have only {len(found)} windows; ask for fewer --prompts"
        )
    return [list(window) for window in found]


def batches(prompts: list[list[int]], size: int, pad: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield left-padded ``input_ids`` and ``attention_mask``, each [batch, padded_len] int64."""
    for first in tqdm(
        range(0, len(prompts), size), desc=f"batches of {size}", disable=not sys.stderr.isatty()
    ):
        rows = prompts[first : first + size]
        width = max(map(len, rows))
        yield {
            "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor(
                [[0] * (width - len(row)) + [1] * len(row) for row in rows]
            ),
        }


def counts(rows: int, tokens: int, divergences: list[Divergence]) -> dict[str, Any]:
    """Return the figures of one comparison."""
    fields = ("position", "margin", "rounding", "noise", "is_near_tie", "stock_logit", "our_logit")
    return {
        "rows": rows,
        "tokens": tokens,
        "divergences": len(divergences),
        "near_ties": sum(d.is_near_tie for d in divergences),
        "within_rounding_alone": sum(d.margin <= d.rounding for d in divergences),
        "margins": [round(d.margin, 6) for d in divergences],
        "noise": [round(d.noise, 6) for d in divergences],
        "not_near_ties": [
            {f: getattr(d, f) for f in ("row", *fields)} for d in divergences if not d.is_near_tie
        ],
    }


def main(
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path(
        "benchmarks/results/bf16-divergence.json"
    ),
) -> None:
    """Compare hf_slospec with stock in batches of 1 and 8, and stock with itself at both sizes, all
    greedy.
    """
    target, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    generator = SLOSpecGenerator(target, draft, tokenizer)
    texts = windows([tokenizer(text).input_ids for text in tiny_prompts()], prompts)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    results = {}
    stock = {}
    for size in (1, 8):
        tokens, divergences, stock[size] = 0, [], []
        for inputs in batches(texts, size, tokenizer.pad_token_id):
            report = divergence_report(generator, inputs, **options)
            tokens += report.num_tokens
            divergences += report.divergences
            stock[size] += report.stock_tokens
        results[f"ours against generate, batches of {size}"] = counts(prompts, tokens, divergences)
    between = find_divergences(target, texts, stock[1], stock[8])
    ends = {d.row: d.position + 1 for d in between}
    tokens = sum(ends.get(row, new_tokens) for row in range(prompts))
    results["generate against itself, batches of 8 and of 1"] = counts(prompts, tokens, between)
    facts = provenance(
        models="embedded pair", dtype=dtype, prompts=prompts, prompt_tokens=[LENGTHS[0], LENGTHS[-1]],
        new_tokens=new_tokens, decoding="greedy, no eos",
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"provenance": facts, "results": results}, indent=1) + "\n", encoding="utf-8"
    )
    for name, found in results.items():
        print(
            f"{name}: {found['rows']} rows, {found['tokens']} tokens, {found['divergences']} divergences, "
            f"{found['near_ties']} at near-ties; largest margin {max(found['margins'], default=0.0):.3g}"
        )


if __name__ == "__main__":
    typer.run(main)
