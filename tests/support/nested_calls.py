"""Callbacks of the user's own that call a function with the tokens so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import BaseStreamer

Run = Callable[[torch.Tensor], Any]  # input_ids [num_rows, length] -> what is recorded


class CallingProcessor(LogitsProcessor):
    """Changes no score."""

    per_row = True

    def __init__(self, run):
        self.run = run
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(self.run(input_ids))
        return scores


class CallingCriterion(StoppingCriteria):
    """Stops nothing."""

    per_row = True

    def __init__(self, run):
        self.run = run
        self.seen = []

    def __call__(self, input_ids, scores, **_):
        self.seen.append(self.run(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool)


class CallingStreamer(BaseStreamer):
    def __init__(self, run):
        self.run = run
        self.seen = []
        self.ended = threading.Event()
        self.input_ids = None

    def put(self, value):
        self.input_ids = (
            value if self.input_ids is None else torch.cat((self.input_ids, value[:, None]), dim=1)
        )
        self.seen.append(self.run(self.input_ids))

    def end(self):
        self.ended.set()


class CallingPrefix:
    """Allows all tokens."""

    def __init__(self, run):
        self.run = run
        self.seen = []

    def __call__(self, row, input_ids):
        self.seen.append(self.run(input_ids[None]))
        return list(range(101))


def calling(kind, run):
    """A callback of this kind, and the argument of ``generate`` that passes it."""
    if kind == "processor":
        processor = CallingProcessor(run)
        return processor, dict(logits_processor=[processor])
    if kind == "criterion":
        criterion = CallingCriterion(run)
        return criterion, dict(stopping_criteria=[criterion])
    if kind == "streamer":
        streamer = CallingStreamer(run)
        return streamer, dict(streamer=streamer)
    prefix = CallingPrefix(run)
    return prefix, dict(prefix_allowed_tokens_fn=prefix)


KINDS = ("processor", "criterion", "prefix", "streamer")
