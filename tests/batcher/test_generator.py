"""Generators from saved models."""

from __future__ import annotations

import pytest

import hf_slospec
from hf_slospec import InvalidInputError, SLOSpecGenerator
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import assert_same_as_stock


def test_from_pretrained_reads_folders(tmp_path):
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    for name, part in (("target", target), ("draft", draft)):
        part.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    generator = SLOSpecGenerator.from_pretrained(
        str(tmp_path / "target"),
        assistant_model=str(tmp_path / "draft"),
        dtype="auto",
        device_map="auto",
    )
    inputs = generator.tokenizer(["import os\n"], return_tensors="pt")
    assert_same_as_stock(generator.model, generator.generate, dict(inputs), **OPTIONS)


def test_from_pretrained_refuses_two_ways_to_draft_before_it_loads():
    with pytest.raises(InvalidInputError, match="give one of them"):
        SLOSpecGenerator.from_pretrained("./nowhere", "./nowhere", drafter="lookup")
