"""RoPE whose frequencies depend on the length of the text: the same texts as stock's on both sides
of the switch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import GROUPED, VOCAB, assert_same_as_stock, sharpened

SWITCH = 32
NEW = 16
ROPES: dict[str, dict[str, Any]] = {
    "longrope": dict(
        rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=SWITCH, factor=4.0,
        short_factor=[1.0, 1.0, 1.5, 2.0], long_factor=[1.0, 3.0, 9.0, 20.0],
    ),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
}  # fmt: skip
BELOW = (10, 12, 14)
CROSSING = (20, 26, 31)
ABOVE = (40, 50, 33)
LENGTHS = {
    "below": BELOW,
    "crossing": CROSSING,
    "above": ABOVE,
    "both": (12, 50, 26),
    "at": (32, 31, 33),
}
SAMPLING = {"greedy": dict(do_sample=False), "sampled": dict(do_sample=True, temperature=0.8)}


def model_of(kind: str, noise: float = 0.0) -> PreTrainedModel:
    positions = 128 if kind == "longrope" else SWITCH
    config = LlamaConfig(
        **GROUPED | dict(max_position_embeddings=positions, rope_parameters=dict(ROPES[kind]))
    )
    return sharpened(lambda: LlamaForCausalLM(config), 0, noise)


def prompts(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    return {
        "input_ids": torch.randint(3, VOCAB, (len(lengths), longest)) * mask,
        "attention_mask": mask,
    }


def forget(model: PreTrainedModel) -> None:
    """Let stock forget the frequencies of longer texts, which it keeps until a short one comes."""
    model(torch.tensor([[1]]))


@pytest.mark.parametrize("sampling", nightly_but(["sampled"], SAMPLING))
@pytest.mark.parametrize("where", LENGTHS)
@pytest.mark.parametrize("kind", ROPES)
def test_texts_on_both_sides_of_the_switch(kind: str, where: str, sampling: str) -> None:
    model = model_of(kind)
    generator = SLOSpecGenerator(model, model_of(kind, noise=0.02), config=DRAFTS_ALWAYS)
    inputs = prompts(LENGTHS[where])
    alone = {name: rows[:1, rows.shape[1] - LENGTHS[where][0] :] for name, rows in inputs.items()}
    for given in (inputs, alone):
        forget(model)
        out = assert_same_as_stock(
            model, generator.generate, given, **SAMPLING[sampling], max_new_tokens=NEW
        )
        assert sum(row.accepted for row in out.slo) > 0


@pytest.mark.parametrize("kind", ROPES)
def test_prompts_read_in_several_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is rotated as one forward of the whole prompt would rotate it."""
    monkeypatch.setattr("hf_slospec.scheduler.prefill.CHUNK", 16)
    model = model_of(kind)
    generator = SLOSpecGenerator(model, config=DRAFTS_ALWAYS)
    forget(model)
    assert_same_as_stock(
        model, generator.generate, prompts((50, 20)), do_sample=False, max_new_tokens=NEW
    )


@pytest.mark.parametrize("kind", ROPES)
def test_requests_of_the_batcher_are_rotated_each_by_itself(kind: str) -> None:
    """Also where they begin alike: K of one length is not given to a prompt of another."""
    model = model_of(kind)
    text = torch.randint(3, VOCAB, (60,)).tolist()
    lengths = quick_or((20, 31, 33, 60, 31), (20, 26, 31, 33, 45, 60, 45, 26))
    texts = [text[:length] for length in lengths]
    expected = []
    for prompt in texts:
        forget(model)
        row = torch.tensor([prompt])
        out = model.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=NEW
        )
        expected.append(out[0, len(prompt) :].tolist())
    config = SLOSpecConfig(policy="fixed", max_batch=3, check_invariants=True)
    with SLOSpecGenerator(model, model_of(kind, noise=0.02), config=config) as generator:
        handles = [
            generator.submit(prompt, do_sample=False, max_new_tokens=NEW) for prompt in texts
        ]
        assert [list(handle.result(120).token_ids) for handle in handles] == expected
        again = [
            list(
                generator.submit(prompt, do_sample=False, max_new_tokens=NEW).result(120).token_ids
            )
            for prompt in texts
        ]
        assert again == expected


def test_stock_keeps_its_own_frequencies() -> None:
    model = model_of("dynamic")
    forget(model)
    before = model.model.rotary_emb.inv_freq.clone()
    SLOSpecGenerator(model, config=DRAFTS_ALWAYS).generate(
        **prompts(ABOVE), do_sample=False, max_new_tokens=4
    )
    assert torch.equal(model.model.rotary_emb.inv_freq, before) and "forward" not in vars(
        model.model.rotary_emb
    )


def test_where_stock_computes_the_text_anew() -> None:
    settings = dict(max_position_embeddings=128, original_max_position_embeddings=SWITCH)
    config = Phi3Config(**GROUPED | settings | dict(rope_parameters=dict(ROPES["longrope"])))
    model, draft = (sharpened(lambda: Phi3ForCausalLM(config), 0, noise) for noise in (0.0, 0.02))
    generator = SLOSpecGenerator(model, draft, config=DRAFTS_ALWAYS)
    for lengths in (BELOW, ABOVE, (12, 50, 26)):
        assert_same_as_stock(
            model, generator.generate, prompts(lengths), do_sample=False, max_new_tokens=NEW
        )
    with pytest.raises(
        UnsupportedOptionError,
        match=r"longrope RoPE changes beyond 32 tokens.*max_new_tokens to at most 1",
    ):
        generator.generate(**prompts(CROSSING), do_sample=False, max_new_tokens=NEW)
    with generator, pytest.raises(UnsupportedOptionError, match="longrope"):
        generator.submit([5] * 30, max_new_tokens=NEW)


def test_rotary_embeddings_that_cannot_be_told() -> None:
    model = model_of("longrope")
    generator = SLOSpecGenerator(model, config=DRAFTS_ALWAYS)
    generator.decoder.speculator.target.packed.rope.modules.clear()
    with pytest.raises(UnsupportedOptionError, match=r"longrope RoPE changes.*has a rope_type"):
        generator.generate(**prompts(ABOVE), do_sample=False, max_new_tokens=NEW)
    assert_same_as_stock(
        model, generator.generate, prompts(BELOW), do_sample=False, max_new_tokens=NEW
    )
