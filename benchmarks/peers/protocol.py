"""JSON lines between ``measure.py`` and a worker.

A worker sends one line of facts when its models are loaded. It then answers every line of standard
input with one line: the seconds and new tokens of the call, or its error. Answers have a pipe of
their own, because libraries print."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Request = dict[str, Any]  # "ids": prompts; "new_tokens"; the options of a contestant
NewTokens = list[
    list[int]
]  # per row, up to new_tokens; what follows the first end is cut off by the reader

ANSWERS_FD = (
    "HF_SLOSPEC_PEERS_ANSWERS_FD"  # environment variable: number of the pipe's file descriptor
)


@dataclass(frozen=True)
class Settings:
    """What all workers of a measurement have in common."""

    folder: Path  # environments and builds
    models: Path
    threads: int
    isa: str
    context: int  # tokens of the longest prompt and its answer
    ends: list[int]  # tokens that end a text; empty: every row gets its full length

    @classmethod
    def read(cls) -> tuple[Settings, list[str]]:
        """Return the settings of the command line, and the arguments after them."""
        found = json.loads(sys.argv[1])
        return cls(**found | {name: Path(found[name]) for name in ("folder", "models")}), sys.argv[
            2:
        ]

    def written(self) -> str:
        """Return the argument that ``read`` reads."""
        return json.dumps(vars(self), default=str)


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
