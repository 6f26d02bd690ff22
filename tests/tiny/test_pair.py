"""The shipped pair: size, licence notes, and acceptance as stated on its card."""

from __future__ import annotations

import json

import pytest
import torch

from hf_slospec import load_tiny_pair, tiny_prompts
from hf_slospec.tiny.embedded import FOLDER

FACTS = json.loads((FOLDER / "training.json").read_text())


def test_shipped_files_are_small_and_described():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 25e6
    card = (FOLDER / "README.md").read_text()
    for word in ("PSF", "Held out", "Acceptance length", f"{FACTS['target']['held_out_loss']:.3f}"):
        assert word in card


def test_draft_is_a_tenth_of_the_target():
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    assert 5e6 <= target.num_parameters() <= 10e6
    assert draft.num_parameters() <= target.num_parameters() / 10
    assert target.dtype == draft.dtype == torch.bfloat16
    assert len(tokenizer) == target.config.vocab_size == draft.config.vocab_size


def test_tokenizer_round_trips_code():
    tokenizer = load_tiny_pair()[2]
    for prompt in tiny_prompts():
        assert tokenizer.decode(tokenizer(prompt)["input_ids"]) == prompt


def test_target_knows_the_held_out_modules_as_its_card_says():
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    losses = []
    for model in (target, draft):
        with torch.no_grad():
            rows = [
                tokenizer(prompt, return_tensors="pt")["input_ids"]
                for prompt in tiny_prompts()[:16]
            ]
            losses.append(sum(float(model(row, labels=row).loss) for row in rows) / len(rows))
    assert losses[0] == pytest.approx(
        FACTS["target"]["held_out_loss"], abs=1.0
    )  # short contexts cost up to a nat
    assert losses[0] < losses[1] < 6.0  # a random model is at log(2048) = 7.6
