"""Eight users at once, each with targets of their own, on the embedded pair; nothing is downloaded.

    python examples/many_users.py

Targets are multiples of what plain ``generate`` takes per token, measured first: they mean the same on any machine.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import RequestHandle, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import SHAPES, inflate

USERS = {  # slo_tpot and slo_ttft in times per token of plain decoding
    "copilot": dict(slo_tpot=2.0, slo_ttft=60.0),
    "chat": dict(slo_tpot=4.0, slo_ttft=120.0),
    "summary": dict(slo_tpot=12.0, slo_ttft=300.0),
    "no promise": dict(),  # as fast as the others leave it
    "sampled chat": dict(slo_tpot=4.0, slo_ttft=120.0, do_sample=True, temperature=0.8, seed=1),
    "batch job": dict(best_effort=True),
    "impossible": dict(slo_tpot=0.05, slo_ttft=0.05),  # more than can be promised
    "one line": dict(slo_tpot=4.0, slo_ttft=120.0, stop_strings=["\n"]),
}


def plain_s(model: Any, tokenizer: Any, tokens: int = 16) -> float:
    """Seconds per token of plain ``generate``."""
    inputs = tokenizer(tiny_prompts()[0], return_tensors="pt", truncation=True, max_length=16)
    model.generate(**inputs, max_new_tokens=1, do_sample=False)  # the first call is slower
    begun_s = time.perf_counter()
    model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return (time.perf_counter() - begun_s) / tokens


def scaled(users: dict[str, dict[str, Any]], unit_s: float) -> dict[str, dict[str, Any]]:
    """The same users, with targets in seconds."""
    times = ("slo_tpot", "slo_ttft")
    return {name: {k: v * unit_s if k in times else v for k, v in own.items()} for name, own in users.items()}


def against(seconds: float | None, tpot_slo_s: float | None) -> str:
    """What was measured, and what was asked for."""
    got, wanted = ("" if s is None else f"{1e3 * s:.0f}" for s in (seconds, tpot_slo_s))
    return f"{got} / {wanted}" if wanted else got


def main(new_tokens: int = 60) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    model = inflate(tiny, SHAPES["0.1B"])
    gen = SLOSpecGenerator(model, draft, tokenizer, SLOSpecConfig(max_batch=16))
    users = scaled(USERS, plain_s(model, tokenizer))
    handles: dict[str, RequestHandle] = {}

    def user(index: int, name: str) -> None:
        time.sleep(0.2 * index)
        handles[name] = gen.submit(tiny_prompts()[index], max_new_tokens=new_tokens, **users[name])
        for _ in handles[name]:  # a real client would show the pieces
            pass

    with gen:
        threads = [threading.Thread(target=user, args=place) for place in enumerate(USERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    table = Table(title="milliseconds, and what was asked for")
    for heading in ("user", "first token", "per token", "promised", "met", "tokens", "ended by"):
        table.add_column(heading, no_wrap=True)
    for name in USERS:
        result = handles[name].result()
        own = result.metrics
        table.add_row(
            name,
            against(own.ttft_s, own.ttft_slo_s),
            against(own.tpot_s, own.tpot_slo_s),
            "yes" if own.guaranteed else "no",
            {True: "yes", False: "no", None: ""}[own.attained],
            str(own.tokens),
            result.finish_reason,
        )
    Console().print(table)
    stats = gen.stats()
    print(f"{stats.steps} steps, {stats.tokens_per_step:.2f} tokens per step and request; ", end="")
    print(f"{stats.promised} promises, {stats.broken} of them broken")


if __name__ == "__main__":
    main()
