"""Drafters that read hidden states of the target: the output is stock's, whatever they propose."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    disable,
    enable,
    load_drafter,
    load_tiny_drafter,
    load_tiny_pair,
)
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.model.packed_model import PackedModel
from tests.heads.checkpoints import target_of
from tests.support.breadth import nightly_but, quick_or
from tests.support.served_pair import PROMPTS, WAIT_S, Holds, alone
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, FOLDERS, random_head
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts

NEW_TOKENS = quick_or(10, 16)
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=NEW_TOKENS, output_scores=True)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=30, max_new_tokens=NEW_TOKENS)
PROCESSED: dict[str, Any] = SAMPLED | dict(
    repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=5
)
TRAINED = SLOSpecConfig(
    policy="adaserve",
    check_invariants=True,
    token_budget=40,
    max_depth=quick_or(2, 4),
    kv_tokens=20_000,
)


@pytest.mark.parametrize("kind", list(FOLDERS))
def test_random_heads(kind: str, tmp_path: Path) -> None:
    target = target_of("llama")
    ours = SLOSpecGenerator(
        target, drafter=HeadMethod(random_head(kind, tmp_path)), config=DRAFTS_ALWAYS
    )
    for batch, options in ((1, GREEDY), (3, SAMPLED), (2, PROCESSED), *quick_or([], [(3, GREEDY)])):
        out = assert_same_as_stock(target, ours.generate, ragged_prompts(batch), **options)
        assert all(metrics.drafted for metrics in out.slo)
    for num_tokens in (1, 2):
        assert_same_as_stock(
            target, ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=num_tokens
        )
    for coupled in (dict(num_return_sequences=2, do_sample=True), dict(do_sample=False)):
        inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])}
        assert_same_as_stock(target, ours.generate, inputs, max_new_tokens=12, **coupled)
    embeds = target.get_input_embeddings()(torch.randint(3, 99, (2, 9))).detach()
    expected: Any = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=9)  # type: ignore[operator]
    assert torch.equal(
        ours.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=9), expected
    )


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, Any]:
    target, _, tokenizer = load_tiny_pair()
    return target, load_tiny_drafter("mtp", target), tokenizer


def inputs_of(tokenizer: Any, num_prompts: int = 3) -> dict[str, torch.Tensor]:
    return dict(
        tokenizer(PROMPTS[:num_prompts], return_tensors="pt", padding=True, padding_side="left")
    )


@pytest.mark.parametrize("policy", nightly_but(["adaserve"], ["adaserve", "sequoia"]))
def test_trained_layer_with_policies(policy: Any, trained: tuple[Any, Any, Any]) -> None:
    target, method, tokenizer = trained
    ours = SLOSpecGenerator(
        target, drafter=method, config=TRAINED.model_copy(update={"policy": policy})
    )
    for options in quick_or((SAMPLED,), (GREEDY, SAMPLED)):
        out = assert_same_as_stock(target, ours.generate, inputs_of(tokenizer), **options)
    if (
        policy == "adaserve"
    ):  # sequoia drafts nothing when the times measured here say that plain decoding is faster
        assert sum(metrics.accepted for metrics in out.slo) > 0


def test_trained_layer_is_accepted(trained: tuple[Any, Any, Any]) -> None:
    target, method, tokenizer = trained
    ours = SLOSpecGenerator(target, drafter=method, config=TRAINED)
    out = assert_same_as_stock(
        target, ours.generate, inputs_of(tokenizer), do_sample=False, max_new_tokens=48
    )
    steps = sum(metrics.tokens - metrics.accepted for metrics in out.slo)
    assert sum(metrics.tokens for metrics in out.slo) / steps > 2.0


@pytest.mark.parametrize("source", nightly_but(["suffix"], ["lookup", "suffix"]))
def test_trained_layer_behind_cheap_drafters(source: str, trained: tuple[Any, Any, Any]) -> None:
    target, method, tokenizer = trained
    ours = SLOSpecGenerator(target, drafter=load_drafter([source, method], target), config=TRAINED)
    for options in quick_or((SAMPLED,), (GREEDY, SAMPLED)):
        out = assert_same_as_stock(target, ours.generate, inputs_of(tokenizer), **options)
        assert sum(metrics.accepted for metrics in out.slo) > 0


def test_batcher_with_preemption_cancelling_and_resuming(trained: tuple[Any, Any, Any]) -> None:
    target, method, tokenizer = trained
    pair = target, None, tokenizer
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=24)
    expected = [alone(pair, prompt, **options) for prompt in PROMPTS[:5]]
    sampled = alone(pair, PROMPTS[5], seed=3, do_sample=True, max_new_tokens=24)
    config = TRAINED.model_copy(update={"max_batch": 2, "prefill_chunk": 16})
    with SLOSpecGenerator(target, drafter=method, tokenizer=tokenizer, config=config) as generator:
        with Holds() as holds:
            spare = [
                generator.submit(prompt, stopping_criteria=[holds], **options)
                for prompt in PROMPTS[:2]
            ]
            assert holds.is_reached.wait(WAIT_S)
            urgent = [
                generator.submit(prompt, slo_tpot=10.0, slo_ttft=100.0, **options)
                for prompt in PROMPTS[2:4]
            ]
        ours = generator.generate(**inputs_of(tokenizer), **options)  # between the batcher's steps
        assert torch.equal(ours, target.generate(**inputs_of(tokenizer), **options))
        assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == expected[:4]
        assert sum(handle.metrics.preempted for handle in spare) > 0
        broken_off = generator.submit(PROMPTS[4], **options)
        next(broken_off.tokens())
        broken_off.cancel()
        resumed = generator.submit(PROMPTS[4], resume=broken_off.progress, **options)
        drawn = generator.submit(PROMPTS[5], seed=3, do_sample=True, max_new_tokens=24)
        assert resumed.result(WAIT_S).token_ids == expected[4]
        assert drawn.result(WAIT_S).token_ids == sampled
        assert generator.stats().memory.draft_kv > 0


def test_one_drafter_in_several_threads_and_generators(trained: tuple[Any, Any, Any]) -> None:
    target, method, tokenizer = trained
    inputs = inputs_of(tokenizer)
    options = dict(do_sample=False, max_new_tokens=16)
    expected = target.generate(**inputs, **options)
    same = list[bool]()
    first, second = (SLOSpecGenerator(target, drafter=method, config=TRAINED) for _ in range(2))

    def run(generator: SLOSpecGenerator) -> None:
        for _ in range(1):
            same.append(torch.equal(generator.generate(**inputs, **options), expected))
            generator.stats()

    threads = [
        threading.Thread(target=run, args=(generator,)) for generator in (first, first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 3


def test_copies_and_changed_weights(tmp_path: Path) -> None:
    target = copy.deepcopy(target_of("llama"))
    ours = HeadMethod(random_head("mtp", tmp_path, target))
    enable(target, drafter=ours, config=DRAFTS_ALWAYS)
    try:
        inputs = ragged_prompts(2)
        options = dict(do_sample=False, max_new_tokens=10)
        assert_same_as_stock(
            target, lambda **given: target.generate(**given, slo_tpot=0.1), inputs, **options
        )
        other = copy.deepcopy(target)
        assert torch.equal(
            other.generate(**inputs, **options), target.generate(**inputs, **options)
        )
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.mul_(1.1)
        assert_same_as_stock(
            target, lambda **given: target.generate(**given, slo_tpot=0.1), inputs, **options
        )
    finally:
        disable(target)


def test_an_interrupted_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("llama")
    ours = SLOSpecGenerator(
        target, drafter=HeadMethod(random_head("eagle3", tmp_path)), config=DRAFTS_ALWAYS
    )
    run = PackedModel.outputs
    calls = list[Any]()

    def interrupted(self: PackedModel, *arguments: Any) -> Any:
        calls.append(self.model)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return run(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PackedModel, "outputs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.generate(**ragged_prompts(2), do_sample=False, max_new_tokens=20)
    memory = ours.decoder.speculator.memory(0)
    assert (memory.target_kv, memory.draft_kv, memory.features) == (0, 0, 0)
    assert_same_as_stock(target, ours.generate, ragged_prompts(2), **GREEDY)
