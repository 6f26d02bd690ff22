"""The embedded pair behind ``submit``, and stock ``generate`` beside it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import StoppingCriteria

from hf_slospec import (
    SLOSpecConfig,
    tiny_prompts,
)

WAIT_S = 120.0
CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=20_000)
PROMPTS = tiny_prompts()[:10]


def answer(model: Any, ids: Any, seed: int | None = None, **options: Any) -> list[int]:
    """Return the new tokens of stock ``generate`` for one prompt of token ids."""
    rows = (ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids)))[None]
    if seed is not None:
        torch.manual_seed(seed)
    new: list[int] = model.generate(rows, attention_mask=torch.ones_like(rows), **options)[
        0, rows.shape[1] :
    ].tolist()
    return new


def alone(
    pair: tuple[Any, Any, Any], prompt: str, seed: int | None = None, **options: Any
) -> list[int]:
    target, _, tokenizer = pair
    return answer(target, tokenizer(prompt)["input_ids"], seed, tokenizer=tokenizer, **options)


class Holds(StoppingCriteria):
    """Criterion that holds the batcher in the first step that writes a token of its request, until
    it is let go.
    """

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
        self.is_reached.set()
        assert self.may_go.wait(WAIT_S)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def __enter__(self) -> Holds:
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go.set()


class Fails:
    def __init__(self, after: int):
        self.after = after
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise ZeroDivisionError("of the user's own")
        return _[1] if isinstance(_[1], torch.Tensor) else torch.zeros(len(_[0]), dtype=torch.bool)
