"""Published checkpoints, which `make checkpoints` brings, and stock ``generate`` on them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_slospec.cli.benchmark import encoded
from scripts.checkpoints import COMPLETE
from scripts.checkpoints import FOLDER as CHECKPOINTS
from tests.support.paths import ROOT

QUESTIONS = ROOT / "benchmarks" / "data" / "spec_bench.jsonl"
REQUIRED = "REQUIRE_CHECKPOINTS" in os.environ
WAIT_S = 900.0  # CI brings the checkpoints while other tests run


class Real(NamedTuple):
    """A checkpoint that somebody published."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encoded(self, texts, max_tokens=200):
        """Encode texts as a left-padded batch; chat models get them as a user's messages."""
        if self.tokenizer.chat_template is not None:
            texts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        is_plain = self.tokenizer.chat_template is None  # templates write special tokens themselves
        return encoded(
            self.tokenizer, texts, max_tokens, self.model.device, add_special_tokens=is_plain
        )


def load(name, dtype=torch.float32):
    """Load a checkpoint, or skip the tests of it."""
    folder = CHECKPOINTS / name
    ends = time.monotonic() + (WAIT_S if REQUIRED else 0.0)
    while not (folder / COMPLETE).exists():
        if time.monotonic() >= ends:
            assert not REQUIRED, f"{folder} is required; run: make checkpoints"
            pytest.skip(f"no {folder}: make checkpoints brings it")
        time.sleep(1.0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return Real(folder, model.requires_grad_(False), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="session")
def smollm2():
    return load("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gemma3():
    return load("gemma-3-270m")


@pytest.fixture(scope="session")
def questions():
    """First turns of Spec-Bench's questions by category."""
    by_category: dict[str, list[str]] = {}
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    return by_category


@pytest.fixture(scope="module")
def stock():
    """Stock ``generate``; what it was asked before in this module is not computed again."""
    computed: dict[str, torch.Tensor] = {}

    def generate(real, inputs, **options):
        key = repr((real.folder, {name: ids.tolist() for name, ids in inputs.items()}, options))
        if key not in computed:
            torch.manual_seed(7)
            computed[key] = type(real.model).generate(real.model, **inputs, **options)
        return computed[key]

    return generate
