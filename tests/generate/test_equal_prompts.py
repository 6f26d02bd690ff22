"""Rows with the same prompt: one prefill, the same output as stock."""

from __future__ import annotations

import pytest

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_drafter
from tests.support.stock_matrix import model_of, padded, random_texts, repeated
from tests.support.toys.tiny_models import assert_same_as_stock, tiny_model

CONFIG = SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=64, max_depth=3)


def inputs_of(lengths, repeats):
    """Random prompts, each repeated, as TRL makes them."""
    return repeated(padded(random_texts(*lengths)), num_rows=repeats)


def prefilled(out):
    return sum(step.prefill_tokens for step in out.steps)


@pytest.mark.parametrize("drafter", [None, "assistant", "suffix"])
@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(do_sample=True, num_return_sequences=2)]
)
@pytest.mark.parametrize("extra", [{}, dict(output_scores=True)], ids=["", "scores"])
def test_repeated_rows_are_prefilled_once(drafter, options, extra):
    model = tiny_model("llama")
    draft = tiny_model("llama", noise=0.02) if drafter == "assistant" else None
    method = load_drafter(drafter, model) if drafter not in (None, "assistant") else None
    ours = SLOSpecGenerator(model, draft, config=CONFIG, drafter=method)
    inputs = inputs_of([40, 90], 3)
    copies = options.get("num_return_sequences", 1)
    out = assert_same_as_stock(model, ours.generate, inputs, max_new_tokens=12, **options, **extra)
    assert prefilled(out) == 39 + 89 + 6 * copies
    assert sorted(row.reused for row in out.slo) == [0] * 2 + [39] * (3 * copies - 1) + [89] * (
        3 * copies - 1
    )


@pytest.mark.parametrize(
    "name", ["Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "JambaForCausalLM", "gpt-oss"]
)
def test_recurrent_states_are_copied_too(name):
    ours = SLOSpecGenerator(model_of(name), model_of(name, 0.03), config=CONFIG)
    out = ours.generate(
        **inputs_of([50], 3), max_new_tokens=12, do_sample=True, return_dict_in_generate=True
    )
    assert prefilled(out) == 49 + 3


def test_prompts_of_several_chunks_and_short_ones(monkeypatch):
    monkeypatch.setattr("hf_slospec.scheduler.prefill.CHUNK", 30)
    ours = SLOSpecGenerator(tiny_model("llama"), tiny_model("llama", noise=0.02), config=CONFIG)
    out = assert_same_as_stock(
        ours.model, ours.generate, inputs_of([100, 71, 20], 2), max_new_tokens=8
    )
    # What a last chunk of fewer than 16 tokens adds to the K/V that was copied before is computed
    # again.
    assert prefilled(out) == 99 + 70 + 4 + 2 * 20 + 9 + 10


def test_a_draft_processes_a_common_prompt_once(monkeypatch):
    ours = SLOSpecGenerator(tiny_model("llama"), tiny_model("llama", noise=0.02), config=CONFIG)
    ours.generate(**inputs_of([8], 1), max_new_tokens=4)
    packed, sizes = ours.decoder.speculator.draft.packed, []
    for name in ("outputs", "draft"):
        forward = getattr(packed, name)

        def counted(pool, parts, *given, forward=forward):
            sizes.append(sum(len(part.input_ids) for part in parts))
            return forward(pool, parts, *given)

        monkeypatch.setattr(packed, name, counted)
    out = ours.generate(
        **inputs_of([120], 4), max_new_tokens=8, do_sample=True, return_dict_in_generate=True
    )
    assert max(sizes) < 4 * 120 and sum(sizes) < 120 + 4 * 8 * 10
    assert out.sequences.shape[1] == 128
