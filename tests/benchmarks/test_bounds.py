"""Bounds on any schedule, against all schedules of tiny loads and against simulated systems."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bounds import Bounds, lines_below
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.hardware import HARDWARE, Hardware, curve, lines
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Library, SimulatedText, TextModel
from hf_slospec.lab.workload import Job
from tests.support.toys.trees import SEEDS

MAX_DEPTH = 2
MAX_BATCH = 2
TINY = Hardware(
    curve({1: 10, 2: 11, 4: 12, 5: 20, 8: 24}), lines((2.0, 0.5)), host_s=0.001, kv_tokens=1000
)


@dataclass(frozen=True)
class State:
    """A load on its way; one entry per request, ``seen`` counts the tokens that the draft has
    processed.
    """

    now_s: float
    emitted: tuple[int, ...]
    seen: tuple[int, ...]
    first_s: tuple[float, ...]
    finish_s: tuple[float, ...]


class Schedules:
    """All schedules of a load whose texts have one child per place, by exhaustive search."""

    def __init__(self, jobs, library, hardware):
        self.jobs = jobs
        self.library = library
        self.hardware = hardware
        self.target = functools.lru_cache(None)(lambda *sizes: float(hardware.target(*sizes)))
        self.draft = functools.lru_cache(None)(lambda *sizes: float(hardware.draft(*sizes)))

    def ends(self, state=None):
        """Yield the last state of every schedule."""
        number = len(self.jobs)
        state = state or State(0.0, (0,) * number, (0,) * number, (0.0,) * number, (0.0,) * number)
        if all(
            done == job.output_tokens for done, job in zip(state.emitted, self.jobs, strict=True)
        ):
            yield state
            return
        for after in self._steps(state):
            yield from self.ends(after)

    def _steps(self, state):
        """Yield what a wait for the next arrival and every step of present requests lead to."""
        if coming := [job.arrival_s for job in self.jobs if job.arrival_s > state.now_s]:
            yield replace(state, now_s=min(coming))
        choices = [self._choices(state, index) for index in range(len(self.jobs))]
        for takes in itertools.product(*choices):
            if 0 < sum(take is not None for take in takes) <= MAX_BATCH:
                yield self._after(state, takes)

    def _choices(self, state, index):
        """Return None, to sit out, and how many drafted tokens a request may verify; a prompt is
        taken whole.
        """
        job = self.jobs[index]
        done = state.emitted[index]
        if job.arrival_s > state.now_s or done == job.output_tokens:
            return [None]
        most = 0
        while (
            done
            and most < min(MAX_DEPTH, job.output_tokens - done - 1)
            and not self._is_missed(index, done + most)
        ):
            most += 1
        return [None, *range(most + 1)]

    def _is_missed(self, index, place):
        return self.library.token(index, place) > 0

    def _after(self, state, takes):
        emitted, seen, first_s, finish_s = map(
            list, (state.emitted, state.seen, state.first_s, state.finish_s)
        )
        num_tokens = num_requests = keys = 0
        drafting = []
        depth = 0
        for index, take in enumerate(takes):
            if take is None:
                continue
            context = self.jobs[index].input_tokens + emitted[index]
            num_tokens += 1 + take if emitted[index] else context
            num_requests = num_requests + 1
            keys = keys + context
            if take:
                drafting.append((index, context))
                depth = max(depth, take)
        now_s = state.now_s + self.target(num_tokens, num_requests, keys) + self.hardware.host_s
        if drafting:
            draft_keys = sum(c for _, c in drafting)
            new = sum(c - seen[i] for i, c in drafting)
            now_s += self.draft(
                new, len(drafting), draft_keys
            ) + self.hardware.drafting_request_s * len(drafting)
            now_s += (depth - 1) * self.draft(len(drafting), len(drafting), draft_keys)
            for index, context in drafting:
                seen[index] = context
        for index, take in enumerate(takes):
            if take is not None:
                first_s[index] = first_s[index] if emitted[index] else now_s
                emitted[index] += take + 1
                finish_s[index] = now_s
        return State(now_s, *map(tuple, (emitted, seen, first_s, finish_s)))


def tiny_load(seed, number, slos=True):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5 if number < 3 else 3, number)
    jobs = [
        Job(
            float(rng.choice([0.0, 0.005, 0.03])), int(rng.integers(1, 4)), int(length),
            float(rng.choice([0.008, 0.012, 0.02, 0.05])) if slos else None,
            float(rng.choice([0.011, 0.02, 0.04])) if slos else None,
        )
        for length in lengths
    ]  # fmt: skip
    texts = [
        SimulatedText(np.full((length, 1), 0.7), (rng.random(length) > 0.7).astype(np.int64))
        for length in lengths
    ]
    return jobs, Library(texts)


def bounds_of(jobs, library, hardware=TINY):
    return Bounds(jobs, library, hardware, MAX_DEPTH, 1, MAX_BATCH)


def num_attained(jobs, end, counts_ttft):
    """Return how many requests of a schedule attain their SLOs, by metric ``tpot``."""
    return sum(
        end.finish_s[i] - end.first_s[i] <= (job.tpot_slo_s or np.inf) * (job.output_tokens - 1)
        and (not counts_ttft or end.first_s[i] - job.arrival_s <= (job.ttft_slo_s or np.inf))
        for i, job in enumerate(jobs)
    )


@given(
    seed=SEEDS,
    number=st.integers(1, 3),
    keys=st.booleans(),
    drafting_s=st.sampled_from([0.0, 0.003]),
)
@settings(deadline=None, max_examples=25)
def test_no_schedule_of_a_tiny_load_exceeds_a_bound(seed, number, keys, drafting_s):
    jobs, library = tiny_load(seed, number)
    hardware = replace(TINY, drafting_request_s=drafting_s)
    if keys:
        hardware = replace(
            hardware, target=replace(hardware.target, per_key_s=1e-3, per_request_s=1e-3)
        )
    bounds = bounds_of(jobs, library, hardware)
    ends = list(Schedules(jobs, library, hardware).ends())
    latency_s = bounds.latency_s()
    seconds = bounds.seconds()
    assert (
        min(np.mean(np.subtract(end.finish_s, bounds.arrivals_s)) for end in ends)
        >= latency_s - 1e-9
    )
    assert min(max(end.finish_s) for end in ends) - bounds.arrivals_s.min() >= seconds - 1e-9
    best = max(num_attained(jobs, end, True) for end in ends) / number
    assert best <= bounds.attainment("tpot")
    patient = [
        replace(job, ttft_slo_s=None) for job in jobs
    ]  # to wait misses no SLO: the bound is exact
    exact = bounds_of(patient, library, hardware).attainment("tpot")
    # The bound leaves out what the draft processes of a prompt; here that is a token or two.
    free = replace(hardware, draft=replace(hardware.draft, curve=curve({1: 2.5}).curve))
    reached = (
        max(num_attained(patient, end, False) for end in Schedules(patient, library, free).ends())
        / number
    )
    assert bounds_of(patient, library, free).attainment("tpot") == reached >= exact


@pytest.mark.parametrize("ttft_slo_s", [0.4, pytest.param(None, marks=pytest.mark.nightly)])
def test_no_simulated_system_exceeds_a_bound(ttft_slo_s):
    rng = np.random.default_rng(5)
    hardware = HARDWARE["opt-13b-a100"]
    jobs = [
        Job(
            float(time_s),
            int(rng.integers(100, 1500)),
            int(rng.integers(1, 60)),
            rng.choice([0.02, 0.05]),
            ttft_slo_s,
        )
        for time_s in np.cumsum(rng.exponential(0.1, 25))
    ]
    library = Library([TextModel(0.7).write(rng, job.output_tokens) for job in jobs])
    bounds = Bounds(jobs, library, hardware, 12, 4, 256)
    for system in ("auto", "vllm", "oracle", "slos-serve"):
        run = Simulation(
            jobs, library, hardware, config_of(system), oracle=system == "oracle"
        ).run()
        for name, metric in METRICS.items():
            figures = run.summary(metric)
            assert figures["attainment"] <= bounds.attainment(name)
            assert figures["goodput"] <= bounds.goodput(name) <= bounds.throughput()
        assert run.summary()["latency_s"] >= bounds.latency_s()
        assert run.summary()["throughput"] <= bounds.throughput()


@given(
    points=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 90)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_lines_lie_below_the_cost(points):
    tokens = sorted(n for n, _ in points)
    milliseconds = sorted(ms for _, ms in points)
    cost = curve(dict(zip(tokens, map(float, milliseconds), strict=True)))
    sizes = np.arange(1, 1000)
    found = lines_below(cost)
    for line in found:
        assert line.fixed_s >= 0.0 and line.per_token_s >= 0.0
        assert (line.fixed_s + line.per_token_s * sizes <= cost(sizes) + 1e-12).all()
    assert found[0].fixed_s == cost.curve.seconds[0] and found[-1].fixed_s == 0.0


def test_what_cannot_be_bounded_is_refused():
    jobs, library = tiny_load(0, 2)
    with pytest.raises(InvalidInputError, match="got 1 requests, 2 texts"):
        Bounds(jobs[:1], library, TINY, 1, 1, 1)
    with pytest.raises(InvalidInputError, match="got 1, 0 and 4"):
        Bounds(jobs, library, TINY, 1, 0, 4)
    with pytest.raises(
        InvalidInputError, match="requests that follow others depend on the schedule"
    ):
        Bounds([jobs[0], replace(jobs[1], after=0)], library, TINY, 1, 1, 1)
    with pytest.raises(InvalidInputError, match="unknown metric 'itl'; known are: tpot"):
        Bounds(jobs, library, TINY, 1, 1, 1).attainment("itl")
