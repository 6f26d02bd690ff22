"""Memory of drafters: what is counted, and what is freed first when it runs short."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import SLOSpecGenerator
from hf_slospec.drafters.features import FeatureDrafter, WaitingFeatures
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.generate.speculator import Speculator
from hf_slospec.model.packed_model import PackedModel
from tests.heads.checkpoints import target_of
from tests.support.breadth import nightly_but
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, random_head
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model

OPTIONS = dict(do_sample=False, max_new_tokens=24)


def with_head(kind):
    return lambda folder: SLOSpecGenerator(
        target_of("llama"), drafter=HeadMethod(random_head(kind, folder)), config=DRAFTS_ALWAYS
    )


MAKES = {
    "eagle3": with_head("eagle3"),
    "dflash": with_head("dflash"),
    "assistant": lambda folder: SLOSpecGenerator(
        tiny_model("llama"), tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS
    ),
}


class Shortage:
    """Fails chosen forwards, and records whether each was one of the drafter's."""

    def __init__(self, generator, monkeypatch):
        # "draft" or "verify"
        self.target = generator.model
        self.forwards = []
        self.fails = lambda kind, count: False
        self.num_failed = 0
        self._run = PackedModel.outputs
        self.drafter = None
        new_drafter = Speculator.new_drafter

        def made(speculator, *arguments, **options):
            self.drafter = new_drafter(speculator, *arguments, **options)
            return self.drafter

        _ = generator.decoder.speculator.costs  # measured before
        monkeypatch.setattr(Speculator, "new_drafter", made)
        monkeypatch.setattr(
            PackedModel, "outputs", lambda packed, *arguments: self._forward(packed, *arguments)
        )

    def _forward(self, packed, *arguments):
        kind = "verify" if packed.model is self.target else "draft"
        self.forwards.append(kind)
        if self.fails(kind, self.forwards.count(kind)):
            self.num_failed += 1
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return self._run(packed, *arguments)


def served(generator, prompts, **options):
    with generator:
        handles = [generator.submit(prompt, **OPTIONS | options) for prompt in prompts]
        return [handle.result(60).token_ids for handle in handles]


def prompts_of(num_prompts):
    return torch.randint(
        3, VOCAB, (num_prompts, 20), generator=torch.Generator().manual_seed(0)
    ).tolist()


def expected_of(model, prompts):
    return [
        model.generate(torch.tensor([prompt]), **OPTIONS)[0, 20:].tolist() for prompt in prompts
    ]


@pytest.mark.parametrize("kind", ["draft", "verify"])
@pytest.mark.parametrize("make", nightly_but(("eagle3", "assistant"), MAKES))
def test_drafters_give_way_in_generate(make, kind, tmp_path, monkeypatch):
    """Drafting pauses, comes back, and fails again: output stays the same."""
    monkeypatch.setattr("hf_slospec.engine.step.PAUSE", 4)
    generator = MAKES[make](tmp_path)
    shortage = Shortage(generator, monkeypatch)
    shortage.fails = lambda own, count: own == kind and count in (5, 12)
    out = assert_same_as_stock(generator.model, generator.generate, ragged_prompts(3), **OPTIONS)
    assert shortage.num_failed == 2
    decoding = [step for step in out.steps if step.num_decoding]
    has_drafted = [bool(step.num_drafted_for) for step in decoding]
    begin = has_drafted.index(False)
    assert (
        has_drafted[begin : begin + 3] == [False] * 3
        and True in has_drafted[:begin]
        and True in has_drafted[begin:]
    )


@pytest.mark.parametrize("make", nightly_but(("eagle3", "assistant"), MAKES))
def test_a_drafter_without_any_room_is_not_needed(make, tmp_path, monkeypatch):
    """Every forward of the drafter fails, the first one as well."""
    monkeypatch.setattr("hf_slospec.engine.step.PAUSE", 4)
    generator = MAKES[make](tmp_path)
    prompts = prompts_of(3)
    shortage = Shortage(generator, monkeypatch)
    shortage.fails = lambda kind, count: kind == "draft"
    assert_same_as_stock(generator.model, generator.generate, ragged_prompts(2), **OPTIONS)
    assert served(generator, prompts) == expected_of(generator.model, prompts)
    assert shortage.num_failed > 3


