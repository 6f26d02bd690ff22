"""JSON lines between ``measure.py`` and a worker.

A worker sends one line of facts when its models are loaded. It then answers every line of standard input with one line:
the seconds and new tokens of the call, or its error. Answers have a pipe of their own, because libraries print.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]  # "ids": prompts of equal length; "new_tokens"; the options of a contestant
NewTokens = list[list[int]]  # [batch, new_tokens]

ANSWERS_FD = "HF_SLOSPEC_PEERS_ANSWERS_FD"  # environment variable: number of the pipe's file descriptor


def serve(generate: Callable[[Request], NewTokens], **facts: Any) -> None:
    """Send the facts, then answer requests until standard input ends."""
    answers = os.fdopen(int(os.environ[ANSWERS_FD]), "w", buffering=1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    send(facts)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            begun_s = time.perf_counter()
            tokens = generate(request)
            send({"seconds": time.perf_counter() - begun_s, "tokens": tokens})
        except Exception as error:  # noqa: BLE001 (it is reported by name, and the other contestants continue)
            traceback.print_exc()
            send({"error": f"{type(error).__name__}: {error}"[:500]})
