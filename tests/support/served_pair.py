"""The embedded pair behind ``submit``, and stock ``generate`` beside it."""

from __future__ import annotations

from typing import Any

import torch

from hf_slospec import (
    SLOSpecConfig,
    tiny_prompts,
)

WAIT_S = 120.0
CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=20_000)
PROMPTS = tiny_prompts()[:10]


def alone(pair: tuple[Any, Any, Any], prompt: str, seed: int | None = None, **options: Any) -> list[int]:
    """What stock ``generate`` gives."""
    target, _, tokenizer = pair
    inputs = tokenizer(prompt, return_tensors="pt")
    if seed is not None:
        torch.manual_seed(seed)
    out = target.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], tokenizer=tokenizer, **options
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


class Fails:
    def __init__(self, after: int):
        self.after, self.calls = after, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise ZeroDivisionError("of the user's own")
        return _[1] if isinstance(_[1], torch.Tensor) else torch.zeros(len(_[0]), dtype=torch.bool)
