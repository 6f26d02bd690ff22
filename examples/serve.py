"""Eight users at once, each with targets of their own, on the embedded pair; nothing is downloaded.

python examples/serve.py
"""

from __future__ import annotations

import threading
import time

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import RequestHandle, SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.inflate import SHAPES, inflate

USERS = [
    dict(slo_tpot=0.03, slo_ttft=1.0),
    dict(slo_tpot=0.06, slo_ttft=2.0),
    dict(slo_tpot=0.2, slo_ttft=5.0),
    dict(),  # no promise: as fast as the others leave it
    dict(slo_tpot=0.06, slo_ttft=2.0, do_sample=True, temperature=0.8, seed=1),
    dict(best_effort=True),
    dict(slo_tpot=0.001, slo_ttft=0.001),  # more than can be promised
    dict(slo_tpot=0.06, slo_ttft=2.0, stop_strings=["return"]),
]


def main() -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    gen = SLOSpecGenerator(inflate(tiny, SHAPES["0.1B"]), draft, tokenizer, SLOSpecConfig(max_batch=16))
    handles: dict[int, RequestHandle] = {}

    def user(index: int) -> None:
        time.sleep(0.2 * index)
        handles[index] = gen.submit(tiny_prompts()[index], max_new_tokens=60, **USERS[index])
        for _ in handles[index]:  # a real client would show the pieces
            pass

    with gen:
        threads = [threading.Thread(target=user, args=(index,)) for index in range(len(USERS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    table = Table("user", "asked for", "promised", "first token", "per token", "met", "ended", "text")
    for index, handle in sorted(handles.items()):
        result = handle.result()
        own = result.metrics
        asked = ", ".join(f"{name}={value}" for name, value in USERS[index].items()) or "nothing"
        met = {True: "yes", False: "no", None: ""}[own.attained]
        per_token = "" if own.tpot_s is None else f"{1e3 * own.tpot_s:.0f} ms"
        promised = "yes" if own.guaranteed else "no"
        text = (result.text or "").strip().splitlines() or [""]
        table.add_row(
            str(index), asked, promised, f"{own.ttft_s:.2f} s", per_token, met, result.finish_reason, text[0][:30]
        )
    console = Console()
    console.print(table)
    console.print(gen.stats().model_dump_json(indent=1))


if __name__ == "__main__":
    main()
