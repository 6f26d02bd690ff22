"""Time to the first token of a chat's turns, with and without the K/V of earlier turns, and the
memory that takes.

    python benchmarks/chat.py --json benchmarks/results/chat-cpu-2core-0.3B-bf16.json

A system prompt of 1,000 tokens, then turns of a question and an answer. Both variants take turns
with the same chats."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.server.loading import load_pair
from hf_slospec.tiny.shapes import SHAPES

VARIANTS = {"without": 0, "with": None}  # kept_tokens


def chat(
    generator: SLOSpecGenerator, system: list[int], questions: list[list[int]], answer: int
) -> dict[str, Any]:
    """Hold one chat, and return the seconds to the first token, prompt lengths and reused tokens by
    turn.
    """
    ids = system
    ttft_s = []
    lengths = []
    reused = []
    for question in questions:
        ids = ids + question
        handle = generator.submit(ids, max_new_tokens=answer, min_new_tokens=answer)
        out = handle.result().token_ids
        ttft_s.append(handle.metrics.ttft_s)
        lengths.append(len(ids))
        reused.append(handle.metrics.reused)
        ids = ids + out
    while (
        generator.stats().running
    ):  # a text is kept once its request has left, which is after its result
        time.sleep(0.001)
    stats = generator.stats()
    packed = generator.decoder.speculator.models
    kept_bytes = stats.kept_tokens * sum(model.kv_bytes_per_token for model in packed)
    return dict(
        ttft_s=ttft_s,
        lengths=lengths,
        reused=reused,
        kept_tokens=stats.kept_tokens,
        kept_bytes=kept_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="0.3B")
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    pair = load_pair(None, None, arguments.size, arguments.dtype, "cpu")
    text = torch.tensor(pair.tokenizer("\n".join(tiny_prompts()))["input_ids"])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for repeat in tqdm(range(arguments.repeats + 1), desc="chats"):
        ids = text.roll(-1009 * repeat).tolist()
        begin = arguments.system_tokens
        length = arguments.question_tokens
        questions = [
            ids[begin + turn * length : begin + (turn + 1) * length]
            for turn in range(arguments.turns)
        ]
        order = list(VARIANTS) if repeat % 2 else list(reversed(VARIANTS))
        for name in order:
            config = SLOSpecConfig(kept_tokens=VARIANTS[name], kv_tokens=16_384)
            with SLOSpecGenerator(*pair, config) as generator:
                run = chat(generator, ids[:begin], questions, arguments.answer_tokens)
            if repeat:  # the first warms up
                runs[name].append(run)
    rows = []
    print(
        "| turn | prompt tokens | reused | without, ms | with, ms | ratio |\n|---|---|---|---|---|---|"
    )
    for turn in range(arguments.turns):
        own = {name: [run["ttft_s"][turn] for run in runs[name]] for name in VARIANTS}
        ratio = median(a / b for a, b in zip(own["without"], own["with"], strict=True))
        row = dict(
            turn=turn + 1, prompt_tokens=runs["with"][0]["lengths"][turn], reused=runs["with"][0]["reused"][turn],
            without_ms=1e3 * median(own["without"]), with_ms=1e3 * median(own["with"]), ratio=ratio,
        )  # fmt: skip
        rows.append(row)
        print(
            "| {turn} | {prompt_tokens} | {reused} | {without_ms:.0f} | {with_ms:.0f} | {ratio:.1f}x |".format(
                **row
            )
        )
    kept = runs["with"][0]["kept_tokens"], runs["with"][0]["kept_bytes"]
    print(f"kept after the chat: {kept[0]} tokens, {kept[1] / 2**20:.1f} MiB of K/V")
    if arguments.json:
        facts = provenance(
            dtype=str(pair.target.dtype),
            **{k: v for k, v in vars(arguments).items() if k not in ("json", "dtype")},
        )
        found = {
            "provenance": facts,
            "rows": rows,
            "kept_tokens": kept[0],
            "kept_bytes": kept[1],
            "runs": runs,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
