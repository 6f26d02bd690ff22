"""A drafter of the user's own, behind the small protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_slospec import (
    Drafter,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecGenerator,
    TokenTree,
    disable,
    enable,
)
from tests.support.fixed_policy import FIXED
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model


class Parrot:
    """Expects the text to go on as it did after the last two tokens of its prompt, and remembers
    what it was told.
    """

    def __init__(self, texts=()):
        self.texts = texts
        self.released = 0

    def draft(self, requests, plan):
        return [
            TokenTree.chain(r.tokens[-1], self.guess(r.tokens)[: plan.depth], conditional=0.8)
            for r in requests
        ]

    def guess(self, tokens):
        for text in self.texts:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) :])
        return [tokens[-2], tokens[-1]] * 4

    def release(self, request):
        self.released += 1


def test_own_drafter():
    model, inputs, options = (
        tiny_model("llama"),
        ragged_prompts(3),
        dict(do_sample=False, max_new_tokens=24),
    )
    texts = [
        row[mask == 1].tolist() + new.tolist()
        for row, mask, new in zip(
            inputs["input_ids"], inputs["attention_mask"],
            model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :], strict=True,
        )
    ]  # fmt: skip
    parrot: Drafter = Parrot(texts)
    ours = SLOSpecGenerator(model, drafter=parrot, config=SLOSpecConfig(**FIXED))
    out = assert_same_as_stock(model, ours.generate, inputs, **options)
    assert all(metrics.accepted >= 12 for metrics in out.slo if metrics.tokens == 24)
    assert parrot.released == 3
    assert_same_as_stock(model, ours.generate, inputs, do_sample=True, max_new_tokens=24)
    enable(model, drafter=parrot)
    try:
        assert_same_as_stock(
            model, lambda **k: model.generate(**k, slo_tpot=0.1), inputs, **options
        )
    finally:
        disable(model)


ROOT = TokenTree.root_only
BROKEN: dict[str, Any] = {
    "NoneType; it must": lambda r, plan: None,
    "2 trees for 1": lambda r, plan: [ROOT(r.tokens[-1])] * 2,
    "root is not": lambda r, plan: [ROOT(r.tokens[-1] + 1)],
    "outside 0": lambda r, plan: [TokenTree.chain(r.tokens[-1], [101], 0.5)],
    "for a plan of depth": lambda r, plan: [
        TokenTree.chain(r.tokens[-1], [5] * (plan.depth + 1), 0.5)
    ],
    "parent": lambda r, plan: [
        replace(TokenTree.chain(r.tokens[-1], [5, 6], 0.5), parents=np.array([-1, 2, 0]))
    ],
    "path probabilities": lambda r, plan: [TokenTree.chain(r.tokens[-1], [5, 6], 1.5)],
}


@pytest.mark.parametrize("why", BROKEN)
def test_what_is_wrong_with_a_drafters_trees_is_said(why):
    class Broken(Parrot):
        def draft(self, requests, plan):
            return BROKEN[why](requests[0], plan)

    ours = SLOSpecGenerator(tiny_model("llama"), drafter=Broken(), config=SLOSpecConfig(**FIXED))
    with pytest.raises(InvalidInputError, match=f"drafter .*{why}"):
        ours.generate(**ragged_prompts(1), max_new_tokens=9)


def test_one_way_to_draft_at_a_time():
    with pytest.raises(InvalidInputError, match="assistant_model and drafter"):
        SLOSpecGenerator(tiny_model("llama"), tiny_model("llama"), drafter=Parrot())
    with pytest.raises(InvalidTypeError, match="release"):
        SLOSpecGenerator(tiny_model("llama"), drafter=type("Half", (), {"draft": Parrot.draft})())


def test_a_drafter_may_draw_from_the_global_generator():
    class Dice(Parrot):
        def guess(self, tokens):
            return torch.randint(3, 101, (4,)).tolist()

    ours = SLOSpecGenerator(tiny_model("llama"), drafter=Dice())
    for do_sample in (False, True):
        assert_same_as_stock(
            ours.model, ours.generate, ragged_prompts(2), do_sample=do_sample, max_new_tokens=24
        )
