"""Eight concurrent users with TPOT and TTFT SLOs of their own, on the embedded pair; nothing is
downloaded.

    python examples/many_users.py

The SLOs are multiples of the time per token of plain ``generate``, measured first, so that they are
comparable on any machine.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import RequestHandle, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.cli.activity import activity
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

USERS = {  # slo_tpot and slo_ttft as multiples of the time per token of plain decoding
    "copilot": dict(slo_tpot=2.0, slo_ttft=60.0),
    "chat": dict(slo_tpot=4.0, slo_ttft=120.0),
    "summary": dict(slo_tpot=12.0, slo_ttft=300.0),
    "no SLO": dict(),  # gets the remaining capacity
    "sampled chat": dict(slo_tpot=4.0, slo_ttft=120.0, do_sample=True, temperature=0.8, seed=1),
    "batch job": dict(best_effort=True),
    "impossible": dict(slo_tpot=0.05, slo_ttft=0.05),  # cannot be guaranteed
    "one line": dict(slo_tpot=4.0, slo_ttft=120.0, stop_strings=["\n"]),
}


def plain_s(model: Any, tokenizer: Any, tokens: int = 4, repeats: int = 5) -> float:
    """Measure the seconds per token of plain ``generate``: the shortest of several calls, as other
    processes slow some.
    """
    inputs = tokenizer(tiny_prompts()[0], return_tensors="pt", truncation=True, max_length=16)
    seconds = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seconds.append((time.perf_counter() - begun_s) / tokens)
    return min(seconds)


def scaled(users: dict[str, dict[str, Any]], unit_s: float) -> dict[str, dict[str, Any]]:
    """Return the users with their SLOs in seconds."""
    times = ("slo_tpot", "slo_ttft")
    return {
        name: {k: v * unit_s if k in times else v for k, v in own.items()}
        for name, own in users.items()
    }


def against(seconds: float | None, slo_s: float | None) -> str:
    """Return a measured time and its SLO in milliseconds."""
    measured, slo = ("" if s is None else f"{1e3 * s:.0f}" for s in (seconds, slo_s))
    return f"{measured} / {slo}" if slo else measured


def main(new_tokens: int = 60) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    model = inflate(tiny, SHAPES["0.1B"])
    # "wait": compile first, once per machine, rather than beside the users.
    config = SLOSpecConfig(max_batch=16, compile="wait")
    with activity("compiling, unless an earlier run did, and measuring"):
        gen = SLOSpecGenerator(model, draft, tokenizer, config).start()
        users = scaled(USERS, plain_s(model, tokenizer))
    handles: dict[str, RequestHandle] = {}

    def user(index: int, name: str) -> None:
        time.sleep(0.2 * index)
        handles[name] = gen.submit(tiny_prompts()[index], max_new_tokens=new_tokens, **users[name])
        for _ in handles[name]:  # a real client would show the pieces of text
            counts = ", ".join(f"{who} {len(each.token_ids)}" for who, each in handles.items())
            show(f"tokens: {counts}")

    with gen, activity("serving") as show:
        threads = [threading.Thread(target=user, args=place) for place in enumerate(USERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    table = Table(title="milliseconds: measured / SLO")
    for heading in ("user", "TTFT", "TPOT", "guaranteed", "met", "tokens", "ended by"):
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
    Console(width=120).print(table)  # complete in a narrow terminal, too
    stats = gen.stats()
    print(f"{stats.steps} steps, {stats.tokens_per_step:.2f} tokens per step and request; ", end="")
    print(f"{stats.guaranteed} guarantees, {stats.broken} of them broken")


if __name__ == "__main__":
    main()
