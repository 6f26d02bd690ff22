"""Published checkpoints in bf16 with ``exact="bits"`` write what stock ``generate`` writes for
every row alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model import exact_trial
from tests.real.conftest import load
from tests.support.breadth import quick_or
from tests.support.served_pair import WAIT_S

BITS = SLOSpecConfig(exact="bits", policy="fixed", max_depth=4, max_width=2, check_invariants=True)
NEW = {"SmolLM2-135M-Instruct": quick_or(5, 7), "gemma-3-270m": 12}  # tokens
# Tokens of the prompts; Gemma's window of 512 is crossed while decoding, and before.
LENGTHS = {"SmolLM2-135M-Instruct": quick_or((12, 30), (24, 60)), "gemma-3-270m": (506, 530)}
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def real(request):
    return load(request.param, torch.bfloat16)


@pytest.fixture(scope="module")
def prompts(real, questions):
    """Prompts of both lengths, [1, length] each."""
    text = " ".join(questions["rag"][:2])
    return [
        real.encoded([text], max_tokens=length)["input_ids"] for length in LENGTHS[real.folder.name]
    ]


def alone(real, prompt, **options):
    torch.manual_seed(7)
    out = real.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW[real.folder.name],
        **options,
    )
    return out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("real", ["SmolLM2-135M-Instruct"], indirect=True)
def test_a_padded_batch_and_a_sampled_row(real, prompts, monkeypatch):
    for name, value in quick_or(
        dict(PROMPTS=(9, 2), DEPTH=3), {}
    ).items():  # the whole trial takes a minute
        monkeypatch.setattr(exact_trial, name, value)
    expected = [alone(real, prompt, do_sample=False) for prompt in prompts]
    ours = SLOSpecGenerator(
        real.model, tokenizer=real.tokenizer, drafter="lookup+suffix", config=BITS
    )
    longest = max(prompt.shape[1] for prompt in prompts)
    pad = real.tokenizer.pad_token_id
    rows = [
        torch.nn.functional.pad(prompt[0], (longest - prompt.shape[1], 0), value=pad)
        for prompt in prompts
    ]
    mask = torch.stack(
        [torch.arange(longest) >= longest - prompt.shape[1] for prompt in prompts]
    ).long()
    out = ours.generate(
        torch.stack(rows),
        attention_mask=mask,
        max_new_tokens=NEW[real.folder.name],
        do_sample=False,
    )
    assert [
        row[: len(own)] for row, own in zip(out[:, longest:].tolist(), expected, strict=True)
    ] == expected
    sampled = alone(real, prompts[0], **SAMPLED)
    torch.manual_seed(7)
    out = ours.generate(prompts[0], max_new_tokens=NEW[real.folder.name], **SAMPLED)
    assert out[0, prompts[0].shape[1] :].tolist() == sampled


@pytest.mark.nightly
@pytest.mark.parametrize("real", ["gemma-3-270m"], indirect=True)
def test_neighbours_that_preempt_each_other(real, prompts):
    room = (
        sum(prompt.shape[1] for prompt in prompts) + NEW[real.folder.name]
    )  # not for two at once to their ends
    config = BITS.model_copy(update={"kv_tokens": room, "prefill_chunk": 64})
    with SLOSpecGenerator(
        real.model, tokenizer=real.tokenizer, drafter="lookup", config=config
    ) as generator:
        handles = [
            generator.submit(prompt, max_new_tokens=NEW[real.folder.name], do_sample=False)
            for prompt in prompts * 2
        ]
        results = [handle.result(WAIT_S).token_ids for handle in handles]
    assert results == [alone(real, prompt, do_sample=False) for prompt in prompts] * 2
