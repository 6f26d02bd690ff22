"""The embedded pair behind ``submit``, and stock ``generate`` beside it."""

from __future__ import annotations

import threading

import torch
from transformers import StoppingCriteria

from hf_slospec import (
    SLOSpecConfig,
    tiny_prompts,
)

WAIT_S = 120.0
CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=20_000)
PROMPTS = tiny_prompts()[:10]


def answer(model, ids, seed=None, **options):
    """Return the new tokens of stock ``generate`` for one prompt of token ids."""
    rows = (ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids)))[None]
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(rows, attention_mask=torch.ones_like(rows), **options)[
        0, rows.shape[1] :
    ].tolist()


def written(generator, prompt, **options):
    """Return the new tokens of a submitted request."""
    return generator.submit(prompt, **options).result(WAIT_S).token_ids


def alone(pair, prompt, seed=None, **options):
    target, _, tokenizer = pair
    return answer(target, tokenizer(prompt)["input_ids"], seed, tokenizer=tokenizer, **options)


class Holds(StoppingCriteria):
    """Criterion that holds the batcher in the first step that writes a token of its request, until
    it is let go.
    """

    def __init__(self):
        self.is_reached = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, input_ids, *_, **__):
        self.is_reached.set()
        assert self.may_go.wait(WAIT_S)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.may_go.set()


class Fails:
    def __init__(self, after):
        self.after = after
        self.calls = 0

    def __call__(self, *_, **__):
        self.calls += 1
        if self.calls > self.after:
            raise ZeroDivisionError("of the user's own")
        return _[1] if isinstance(_[1], torch.Tensor) else torch.zeros(len(_[0]), dtype=torch.bool)