@pytest.mark.parametrize("make", ["eagle3", "assistant"])
def test_no_kv_can_be_reserved_for_the_drafter(make, tmp_path, monkeypatch):
    generator = MAKES[make](tmp_path)
    shortage = Shortage(generator, monkeypatch)

    def full(*_):
        raise MemoryError("full")

    new_drafter = Speculator.new_drafter

    def made(speculator, *arguments, **options):
        drafter = new_drafter(speculator, *arguments, **options)
        drafter.sequences.reserve = full
        return drafter

    monkeypatch.setattr(Speculator, "new_drafter", made)
    assert_same_as_stock(generator.model, generator.generate, ragged_prompts(2), **OPTIONS)
    prompts = prompts_of(2)
    assert served(generator, prompts) == expected_of(generator.model, prompts)
    assert "draft" not in shortage.forwards


@pytest.mark.parametrize("make", ["eagle3", "assistant"])
def test_memory_that_stays_short_ends_the_call(make, tmp_path, monkeypatch):
    generator = MAKES[make](tmp_path)
    shortage = Shortage(generator, monkeypatch)
    shortage.fails = lambda kind, count: kind == "verify" and count > 4
    with pytest.raises(MemoryError):
        generator.generate(**ragged_prompts(2), **OPTIONS)
    assert shortage.num_failed < 5
    with generator:
        handle = generator.submit(prompts_of(1)[0], **OPTIONS)
        with pytest.raises(MemoryError):
            handle.result(60)
    shortage.fails = lambda kind, count: False
    assert_same_as_stock(generator.model, generator.generate, ragged_prompts(2), **OPTIONS)


@pytest.mark.parametrize("make", nightly_but(("eagle3", "assistant"), MAKES))
def test_the_batcher_frees_the_drafter_before_it_preempts(make, tmp_path, monkeypatch):
    generator = MAKES[make](tmp_path)
    prompts = prompts_of(3)
    expected = expected_of(generator.model, prompts)
    shortage = Shortage(generator, monkeypatch)
    shortage.fails = lambda kind, count: kind == "verify" and count == 6
    assert served(generator, prompts) == expected
    assert shortage.num_failed == 1 and generator.stats().preempted == 0


def test_features_that_find_no_memory_are_missing_and_nothing_else(tmp_path, monkeypatch):
    generator = MAKES["eagle3"](tmp_path)
    prompts = prompts_of(2)
    num_calls = 0
    expected = expected_of(generator.model, prompts)
    add = WaitingFeatures.add

    def fails_at_times(queue, *arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 5):
            raise torch.OutOfMemoryError("CUDA out of memory")
        add(queue, *arguments)

    monkeypatch.setattr(WaitingFeatures, "add", fails_at_times)
    assert served(generator, prompts) == expected
    assert num_calls > 5


def test_features_and_kv_are_counted(tmp_path, monkeypatch):
    generator = MAKES["eagle3"](tmp_path)
    found = []
    draft = FeatureDrafter.draft

    def counted(drafter, requests, plan):
        before = generator.stats().memory
        assert before is not None
        trees = draft(drafter, requests, plan)
        after = generator.stats().memory
        assert after is not None
        found.append((before.features, after.features, after.draft_kv))
        return trees

    monkeypatch.setattr(FeatureDrafter, "draft", counted)
    served(generator, prompts_of(1))
    a_token = 3 * 32 * 4
    assert found[0][0] == 20 * a_token  # the prompt's
    assert all(after == a_token and draft_kv > 0 for _, after, draft_kv in found)  # the last one


def test_features_that_wait_do_not_keep_those_of_a_whole_step():
    waiting = WaitingFeatures()
    step = torch.zeros(600, 8)
    for index in range(3):
        waiting.add(index, step[index : index + 1])
    held = sum(part.untyped_storage().nbytes() for part in waiting.parts)
    assert held == waiting.num_bytes == 3 * 8 * 4
