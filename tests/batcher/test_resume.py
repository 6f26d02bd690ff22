"""Outputs that are begun by one generator and finished by another, and requests that are refused."""

from __future__ import annotations

import asyncio
import math

import pytest

from hf_slospec import (
    NotGuaranteedError,
    Progress,
    SLOSpecGenerator,
)
from hf_slospec.generate.processors import OccurrencePenalties
from tests.support.breadth import nightly_but, quick_or
from tests.support.served_pair import CONFIG, WAIT_S, alone

NEW = quick_or(24, 40)
PROMPT = "def main(argv):\n    "
CASES = [
    dict(),
    dict(do_sample=True, temperature=1.3, top_k=50, seed=11),
    dict(do_sample=True, repetition_penalty=1.3, seed=5),
    dict(min_new_tokens=20, stop_strings=["\n"]),
    dict(logits_processor=[OccurrencePenalties(8, 0.7, 0.4)]),
]


@pytest.fixture(scope="module")
def other(pair):
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        yield generator


@pytest.mark.parametrize("options", CASES, ids=["-".join(case) or "greedy" for case in CASES])
@pytest.mark.parametrize("num_before", nightly_but([7], [0, 1, 7]))
def test_output_goes_on_as_one_generator_would_have_written_it(served, other, options, num_before):
    whole = served.submit(PROMPT, max_new_tokens=NEW, slo_tpot=1.0, logprobs=2, **options)
    expected = whole.result(WAIT_S)
    progress = Progress(
        expected.token_ids[:num_before], 3.0, 2.0, drafted=9, acceptance_histogram=(1, 2, 0, 1)
    )
    for generator in (other, other):  # the second finds the text's K/V
        handle = generator.submit(
            PROMPT, max_new_tokens=NEW, slo_tpot=1.0, logprobs=2, resume=progress, **options
        )
        result = handle.result(WAIT_S)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.finish_reason == expected.finish_reason
        assert list(handle.tokens()) == expected.token_ids
        assert [each.logprob for each in handle.logprobs[num_before:]] == pytest.approx(
            [each.logprob for each in whole.logprobs[num_before:]], abs=1e-4
        )
        assert all(math.isnan(each.logprob) for each in handle.logprobs[:num_before])
        metrics = result.metrics
        assert metrics.resumed == num_before and metrics.tokens == len(expected.token_ids)
        assert metrics.steps > 4 - (not num_before) and metrics.drafted >= 9
        assert (
            metrics.acceptance_histogram[1] >= 2
            and sum(metrics.acceptance_histogram) == metrics.steps
        )
        assert metrics.ttft_s == pytest.approx(1.0, abs=0.1) if num_before else metrics.ttft_s > 3.0
        if num_before:
            assert metrics.tpot_s is not None and metrics.tpot_s > 2.0 / len(expected.token_ids)


def test_cancelled_request_goes_on_from_its_own_progress(pair, served, other):
    first = served.submit(PROMPT, max_new_tokens=60, do_sample=True, seed=3)
    next(first.tokens())
    first.cancel()
    progress = first.progress
    assert len(progress.tokens) >= 1 and progress.decoding_s <= progress.elapsed_s
    second = other.submit(PROMPT, max_new_tokens=60, do_sample=True, seed=3, resume=progress)
    assert second.result(WAIT_S).token_ids == alone(
        pair, PROMPT, 3, max_new_tokens=60, do_sample=True
    )


def test_request_is_refused_where_its_slos_cannot_be_guaranteed(pair, served):
    before = served.stats()
    refused = served.submit(PROMPT, max_new_tokens=8, slo_tpot=1e-7, must_guarantee=True)
    with pytest.raises(NotGuaranteedError, match="cannot be guaranteed"):
        refused.result(WAIT_S)
    assert not refused.token_ids
    kept = served.submit(PROMPT, max_new_tokens=8, slo_tpot=5.0, must_guarantee=True)
    assert asyncio.run(kept.aguaranteed())
    assert kept.result(WAIT_S).token_ids == alone(pair, PROMPT, max_new_tokens=8)
    # It has no SLO to guarantee.
    free = served.submit(PROMPT, max_new_tokens=8, must_guarantee=True)
    assert not asyncio.run(free.aguaranteed())
    assert free.result(WAIT_S).token_ids == alone(pair, PROMPT, max_new_tokens=8)
    with pytest.raises(NotGuaranteedError):
        asyncio.run(refused.aguaranteed())
    after = served.stats()
    assert after.declined == before.declined + 1 and after.finished.get(
        "error"
    ) == before.finished.get("error")
