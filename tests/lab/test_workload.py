"""Arrivals, mixes and lengths."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.lab.comparison import at_rate
from hf_slospec.lab.workload import (
    ARRIVALS,
    MIXES,
    Job,
    Kind,
    Length,
    arrivals,
    in_rounds,
    jobs_of,
    mix_of,
)
from tests.support.breadth import quick_or
from tests.support.toys.trees import SEEDS


def gaps(kind, **options):
    times_s = arrivals(kind, np.random.default_rng(0), 4.0, 60_000, **options)
    return np.diff(times_s)


@pytest.mark.parametrize(
    ("kind", "options", "variation"),
    [("poisson", {}, 1.0), ("gamma", {"variation": 0.5}, 0.5), ("gamma", {"variation": 3.0}, 3.0)],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(kind, options, variation):
    found = gaps(kind, **options)
    assert found.mean() == pytest.approx(1.0 / 4.0, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.05)


def test_on_off_has_its_average_rate_and_comes_in_bursts():
    found = gaps("on-off")
    assert found.mean() == pytest.approx(1.0 / 4.0, rel=0.07)
    assert found.std() / found.mean() > 1.3


@given(
    kind=st.sampled_from(ARRIVALS),
    seed=SEEDS,
    rate=st.sampled_from([1e-3, 1.0, 1e4, 1e300]),
    number=st.integers(1, 50),
    variation=st.sampled_from([0.01, 1.0, 100.0]),
)
@settings(deadline=None, max_examples=quick_or(20, 60))
def test_arrivals_are_as_many_as_asked_for_and_never_go_back(kind, seed, rate, number, variation):
    times_s = arrivals(kind, np.random.default_rng(seed), rate, number, variation)
    assert times_s.shape == (number,)
    assert (np.diff(times_s) >= 0.0).all() and (times_s >= 0.0).all() and np.isfinite(times_s).all()


@pytest.mark.parametrize("name", MIXES)
def test_mixes_have_the_mean_lengths_and_shares_of_their_sources(name):
    number = 4000
    jobs = jobs_of(
        mix_of(name),
        np.arange(number, dtype=np.float64),
        np.random.default_rng(0),
        lambda tokens: tokens,
    )
    assert [job.arrival_s for job in jobs] == list(range(number))
    shares = sum(kind.share for kind in MIXES[name])
    for kind in MIXES[name]:
        own = [job for job in jobs if job.kind == kind.name]
        assert len(own) / number == pytest.approx(kind.share / shares, abs=0.03)
        for length, drawn in (
            (kind.input, [j.input_tokens for j in own]),
            (kind.output, [j.output_tokens - j.think_tokens for j in own]),
            *([] if kind.think is None else [(kind.think, [j.think_tokens for j in own])]),
        ):
            assert length.min_tokens <= min(drawn) and max(drawn) <= length.max_tokens
            cut = 1.0 - math.exp(
                -((length.max_tokens - length.mean) / length.std)
            )  # most cut off only little
            assert np.mean(drawn) == pytest.approx(length.mean, rel=0.12 if cut > 0.8 else 0.25)
        assert all(
            (job.tpot_slo_s, job.priority) == (kind.tpot_slo_s, kind.priority) for job in own
        )


def test_slowdowns_multiply_what_a_prompt_takes_alone():
    exact, slow = (
        Kind("e", 1.0, Length(5, 0, 9), Length(5, 0, 9), ttft_slo_s=3.0, ttft_slowdown=9.0),
        MIXES["coder"][0],
    )
    for kind, expected in (
        (exact, lambda job: 3.0),
        (slow, lambda job: 5.0 * 2.0 * job.input_tokens),
    ):
        for job in jobs_of(
            [kind], np.zeros(20), np.random.default_rng(0), lambda tokens: 2.0 * tokens
        ):
            assert job.ttft_slo_s == pytest.approx(expected(job))
    plain = dataclasses.replace(exact, ttft_slo_s=None, ttft_slowdown=None)
    none = jobs_of([plain], np.zeros(1), np.random.default_rng(0), float)
    assert none[0].ttft_slo_s is None and none[0].input_tokens == 5


@pytest.mark.parametrize("pause_s", [None, 3.0])
def test_rounds_follow_one_another_and_continue_after_a_pause(pause_s):
    call = Kind(
        "call", 1.0, Length(50, 0, 99), Length(20, 0, 99), tpot_slo_s=0.05, ttft_slowdown=3.0
    )
    answers = [Job(float(at), 30, 10, 0.1, kind="answer") for at in range(300)]
    jobs = in_rounds(answers, call, (2.7, 1.1), np.random.default_rng(0), float, pause_s)
    assert [(j.kind, j.tpot_slo_s, j.output_tokens) for j in jobs if j.kind == "answer"] == [
        ("answer", 0.1, 10)
    ] * 300
    assert [job.arrival_s for job in jobs if job.after is None] == list(range(300))
    assert len(jobs) / 300 == pytest.approx(2.7, abs=0.2)
    followers = [(job, jobs[job.after]) for job in jobs if job.after is not None]
    assert all(job.after == index - 1 for index, job in enumerate(jobs) if job.after is not None)
    for job, before in followers:
        own = 50 if job.kind == "call" else 30
        assert job.continues == (pause_s is not None)
        assert job.input_tokens == own + (
            before.input_tokens + before.output_tokens if pause_s else 0
        )
        assert job.kind == "answer" or job.ttft_slo_s == 3.0 * 50  # the prefill of what is new
    assert np.mean([job.arrival_s for job, _ in followers]) == pytest.approx(
        pause_s or 0.0, rel=0.15
    )


@given(
    times_s=st.lists(st.floats(0.0, 1e6), min_size=2, max_size=20, unique=True),
    rate=st.floats(0.01, 100.0),
)
def test_at_rate_stretches_gaps_and_keeps_order_and_requests(times_s, rate):
    jobs = [Job(time_s, index + 1, 2) for index, time_s in enumerate(sorted(times_s))]
    if jobs[-1].arrival_s - jobs[0].arrival_s < 1e-6:
        return
    faster = at_rate(jobs, rate)
    span_s = faster[-1].arrival_s - faster[0].arrival_s
    assert (len(jobs) - 1) / span_s == pytest.approx(rate, rel=1e-3)
    assert faster[0].arrival_s == jobs[0].arrival_s
    old, new = (np.diff([job.arrival_s for job in own]) for own in (jobs, faster))
    assert new * old.sum() == pytest.approx(old * new.sum(), rel=1e-3, abs=1e-4 * old.sum())
    assert [job.input_tokens for job in faster] == [job.input_tokens for job in jobs]
