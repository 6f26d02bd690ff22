"""Seconds of a queue of requests whose lengths are not known, by how the batcher counts them
against its K/V limit.

    python benchmarks/open_ended.py --target build/checkpoints/SmolLM2-135M-Instruct \
        --json benchmarks/results/open-ended-smollm2-135m-cpu-2core-bf16.json

All requests arrive at once and emit as many tokens in every variant: ``known`` has their lengths as
max_new_tokens; the others have one limit that none of them reaches. The variants take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from benchmarks.spec_bench import QUESTIONS, encoded_chats, questions_of
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.scheduler.continuous import ContinuousScheduler

VARIANTS = ("known", "expected", "at most")
MAX_PROMPT = 1024  # tokens


class AtLength(StoppingCriteria):
    """Ends a text at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@contextlib.contextmanager
def counting(variant: str, moved: list[int]) -> Iterator[None]:
    """Let the batcher count requests at their maximum lengths if the variant says so; add up moved
    tokens.
    """
    place = KVPool.place

    def counted(pool: KVPool, placed: Any, capacity: int) -> None:
        before = {sequence: sequence.start for sequence in pool.sequences}
        place(pool, placed, capacity)
        moved.append(
            sum(sequence.length for sequence, start in before.items() if sequence.start != start)
        )

    at_most = mock.patch.object(
        ContinuousScheduler,
        "_kv_after",
        lambda own, requests, _: sum(map(own._kv_needed, requests)),
    )
    with (
        mock.patch.object(KVPool, "place", counted),
        at_most if variant == "at most" else contextlib.nullcontext(),
    ):
        yield


def serve(
    generator: SLOSpecGenerator,
    prompts: list[list[int]],
    lengths: list[int],
    limit: int,
    variant: str,
) -> dict[str, Any]:
    """Submit all prompts at once, and return what was measured until the last one's end."""
    running = list[int]()
    moved = list[int]()
    with counting(variant, moved), generator:
        begun_s = time.perf_counter()
        handles = [
            generator.submit(
                prompt, max_new_tokens=length if variant == "known" else limit, min_new_tokens=length, do_sample=False,
                stopping_criteria=[AtLength(len(prompt) + length)],
            )
            for prompt, length in zip(prompts, lengths, strict=True)
        ]  # fmt: skip
        while not all(handle.done() for handle in handles):
            running.append(generator.stats().running)
            time.sleep(0.05)
        seconds = time.perf_counter() - begun_s
    assert [len(handle.result().token_ids) for handle in handles] == lengths
    preempted = sum(handle.metrics.preempted for handle in handles)
    middle = running[
        len(running) // 10 : len(running) * 7 // 10
    ]  # between the begin and the last requests
    return {
        "seconds": seconds,
        "running": mean(middle),
        "preempted": preempted,
        "moved_tokens": sum(moved),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a model with a chat template")
    parser.add_argument("--questions", type=int, default=8, help="of each task of Spec-Bench")
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument(
        "--limit", type=int, default=4096, help="max_new_tokens where lengths are not known"
    )
    parser.add_argument("--longest", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    loaded: Any = AutoModelForCausalLM
    model = (
        loaded.from_pretrained(arguments.target, dtype=torch.bfloat16)
        .requires_grad_(False)
        .to(arguments.device)
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    chats = [question.turns[:1] for question in questions_of(QUESTIONS, arguments.questions)]
    encoded = [encoded_chats(tokenizer, [chat], MAX_PROMPT, torch.device("cpu")) for chat in chats]
    prompts = [one["input_ids"][0].tolist() for one in encoded]

    generator = SLOSpecGenerator(
        model, None, tokenizer, SLOSpecConfig(kv_tokens=arguments.kv_tokens, compile="wait")
    )
    with generator:
        handles = [
            generator.submit(prompt, max_new_tokens=arguments.longest, do_sample=False)
            for prompt in prompts
        ]
        lengths = [len(handle.result().token_ids) for handle in handles]
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for repeat in tqdm(range(arguments.repeats), desc="repeats"):
        for variant in VARIANTS if repeat % 2 else reversed(VARIANTS):
            runs[variant].append(serve(generator, prompts, lengths, arguments.limit, variant))
    results: dict[str, Any] = {
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(lengths),
        "longest_output": max(lengths),
        "variants": {
            variant: {"runs": own} | {name: median(run[name] for run in own) for name in own[0]}
            for variant, own in runs.items()
        },
    }
    for variant in VARIANTS:
        ratios = [
            own["seconds"] / other["seconds"]
            for own, other in zip(runs["at most"], runs[variant], strict=True)
        ]
        results["variants"][variant]["speedup"] = {
            "median": median(ratios),
            "low": min(ratios),
            "high": max(ratios),
        }
        own = results["variants"][variant]
        print(variant, {name: value for name, value in own.items() if name != "runs"})
    if arguments.json is not None:
        settings = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "target")
        }
        whole = {"provenance": provenance(**settings), "results": results}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
