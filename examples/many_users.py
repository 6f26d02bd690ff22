"""Eight users at once, each with targets of their own, on the embedded pair; nothing is downloaded.

python examples/many_users.py
"""

from __future__ import annotations

import threading
import time

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import RequestHandle, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.inflate import SHAPES, inflate

USERS = {
    "copilot": dict(slo_tpot=0.03, slo_ttft=1.0),
    "chat": dict(slo_tpot=0.06, slo_ttft=2.0),
    "summary": dict(slo_tpot=0.2, slo_ttft=5.0),
    "no promise": dict(),  # as fast as the others leave it
    "sampled chat": dict(slo_tpot=0.06, slo_ttft=2.0, do_sample=True, temperature=0.8, seed=1),
    "batch job": dict(best_effort=True),
    "impossible": dict(slo_tpot=0.001, slo_ttft=0.001),  # more than can be promised
    "one line": dict(slo_tpot=0.06, slo_ttft=2.0, stop_strings=["\n"]),
}


def against(seconds: float | None, target_s: float | None) -> str:
    """What was measured, and what was asked for."""
    return ("" if seconds is None else f"{1e3 * seconds:.0f}") + ("" if target_s is None else f" / {1e3 * target_s:g}")


def main(new_tokens: int = 60) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    gen = SLOSpecGenerator(inflate(tiny, SHAPES["0.1B"]), draft, tokenizer, SLOSpecConfig(max_batch=16))
    handles: dict[str, RequestHandle] = {}

    def user(index: int, name: str) -> None:
        time.sleep(0.2 * index)
        handles[name] = gen.submit(tiny_prompts()[index], max_new_tokens=new_tokens, **USERS[name])
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
            against(own.ttft_s, own.ttft_target_s),
            against(own.tpot_s, own.target_s),
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
