"""Trees of drafters that read features against brute force, by plain forwards of the target and of
the head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_slospec import SLOSpecGenerator
from hf_slospec.drafters import features as features_module
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.model.properties import cache_option
from hf_slospec.model.target import PackedTarget
from tests.drafters.test_features import texts_of
from tests.heads.checkpoints import target_of
from tests.heads.published_blocks import best_products
from tests.support.breadth import nightly_but
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, Checks, Expected, random_head
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts

OPTIONS: dict[str, Any] = dict(do_sample=False, max_new_tokens=14)
BATCHED = DRAFTS_ALWAYS.model_copy(update=dict(max_batch=3, prefill_chunk=16))


@torch.no_grad()
def beam_of_head(head, tokens, features, first, plan):
    """Nodes of a beam search, level by level, each path by a forward of the whole text."""
    states = {(): head.combine(features)}  # by path, [num_tokens, hidden]
    beam = {(): 0.0}
    found = dict[tuple[int, ...], float]()
    for _ in range(plan.depth):
        following = dict[tuple[int, ...], float]()
        below = dict[tuple[int, ...], torch.Tensor]()
        for path, logprob in beam.items():
            embeds = head.embed_tokens(torch.tensor([*tokens[first + 1 :], *path]))
            positions = torch.arange(first, first + len(embeds))[None]
            inputs = torch.cat((embeds, states[path]), dim=-1)[None]
            out = head(inputs_embeds=inputs, position_ids=positions).logits[0, -1]
            best = out[: -head.hidden_size].log_softmax(-1).topk(plan.width)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                child = (*path, index if head.target_ids is None else int(head.target_ids[index]))
                following[child] = logprob + value
                below[child] = torch.cat((states[path], out[None, -head.hidden_size :]))
        beam = dict(sorted(following.items(), key=lambda item: -item[1])[: plan.width])
        states = {path: below[path] for path in beam}
        found |= beam
    return {path: float(torch.tensor(logprob).exp()) for path, logprob in found.items()}


@torch.no_grad()
def best_of_block(head, tokens, features, first, plan):
    """The most probable prefixes of a block's predictions, by forwards with a cache of
    transformers' own.
    """
    cache = DynamicCache()
    size = head.block_size
    head.cache_context(
        head.combine(features)[None], torch.arange(first, len(tokens) - 1)[None], cache
    )
    block = torch.tensor([[tokens[-1], *[head.mask_token_id] * (size - 1)]])
    mask = torch.zeros(1, 1, size, len(features) + size)
    positions = torch.arange(len(tokens) - 1, len(tokens) - 1 + size)[None]
    probs = (
        head(block, attention_mask=mask, position_ids=positions, cache=cache).logits[0].softmax(-1)
    )
    return best_products(probs[1:size], torch.arange(probs.shape[1]), plan)


class Setting:
    """A target, a drafter with a random head, and the checks of its trees."""

    def __init__(self, kind, folder):
        self.target = target_of("llama")
        self.head = random_head(kind, folder)
        self.method = HeadMethod(self.head)
        expected: Expected = partial(best_of_block if kind == "dflash" else beam_of_head, self.head)
        self.checks = Checks(self.target, expected)

    def generator(self, config=DRAFTS_ALWAYS):
        return SLOSpecGenerator(self.target, drafter=self.method, config=config)

    def text(self, prompt, num_tokens):
        """What stock generate gives for a prompt."""
        out: Any = self.target.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens
        )  # type: ignore[operator]
        return list(out[0].tolist())

    def run(self, batch=3):
        inputs = ragged_prompts(batch)
        self.checks.texts = texts_of(self.target, inputs, **OPTIONS)
        assert_same_as_stock(self.target, self.generator().generate, inputs, **OPTIONS)


@pytest.fixture(params=nightly_but(["eagle3"], ["eagle3", "dflash"]))
def setting(request, tmp_path):
    return Setting(request.param, tmp_path)


def prompts_of(num_prompts, num_tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_prompts, num_tokens), generator=draw).tolist()


@pytest.mark.parametrize("setting", ["eagle3", "mtp", "dflash"], indirect=True)
def test_trees_of_a_ragged_batch(setting, monkeypatch):
    with setting.checks.on(monkeypatch) as checks:
        setting.run()
    assert checks.num_checked > 9 and not checks.num_unready


@pytest.mark.parametrize("waiting", [features_module.MAX_WAITING, 3, 0])
def test_features_of_steps_without_drafting_wait(setting, waiting, monkeypatch):
    monkeypatch.setattr(features_module, "MAX_WAITING", waiting)
    setting.checks.skips = lambda call: call % 3 == 1
    with setting.checks.on(monkeypatch) as checks:
        setting.run()
    assert checks.num_checked > 5 and not checks.num_unready


def test_after_a_step_that_was_undone(setting, monkeypatch):
    """Verification runs out of memory and nothing is freed: the next step drafts for the same
    tokens.
    """
    verify = PackedTarget.verify
    failed = list[int]()

    def fails(*arguments):
        if setting.checks.num_calls in (2, 4) and setting.checks.num_calls not in failed:
            failed.append(setting.checks.num_calls)
            raise MemoryError
        return verify(*arguments)

    monkeypatch.setattr(PackedTarget, "verify", fails)
    monkeypatch.setattr(FeatureDrafter, "relieve", lambda drafter: True)
    monkeypatch.setattr("hf_slospec.engine.step.PAUSE", 0)
    with setting.checks.on(monkeypatch) as checks:
        setting.run()
    assert failed == [2, 4] and checks.num_checked > 9 and not checks.num_unready


def test_behind_a_cache_that_was_given(setting, monkeypatch):
    (prompt,) = prompts_of(1, 30)
    text = setting.text(prompt, 14)
    cache = DynamicCache(config=setting.target.config)
    with torch.no_grad():
        setting.target(torch.tensor([prompt[:20]]), **cache_option(cache))
    setting.checks.texts = [text]
    setting.checks.first = {0: 20}
    with setting.checks.on(monkeypatch) as checks:
        out = setting.generator().generate(torch.tensor([prompt]), **cache_option(cache), **OPTIONS)
    assert out[0].tolist() == text and checks.num_checked > 4


def test_turns_of_a_conversation_keep_the_whole_text(setting, monkeypatch):
    """The target recomputes the few tokens whose features the head lacks, turn after turn."""
    (prompt,) = prompts_of(1, 40)
    additions = prompts_of(3, 5, seed=1)
    with setting.checks.on(monkeypatch) as checks, setting.generator(BATCHED) as generator:
        for addition in additions:
            checks.texts = [setting.text(prompt, 14)]
            handle = generator.submit(prompt, **OPTIONS)
            assert prompt + handle.result(60).token_ids == checks.texts[0]
            prompt = checks.texts[0] + addition
    assert checks.num_checked > 9 and not checks.num_unready


def test_a_prompt_shared_with_a_running_request(setting, monkeypatch):
    (shared,) = prompts_of(1, 32)
    ends = prompts_of(3, 6, seed=1)
    prompts = [shared + end for end in ends]
    texts = setting.checks.texts = [setting.text(prompt, 20) for prompt in prompts]
    with setting.checks.on(monkeypatch) as checks, setting.generator(BATCHED) as generator:
        first = generator.submit(prompts[0], do_sample=False, max_new_tokens=20)
        next(first.tokens())
        others = [
            generator.submit(prompt, do_sample=False, max_new_tokens=20) for prompt in prompts[1:]
        ]
        results = [handle.result(60) for handle in (first, *others)]
    assert [prompt + own.token_ids for prompt, own in zip(prompts, results, strict=True)] == texts
    assert checks.num_checked > 9 and not checks.num_unready


def test_text_with_a_gap_is_neither_kept_nor_shared(setting, monkeypatch):
    (prompt,) = prompts_of(1, 40)
    texts = [setting.text(prompt, 14)]
    with setting.generator(BATCHED) as generator:
        process = FeatureDrafter.take_features

        def forgets(drafter, request, begin, features):
            if begin:  # the first chunk of the prompt is lost
                process(drafter, request, begin, features)

        with monkeypatch.context() as patched:
            patched.setattr(FeatureDrafter, "take_features", forgets)
            assert prompt + generator.submit(prompt, **OPTIONS).result(60).token_ids == texts[0]
        second = texts[0] + [5, 6, 7]
        expected = setting.text(second, 14)
        found = list[int]()
        reuse = FeatureDrafter.reuse
        monkeypatch.setattr(
            FeatureDrafter,
            "reuse",
            lambda self, request: found.append(reuse(self, request)) or found[-1],
        )
        assert second + generator.submit(second, **OPTIONS).result(60).token_ids == expected
        assert set(found) == {0}
