"""``generate_batch`` of an enabled model against transformers' own and stock ``generate``.

    python -m benchmarks.generate_batch build/checkpoints/SmolLM2-135M-Instruct --json FILE

The prompts are first turns of Spec-Bench. Each limit of the batch and way of sampling is measured
``--repeats`` times after a warm-up, the systems in turn; stock ``generate`` decodes the prompts in
padded batches of as many rows. In fp32, all greedy texts must be equal, and each sampled one that
of stock ``generate`` for its prompt alone after the same seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

import hf_slospec
from benchmarks.spec_bench import QUESTIONS, questions_of
from hf_slospec.cli.benchmark import provenance

SEED = 100
OURS, BATCHES, GENERATE = "hf_slospec", "stock generate_batch", "stock generate"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}
PAGE = 256  # tokens of a page of stock's K/V
Rows = list[list[int]]


def prompts_of(tokenizer: Any, number: int, max_tokens: int, task: str | None = None) -> Rows:
    """Return the token ids of chats that begin with questions of all categories in turn, or with
    those of one task.
    """
    prompts: Rows = []
    questions = [q for q in questions_of(QUESTIONS, sys.maxsize) if task in (None, q.task)]
    # A name has the question's place in its category, and its number.
    for question in sorted(questions, key=lambda each: [*map(int, each.name.split())]):
        chat = [{"role": "user", "content": question.turns[0]}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        if len(encoded["input_ids"]) <= max_tokens:
            prompts.append(encoded["input_ids"])
    return prompts[:number]


def batches(
    model: Any, prompts: Rows, config: GenerationConfig, limit: int, seed: int = SEED
) -> Rows:
    """Return the new tokens of the model's ``generate_batch``, stock's or ours.

    Stock's K/V has twice the tokens that it needs: with the defaults, it takes most of the memory,
    which makes it several times slower on a CPU.
    """
    longest = max(map(len, prompts)) + config.max_new_tokens
    given = ContinuousBatchingConfig(
        max_requests_per_batch=limit, num_blocks=2 * limit * -(-longest // PAGE), page_size=PAGE,
        max_batch_tokens=512, seed=seed,
    )  # fmt: skip
    outputs = model.generate_batch(prompts, config, given)
    return [output.generated_tokens for output in outputs.values()]


def padded(model: Any, prompts: Rows, config: GenerationConfig, limit: int) -> Rows:
    """Return the new tokens of stock ``generate``, in padded batches of ``limit`` rows."""
    new: Rows = []
    for begin in range(0, len(prompts), limit):
        rows = prompts[begin : begin + limit]
        longest = max(map(len, rows))
        ids = torch.tensor([[config.pad_token_id] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        new += [until_end(row, config) for row in out[:, longest:].tolist()]
    return new


def until_end(row: list[int], config: GenerationConfig) -> list[int]:
    """Return a row up to its first end token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    places = [place for place, token in enumerate(row) if token in ends]
    return row[: places[0] + 1] if places else row


def alone(model: Any, prompts: Rows, config: GenerationConfig) -> Rows:
    """Return what stock ``generate`` gives for each prompt alone, after the seed of its request."""
    new: Rows = []
    for number, row in enumerate(prompts):
        torch.manual_seed(SEED + number)
        out = model.generate(torch.tensor([row]), generation_config=config)
        new.append(out[0, len(row) :].tolist())
    return new


def measure(
    model: Any, stock: Any, prompts: Rows, config: GenerationConfig, limit: int, repeats: int
) -> dict[str, Any]:
    """Return tokens per second of every system, and ours as a ratio of each, with equality.

    Args:
        model: the enabled model.
        stock: another copy of it, which is not enabled.
        prompts: token ids of each prompt.
        config: settings of all prompts.
        limit: requests that run together.
        repeats: measured runs of each system.
    """
    systems: dict[str, Callable[[], Rows]] = {
        OURS: partial(batches, model, prompts, config, limit),
        BATCHES: partial(batches, stock, prompts, config, limit),
        GENERATE: partial(padded, stock, prompts, config, limit),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    new: dict[str, Rows] = {}
    for repeat in range(repeats + 1):
        for name, run in systems.items():
            begun_s = time.perf_counter()
            new[name] = run()
            if repeat:  # the first one is a warm-up
                seconds[name].append(time.perf_counter() - begun_s)
    speeds = {
        name: [sum(map(len, new[name])) / each for each in own] for name, own in seconds.items()
    }
    expected = alone(stock, prompts, config) if config.do_sample else new[BATCHES]
    return {
        "tokens_per_s": {name: statistics.median(own) for name, own in speeds.items()},
        "seconds": seconds,
        "ratio": {
            name: statistics.median(a / b for a, b in zip(speeds[OURS], own, strict=True))
            for name, own in speeds.items()
        },
        "new_tokens": {name: sum(map(len, rows)) for name, rows in new.items()},
        "equal": sum(a == b for a, b in zip(new[OURS], expected, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="Hub repository or folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--limits", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, stock = (
        AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype) for _ in range(2)
    )
    hf_slospec.enable(model, config=hf_slospec.SLOSpecConfig(compile="wait"))
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = prompts_of(tokenizer, options.prompts, options.prompt_tokens)
    results: dict[str, dict[str, Any]] = {}
    for way, sampling in WAYS.items():
        for limit in options.limits:
            config = GenerationConfig(
                max_new_tokens=options.tokens, eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=tokenizer.pad_token_id or 0, **sampling,
            )  # fmt: skip
            found = measure(model, stock, prompts, config, limit, options.repeats)
            results.setdefault(way, {})[str(limit)] = found
            print(
                f"{way}, {limit} at a time: "
                + ", ".join(
                    f"{name} {speed:.0f}/s" for name, speed in found["tokens_per_s"].items()
                )
                + f"; {found['equal']} of {len(prompts)} equal"
            )
    facts = provenance(
        target=Path(options.target).name, dtype=options.dtype, prompts=len(prompts),
        max_new_tokens=options.tokens, limits=options.limits, repeats=options.repeats,
    )  # fmt: skip
    if options.json is not None:
        text = json.dumps({"provenance": facts, "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    each = [found["equal"] for by_limit in results.values() for found in by_limit.values()]
    return int(options.dtype == "float32" and min(each) < len(prompts))


if __name__ == "__main__":
    sys.exit(main())
