"""Options of models: which drafter they mean."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hf_slospec import MissingExtraError, SLOSpecConfig
from hf_slospec.models.drafters.methods import AssistantMethod, HybridMethod, SuffixMethod
from hf_slospec.serving.loading import ModelOptions
from hf_slospec.tiny.embedded import FOLDER

KINDS = {
    None: "assistant model",
    "assistant": "assistant model",
    "lookup": "prompt lookup",
    "mtp": "MTP layer",
    "lookup+mtp": "prompt lookup + MTP layer",
    "suffix+assistant": "suffix trees + assistant model",
}


@pytest.mark.parametrize("drafter", KINDS)
def test_names_mean_those_of_the_embedded_target(drafter: str | None) -> None:
    options = ModelOptions(drafter=drafter, dtype="float32")
    pair = options.load()
    method: Any = options.method(pair)
    assert method.kind == KINDS[drafter]
    assert not isinstance(method, AssistantMethod) or method.assistant is pair.draft


def test_a_target_alone_is_drafted_for_by_its_own_text() -> None:
    folder = str(FOLDER / "target")
    assert ModelOptions(folder).parts == ["lookup"] and ModelOptions(folder, "org/draft").parts == ["assistant"]
    assert ModelOptions(folder).name == "target" and ModelOptions("org/name").name == "org/name"
    assert ModelOptions().parts == ["assistant"]


def test_texts_are_shared_only_on_demand() -> None:
    for shares in (False, True):
        options = ModelOptions(drafter="suffix+lookup", dtype="float32", share_texts=shares)
        method: Any = options.method(options.load())
        assert isinstance(method, HybridMethod) and isinstance(method.methods[0], SuffixMethod)
        assert method.methods[0]._drafter.shares_texts is shares


def test_a_head_of_an_inflated_target() -> None:
    generator = ModelOptions(drafter="mtp", size="0.1B", dtype="float32").generator(SLOSpecConfig(), "{{ messages }}")
    assert generator.decoder.speculator.method.kind == "MTP layer"
    assert generator.tokenizer is not None and generator.tokenizer.chat_template == "{{ messages }}"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    options = ModelOptions(drafter="suffix", dtype="float32")
    with pytest.raises(MissingExtraError, match="the drafter suffix needs arctic_inference; install with: pip"):
        options.method(options.load())
