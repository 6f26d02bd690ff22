"""``slo_tpot`` as callers pass it: per row, in stages, from a generation config."""

from __future__ import annotations

import itertools

import pytest
from transformers import (
    GenerationConfig,
)

import hf_slospec
from hf_slospec import (
    InvalidInputError,
    SLOSpecGenerator,
    SLOStage,
)
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts

STAGES = [
    {"slo_tpot": 1e-6, "until": " = name\n"},
    {"slo_tpot": 50.0, "tokens": 12},  # more than one step commits
    {"slo_tpot": 60.0},
]


@pytest.fixture(scope="module")
def pair():
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    return SLOSpecGenerator(target, draft, tokenizer), dict(
        tokenizer(["def __init__(self"], return_tensors="pt")
    )


def stages_by_token(out, row):
    """The target in force as each of a row's tokens was committed."""
    parts = [part for step in out.steps for part in step.requests if part.index == row]
    return [part.tpot_slo_s for part in parts for _ in range(part.committed)]


def test_stages_end_by_text_and_by_tokens(pair):
    generator, inputs = pair
    options = dict(do_sample=False, max_new_tokens=60, return_dict_in_generate=True)
    stages = [SLOStage(**stage) for stage in STAGES]
    out = assert_same_as_stock(
        generator.model, lambda **k: generator.generate(**k, slo_tpot=[stages]), inputs, **options
    )
    new_tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    texts = [generator.tokenizer.decode(new_tokens[:end]) for end in range(1, len(new_tokens) + 1)]
    first = next(end for end, text in enumerate(texts, 1) if " = name\n" in text)
    assert first < len(new_tokens) - 20
    targets = stages_by_token(out, 0)
    assert targets[:first] == [1e-6] * first
    changes = [new for old, new in itertools.pairwise(targets) if new != old]
    assert changes == [50.0, 60.0]
    assert targets.count(50.0) >= 4
    # Nothing writes a token per microsecond.
    assert (out.slo[0].tpot_slo_s, out.slo[0].attained) == (60.0, False)
    relaxed = [SLOStage(slo_tpot=50.0, until=" = name\n"), SLOStage(slo_tpot=50.0)]
    out = generator.generate(**inputs, **options, slo_tpot=relaxed)  # for all rows
    assert out.slo[0].attained is True


def test_stages_by_text_need_a_tokenizer(model):
    with pytest.raises(InvalidInputError, match=r"until.*tokenizer"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=STAGES)
    out = model.generate(
        **ragged_prompts(2), **OPTIONS, slo_tpot=[STAGES[1:], None], return_dict_in_generate=True
    )
    assert [metrics.tpot_slo_s for metrics in out.slo] == [60.0, None]


def test_stages_from_a_saved_generation_config(pair, tmp_path):
    generator, inputs = pair
    options = dict(do_sample=False, max_new_tokens=60, eos_token_id=0, pad_token_id=1)
    GenerationConfig(**options, slo_tpot=STAGES, return_dict_in_generate=True).save_pretrained(
        tmp_path
    )
    config = GenerationConfig.from_pretrained(tmp_path)
    out = generator.generate(**inputs, generation_config=config)
    assert list(dict.fromkeys(stages_by_token(out, 0))) == [1e-6, 50.0, 60.0]


@pytest.mark.parametrize(
    ("slo_tpot", "longest"),
    [
        (5.0, None),
        (50, "slo_tpot=50 means 50 seconds per output token; for 50 milliseconds, pass 0.05"),
        ([0.02, 20.0], "for 20 milliseconds, pass 0.02"),
        ([[{"slo_tpot": 30.0, "tokens": 2}, {"slo_tpot": 60.0}], None], "for 60 milliseconds"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_slos_of_many_seconds_are_logged_once_per_call_and_kept(pair, caplog, slo_tpot, longest):
    generator, _ = pair
    inputs = ragged_prompts(2)
    options = dict(slo_tpot=slo_tpot, max_new_tokens=3, return_dict_in_generate=True)
    output = generator.generate(**inputs, **options)
    records = [r for r in caplog.records if r.name == "hf_slospec.request.slo"]
    assert [longest in record.getMessage() for record in records] == [True] * bool(longest)
    assert max(row.tpot_slo_s or 0.0 for row in output.slo) >= 5.0
