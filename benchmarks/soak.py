"""Stress test: eight threads submit for minutes, with random cancels, errors, timeouts and stops;
no loss, no leak.

    python benchmarks/soak.py --minutes 20 [--plot docs/images/soak.png] \
        [--json benchmarks/results/soak-20min-cpu-2core.json]

Runs on the embedded pair in fp32 with all invariants checked in every step, and compares greedy
outputs with stock ``generate``.
"""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from matplotlib import pyplot
from tqdm import tqdm
from transformers import StoppingCriteriaList

from hf_slospec import (
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cli.benchmark import provenance

THREADS = 8
WAIT_S = 300.0
LONGEST = 24
SAMPLE_S = 5.0  # between two readings of the memory
MIB = 2**20


class FailingCriterion:
    """A stopping criterion that raises after a number of calls."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("deliberate error")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main(
    minutes: Annotated[float, typer.Option(min=0.1)] = 20.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the resident memory over time.")] = None,
) -> None:
    """Submit from eight threads while a ninth one repeatedly stops and starts the batcher."""
    target, draft, tokenizer = load_tiny_pair()
    config = SLOSpecConfig(
        check_invariants=True, max_batch=16, max_queue=64, kv_tokens=4000, prefill_chunk=64
    )
    gen = SLOSpecGenerator(target, draft, tokenizer, config)
    prompts = [tokenizer(text)["input_ids"][:24] for text in tiny_prompts()[:8]]
    expected = [
        target.generate(torch.tensor([ids]), max_new_tokens=LONGEST, eos_token_id=None)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]
    outcomes: Counter[str] = Counter()
    memory = list[tuple[float, int]]()
    lock = threading.Lock()
    bar = tqdm(unit=" submits")
    is_over = threading.Event()

    def one(rng: random.Random) -> str:
        which = rng.randrange(len(prompts))
        new = rng.randrange(1, LONGEST)
        options: dict[str, Any] = dict(
            max_new_tokens=new, eos_token_id=None, priority=rng.randrange(2)
        )
        if rng.random() < 0.5:
            options |= dict(
                slo_tpot=rng.choice([1e-6, 0.05, 1.0]), slo_ttft=rng.choice([1e-6, 1.0, 60.0])
            )
        fails = rng.random() < 0.05
        if fails:
            options["stopping_criteria"] = StoppingCriteriaList(
                [FailingCriterion(rng.randrange(new))]
            )
        if is_sampled := rng.random() < 0.2:
            options |= dict(do_sample=True, seed=rng.randrange(100))
        try:
            handle = gen.submit(prompts[which], **options, block=rng.random() < 0.8, timeout=WAIT_S)
        except QueueFull:
            return "queue full"
        except NotRunningError:
            time.sleep(0.05)
            return "not running"
        if rng.random() < 0.1:
            handle.cancel()
        try:
            tokens = (
                list(handle.tokens()) if rng.random() < 0.2 else handle.result(WAIT_S).token_ids
            )
        except RequestCancelledError:
            return "cancelled"
        except ZeroDivisionError:
            return "failed on purpose" if fails else "WRONG ERROR"
        except TimeoutError:
            return "HANGS"
        if not is_sampled and tokens != expected[which][:new]:
            return "WRONG TOKENS"
        return "finished" if len(tokens) == new else "WRONG LENGTH"

    def user(index: int) -> None:
        rng = random.Random(1000 * seed + index)
        while True:
            with lock:
                if time.perf_counter() - begun_s >= 60.0 * minutes:
                    return
                bar.update()
            outcome = one(rng)
            with lock:
                outcomes[outcome] += 1

    def stopper() -> None:
        rng = random.Random(seed)
        while not is_over.wait(rng.uniform(5.0, 20.0)):
            gen.stop(drain=rng.random() < 0.5, timeout=rng.choice([None, 0.1]))
            gen.start()

    def observer() -> None:
        while not is_over.wait(SAMPLE_S):
            gc.collect()
            memory.append((time.perf_counter() - begun_s, psutil.Process().memory_info().rss))

    gen.start()
    begun_s = time.perf_counter()
    threads = [threading.Thread(target=user, args=(index,)) for index in range(THREADS)]
    others = [threading.Thread(target=stopper), threading.Thread(target=observer)]
    for thread in (*threads, *others):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    for thread in others:
        thread.join()
    gen.stop()
    bar.close()
    stats = gen.stats()
    growth = (
        memory[-1][1] / memory[len(memory) // 4][1] if len(memory) > 4 else None
    )  # after the first quarter
    print(
        dict(outcomes),
        f"{time.perf_counter() - begun_s:.0f} s, memory at the end over that after a quarter: {growth}",
    )
    print(stats)
    ended = sum(stats.finished.values())
    assert not [name for name in outcomes if name.isupper()], outcomes
    assert ended == sum(outcomes.values()) - outcomes["queue full"] - outcomes["not running"], (
        "a request was lost or counted twice"
    )
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
    if json_path is not None:
        record = {
            "provenance": provenance(minutes=minutes, seed=seed),
            "outcomes": dict(outcomes),
            "growth": growth,
            "resident_bytes": memory,
            "stats": stats.model_dump(),
        }
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    if plot is not None:
        figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
        axes.plot([at_s / 60.0 for at_s, _ in memory], [used / MIB for _, used in memory])
        axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None))
        axes.set_title(f"{sum(outcomes.values()):,} submits; end over first quarter: {growth:.2f}")
        figure.savefig(plot, dpi=120)


if __name__ == "__main__":
    typer.run(main)
