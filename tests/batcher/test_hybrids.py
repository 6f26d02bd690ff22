"""Models whose layers keep states: calls, caches, the batcher, preemption and reuse, all as stock
decodes them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError, load_drafter
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.breadth import nightly_rows_but, quick_or
from tests.support.served_pair import WAIT_S, Holds
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, sharpened

CONFIG = SLOSpecConfig(
    policy="adaserve",
    check_invariants=True,
    max_depth=quick_or(2, 4),
    token_budget=40,
    kv_tokens=2_000,
)
FAMILIES = ["Lfm2", "Qwen3_5", "FalconH1"]
LONG = quick_or(30, 60)


def tiny(family: str, noise: float = 0.0) -> Any:
    model_class = getattr(transformers, f"{family}ForCausalLM")
    return sharpened(lambda: model_class(tiny_config(model_class.config_class)), 0, noise)


def alone(model: Any, ids: list[int], **options: Any) -> list[int]:
    stock = type(model).generate
    out = stock(
        model,
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)).long(),
        pad_token_id=0,
        **options,
    )
    return out[0, len(ids) :].tolist()


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_and_its_cache_are_those_of_stock(family: str) -> None:
    generator = SLOSpecGenerator(tiny(family), tiny(family, 0.02), config=CONFIG)
    caches = list[Any]()

    def generate(**options: Any) -> Any:
        output = generator.generate(**options)
        caches.append(output[CACHE_NAME])
        return output

    for batch in (1, 3):
        inputs = ragged_prompts(batch, seed=batch)
        output = assert_same_as_stock(
            generator.model, generate, inputs, max_new_tokens=14, do_sample=True
        )
        assert any(step.draft_levels for step in output.steps), "nothing was drafted"
        # Stock goes on from our cache as it goes on from its own.
        own = caches.pop()
        text = output.sequences
        mask = torch.cat(
            (
                inputs["attention_mask"],
                torch.ones(batch, text.shape[1] - inputs["input_ids"].shape[1]),
            ),
            1,
        )
        options: Any = dict(
            attention_mask=mask.long(), max_new_tokens=9, do_sample=False, eos_token_id=None
        )
        again = type(generator.model).generate(
            generator.model, text, **cache_option(own), **options
        )
        assert torch.equal(again, type(generator.model).generate(generator.model, text, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_goes_on_from_a_cache_of_stock(family: str) -> None:
    generator = SLOSpecGenerator(tiny(family), tiny(family, 0.02), config=CONFIG)
    inputs = ragged_prompts(3)
    outputs = []
    stock = type(generator.model).generate
    for generate in (lambda **o: stock(generator.model, **o), generator.generate):
        cache = DynamicCache(config=generator.model.config)
        options: Any = dict(do_sample=False, eos_token_id=None, **cache_option(cache))
        text = stock(generator.model, **inputs, max_new_tokens=6, **options)
        mask = torch.cat((inputs["attention_mask"], torch.ones(3, 10).long()), 1)
        ids = torch.cat((text, torch.full((3, 4), 7)), 1)
        outputs.append(generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, **options))
    assert torch.equal(*outputs)


def test_masked_tokens_inside_a_row_are_refused() -> None:
    generator = SLOSpecGenerator(tiny("Lfm2"), config=CONFIG)
    inputs = ragged_prompts(1)
    inputs["attention_mask"][0, 4] = 0
    with pytest.raises(
        UnsupportedOptionError, match=r"a recurrent state .* would count; pad on the left only"
    ):
        generator.generate(**inputs, max_new_tokens=4)


@pytest.mark.parametrize(
    ("family", "draft"),
    nightly_rows_but(
        [("Qwen3_5", "Lfm2")], [("Qwen3_5", "Lfm2"), ("Lfm2", "Qwen3_5"), ("Bamba", "Bamba")]
    ),
)
def test_requests_of_the_batcher_are_decoded_as_alone(family: str, draft: str) -> None:
    """With long and short prompts, chunked prefill, K/V for few of them, greedy and sampled."""
    target = tiny(family)
    drafter = tiny(draft, 0.02)
    kv_tokens = 330
    config = CONFIG.model_copy(update={"kv_tokens": kv_tokens, "prefill_chunk": 40})
    prompts = [random_ids(length, length) for length in (90, 4, 50, 33, 12, 70)]
    expected = [alone(target, ids, max_new_tokens=30, eos_token_id=None) for ids in prompts]
    with SLOSpecGenerator(target, drafter, config=config) as generator:
        handles = [generator.submit(ids, max_new_tokens=30, eos_token_id=None) for ids in prompts]
        urgent = generator.submit(prompts[1], max_new_tokens=30, eos_token_id=None, priority=-5)
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
        assert urgent.result(WAIT_S).token_ids == expected[1]
        stats = generator.stats()
        assert stats.memory.states == 0 and stats.kv_tokens == 0


def test_preempted_requests_resume_exactly() -> None:
    target = tiny("Qwen3_5")
    prompts = [random_ids(60, seed) for seed in range(4)]
    expected = [alone(target, ids, max_new_tokens=LONG, eos_token_id=None) for ids in prompts]
    config, options = (
        CONFIG.model_copy(update={"max_batch": 2}),
        dict(max_new_tokens=LONG, eos_token_id=None),
    )
    with SLOSpecGenerator(target, tiny("Qwen3_5", 0.02), config=config) as generator:
        with Holds() as holds:
            spare = [
                generator.submit(ids, **options, stopping_criteria=[holds]) for ids in prompts[:2]
            ]
            assert holds.is_reached.wait(WAIT_S)
            urgent = [
                generator.submit(ids, **options, slo_tpot=10.0, slo_ttft=100.0)
                for ids in prompts[2:]
            ]
        assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == expected
        assert sum(handle.metrics.preempted for handle in spare) > 0


def test_a_second_turn_reuses_the_states_of_the_first() -> None:
    target = tiny("Lfm2")
    with SLOSpecGenerator(target, tiny("Lfm2", 0.02), config=CONFIG) as generator:
        ids = random_ids(40, 1)
        reused = list[int]()
        for turn in range(3):
            handle = generator.submit(ids, max_new_tokens=12, eos_token_id=None)
            answer = handle.result(WAIT_S).token_ids
            assert answer == alone(target, ids, max_new_tokens=12, eos_token_id=None)
            reused.append(handle.metrics.reused)
            ids = ids + answer + random_ids(6, 50 + turn)
        assert reused[0] == 0 and reused[1] == 40 + 12 - 1 and reused[2] > reused[1]
        # A state is of a whole text: of one that goes on in another way nothing is reused.
        other = generator.submit(ids[:30] + random_ids(9, 3), max_new_tokens=4)
        other.result(WAIT_S)
        assert other.metrics.reused == 0


def test_lookup_drafts_for_a_target_whose_layers_all_keep_states() -> None:
    target = tiny("Mamba2")
    with SLOSpecGenerator(
        target, drafter=load_drafter("lookup", target), config=CONFIG
    ) as generator:
        ids = random_ids(12, 5) * 4
        handle = generator.submit(ids, max_new_tokens=20, eos_token_id=None)
        assert handle.result(WAIT_S).token_ids == alone(
            target, ids, max_new_tokens=20, eos_token_id=None
        )
