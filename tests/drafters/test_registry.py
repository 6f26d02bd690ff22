"""Drafters and head formats of another distribution."""

from __future__ import annotations

import sys

import pytest

from hf_slospec import InvalidInputError, SLOSpecGenerator, load_drafter
from hf_slospec.drafters import registry
from hf_slospec.extras import load_entry_points
from tests.heads.checkpoints import mtp_tensors, target_of, write
from tests.support.paths import ROOT
from tests.support.toys.feature_heads import DRAFTS_ALWAYS
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts

DISTRIBUTION = ROOT / "tests" / "drafters" / "distribution"


@pytest.fixture
def installed(monkeypatch):
    """Install a distribution whose entry point registers the drafter "repeat" and a head format."""
    registry.named_drafters()  # loads those of this distribution
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.syspath_prepend(DISTRIBUTION)
    load_entry_points.cache_clear()
    monkeypatch.delitem(sys.modules, "other_drafters", raising=False)


@pytest.mark.usefixtures("installed")
def test_another_distribution_adds_a_drafter_and_a_head_format(tmp_path):
    target = target_of("llama")
    tensors = {f"other.{name}": tensor for name, tensor in mtp_tensors("llama").items()}
    head = write(tmp_path / "head", {}, tensors)
    for source, kind in (
        ("repeat", "repeated last token"),
        (head, "MTP layer"),
        (f"repeat+{head}", "repeated last token + MTP layer"),
    ):
        method = load_drafter(source, target)
        assert method.kind == kind
        ours = SLOSpecGenerator(target, drafter=method, config=DRAFTS_ALWAYS)
        out = assert_same_as_stock(
            target, ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=8
        )
        assert sum(metrics.drafted for metrics in out.slo) > 0
    with pytest.raises(InvalidInputError, match="by name are lookup, suffix, mtp, repeat"):
        load_drafter("repaet", target)


def test_names_are_taken_once():
    with pytest.raises(InvalidInputError, match="a NamedDrafter 'lookup' already"):
        registry.register(registry.NamedDrafter("lookup", lambda target, past: None))  # type: ignore[arg-type,return-value]
