"""Exact bits in reduced precision: outputs that equal stock's or each other, and what they cost.

    python -m benchmarks.exact_bits --target build/checkpoints/SmolLM2-135M-Instruct --json exact_bits.json

Questions of Spec-Bench, greedy, at batch 1, all methods taking turns: stock ``generate``, and
hf_slospec as it is by default, with ``exact="bits"`` and with ``exact="self"``, with and without
drafts. Counted are outputs that equal stock's. Outputs of ``exact="self"`` are compared with each
other: with other drafters, and in a batcher in which all questions run beside each other in another
order."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers.utils import logging

from benchmarks.spec_bench import QUESTIONS, encoded_chats, groups_of, questions_of
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.server.loading import load_pair

STOCK = "stock"
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    f"{name}, {drafter}": (
        dict(exact=exact, **({"policy": "none"} if drafter == "none" else {})),
        drafter,
    )
    for name, exact in (("default", None), ("bits", "bits"), ("self", "self"))
    for drafter in ("none", "lookup")
}


def main(
    target: Annotated[str, typer.Option(help="A folder or a repository of the Hub.")],
    per_task: Annotated[int, typer.Option(help="Questions per task.")] = 4,
    new_tokens: Annotated[int, typer.Option()] = 96,
    max_prompt: Annotated[
        int, typer.Option(help="Prompts are truncated to this many tokens.")
    ] = 1024,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare outputs and times of all methods."""
    logging.set_verbosity_error()
    pair = load_pair(target, None, "tiny", dtype, "cpu")
    options: dict[str, Any] = dict(max_new_tokens=new_tokens, do_sample=False)
    generators = {
        name: SLOSpecGenerator(
            pair.target,
            None,
            pair.tokenizer,
            SLOSpecConfig(**settings),
            drafter="lookup" if draft == "none" else draft,
        )
        for name, (settings, draft) in METHODS.items()
    }
    questions = [group[0] for group in groups_of(questions_of(QUESTIONS, per_task), 1)]
    prompts = [
        encoded_chats(pair.tokenizer, [[question.turns[0]]], max_prompt, pair.target.device)
        for question in questions
    ]
    runs: dict[str, Any] = {STOCK: pair.target.generate} | {
        name: one.generate for name, one in generators.items()
    }
    for run in runs.values():
        for _ in range(2):
            run(**prompts[0], **options)
    texts: dict[str, list[list[int]]] = {name: [] for name in runs}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number, inputs in enumerate(prompts):
        order = list(runs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            begun_s = time.perf_counter()
            row = runs[name](**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
            speeds[name].append(len(row) / (time.perf_counter() - begun_s))
            texts[name].append(row)
    results: list[dict[str, Any]] = [
        {
            "method": name,
            "questions": len(prompts),
            "equal_to_stock": sum(map(list.__eq__, texts[name], texts[STOCK])),
            "speedup": round(float(np.mean(speeds[name]) / np.mean(speeds[STOCK])), 3),
        }
        for name in runs
    ]
    together = {
        name: batched(generators[name], prompts, options) for name in ("self, none", "self, lookup")
    }
    alike = [texts["self, none"], texts["self, lookup"], *together.values()]
    num_alike = sum(all(row == rows[0] for row in rows) for rows in zip(*alike, strict=True))
    for row in results:
        print(row)
    print(f"alike, alone and together: {num_alike} of {len(prompts)}")
    if json_path is not None:
        facts = provenance(
            target=Path(target).name, dtype=dtype, new_tokens=new_tokens, max_prompt=max_prompt
        )
        content = {"provenance": facts, "results": results, "self_alike": num_alike}
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def batched(
    generator: SLOSpecGenerator, prompts: list[Any], options: dict[str, Any]
) -> list[list[int]]:
    """Return the new tokens of all prompts, which a batcher decodes beside each other, in another
    order.
    """
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    with generator:
        handles = {
            index: generator.submit(prompts[index]["input_ids"], **options) for index in order
        }
        results = {index: handle.result().token_ids for index, handle in handles.items()}
    return [torch.as_tensor(results[index]).tolist() for index in range(len(prompts))]


if __name__ == "__main__":
    typer.run(main)
