"""What an enabled model or a generator made is freed with the last reference to it, not by a later
collection.
"""

from __future__ import annotations

import gc
import weakref

import pytest

import hf_slospec
from hf_slospec import SLOSpecGenerator
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy


@pytest.fixture
def target():
    model = tiny_copy("llama")
    gc.collect()
    gc.disable()
    yield model
    gc.enable()


def parts_of(decoder):
    speculator = decoder.speculator
    packed = speculator.target.packed
    parts = {"decoder": decoder, "speculator": speculator, "packed": packed}
    names = "version", "overrides", "eager"
    parts |= {"target": speculator.target, "history": speculator.history} | {
        n: getattr(packed, n) for n in names
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


def enabled_and_disabled(target, draft):
    parts = parts_of(hf_slospec.enable(target, draft).generate.decoder)
    target.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=1.0)
    hf_slospec.disable(target)
    return parts


def enabled_twice(target, draft):
    parts = parts_of(hf_slospec.enable(target, draft).generate.decoder)
    hf_slospec.enable(target)
    return parts


def generator(target, draft):
    made = SLOSpecGenerator(target, draft)
    made.generate(**ragged_prompts(1), **OPTIONS)
    return parts_of(made.decoder)


@pytest.mark.parametrize("use", [enabled_and_disabled, enabled_twice, generator])
@pytest.mark.parametrize("has_draft", [False, True])
def test_nothing_is_left_without_a_collection(target, use, has_draft):
    draft = tiny_copy("llama", noise=0.03) if has_draft else None
    parts = use(target, draft)
    assert [name for name, part in parts.items() if part() is not None] == []
