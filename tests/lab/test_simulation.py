"""Whole simulations: deterministic, exact, in order, within limits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.first_tokens import FirstTokens
from hf_slospec.engine.interfaces import Plan
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.hardware import Hardware, lines
from hf_slospec.lab.models import SlowedClock
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.policies.smartspec import SmartSpecPolicy
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import SYSTEMS, config_of
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job
from hf_slospec.policies.fixed import FixedPolicy
from tests.support.policy_names import POLICIES
from tests.support.toys.trees import SEEDS

HARDWARE = Hardware(lines((20.0, 0.1), per_key_ms=1e-4), lines((2.0, 0.01)), kv_tokens=5000)
CHECKED = '"check_invariants": true'


def library_of(jobs, seed=0):
    rng = np.random.default_rng(seed)
    return Library([TextModel(0.75).write(rng, job.output_tokens) for job in jobs])


class Watched(Simulation):
    """Keeps all steps, and checks that clocks go on."""

    def __init__(self, jobs, system="vllm", hardware=HARDWARE, **options):
        super().__init__(jobs, library_of(jobs), hardware, config_of(system), **options)
        self.events = list[StepEvent]()
        for replica in self.replicas:
            replica.step = self._kept(replica.step, replica.clock)

    def _kept(self, step, clock):
        def kept():
            before_s = clock.now_s
            event = step()
            assert event.begun_s == before_s < clock.now_s
            assert clock.now_s - before_s == pytest.approx(event.phases.total_s)
            self.events.append(event)
            return event

        return kept

    @property
    def tokens(self):
        return [routed.request.tokens for routed in self._requests]


def some_jobs(seed, number):
    rng = np.random.default_rng(seed)
    return [
        Job(
            float(time_s), int(rng.integers(1, 200)), int(rng.integers(1, 40)), rng.choice([None, 0.01, 0.06, 1.0]),
            rng.choice([None, 0.01, 1.0]), priority=int(rng.integers(3)),
        )
        for time_s in np.cumsum(rng.exponential(rng.choice([0.0, 0.05, 1.0]), number))
    ]  # fmt: skip


def check(jobs, simulation, run):
    assert len(run.outcomes) == len(jobs)
    for index, (job, outcome) in enumerate(zip(jobs, run.outcomes, strict=True)):
        assert outcome.index == index and outcome.output_tokens == job.output_tokens
        assert job.arrival_s < outcome.first_token_s <= outcome.finish_s
        assert simulation.tokens[index][job.input_tokens :] == [
            simulation.library.token(index, place) for place in range(job.output_tokens)
        ]
    assert sum(event.committed for event in simulation.events) == sum(
        job.output_tokens for job in jobs
    )
    assert run.totals.num_steps + run.totals.num_prefills == len(simulation.events)
    assert not any(replica.is_busy for replica in simulation.replicas)


@given(
    seed=SEEDS,
    number=st.integers(1, 8),
    system=st.sampled_from(sorted(SYSTEMS)),
    max_batch=st.sampled_from([1, 3, 64]),
    budget=st.sampled_from([1, 7, 64]),
    kv_tokens=st.sampled_from([300, 5000]),
    replicas=st.integers(1, 5),
)
@settings(deadline=None, max_examples=40)
def test_every_request_ends_with_its_text_under_every_system(
    seed, number, system, max_batch, budget, kv_tokens, replicas
):
    jobs = some_jobs(seed, number)
    limits = f'"max_batch": {max_batch}, "token_budget": {budget}, "kv_tokens": {kv_tokens}'
    simulation = Watched(
        jobs, f"{system} {{{CHECKED}, {limits}}}", replicas=replicas, seed=seed % 1000
    )
    simulation.library = library_of(jobs)
    check(jobs, simulation, simulation.run())


def test_every_policy_writes_the_same_tokens():
    jobs = some_jobs(3, 12)
    written = []
    for policy in POLICIES:
        simulation = Watched(jobs, f'{{"policy": "{policy}", {CHECKED}}}')
        simulation.library = library_of(jobs)
        check(jobs, simulation, simulation.run())
        written.append(simulation.tokens)
    assert all(tokens == written[0] for tokens in written)


@pytest.mark.parametrize("system", ["auto", "adaserve", "slos-serve"])
def test_everything_follows_from_the_seed(system):
    jobs = some_jobs(1, 15)
    runs = [Watched(jobs, system, replicas=2, seed=seed).run() for seed in (4, 4, 5)]
    assert runs[0].outcomes == runs[1].outcomes and runs[0].totals == runs[1].totals
    assert (
        system == "slos-serve" or runs[0].outcomes != runs[2].outcomes
    )  # other guesses off the true path


def test_one_request_alone_takes_the_sum_of_its_forwards():
    run = Watched([Job(5.0, 100, 6)]).run()
    prefill_s = float(HARDWARE.target(100, 1, 100))
    steps_s = [float(HARDWARE.target(1, 1, 100 + emitted)) for emitted in range(1, 6)]
    outcome = run.outcomes[0]
    assert outcome.first_token_s == pytest.approx(5.0 + prefill_s)
    assert outcome.finish_s == pytest.approx(5.0 + prefill_s + sum(steps_s))
    assert outcome.decode_begun_s == outcome.first_token_s
    assert outcome.tpot_s == pytest.approx(sum(steps_s) / 5)
    assert run.seconds == pytest.approx(prefill_s + sum(steps_s))


def test_first_come_first_served_feeds_prompts_before_anybody_decodes():
    simulation = Watched([Job(0.0, 10, 3), Job(0.001, 20, 2), Job(0.04, 30, 1)], "vllm")
    simulation.run()
    steps = [
        (event.prefill_tokens, [part.index for part in event.requests])
        for event in simulation.events
    ]
    assert steps == [
        (10, [0]),  # the others are not there yet
        (20, [1]),  # in place of decoding
        (30, [2]),  # which came meanwhile
        (0, [0, 1]),
        (0, [0]),
    ]


def test_chunked_prefill_never_exceeds_its_budget_in_a_mixed_step():
    jobs = [Job(0.1 * index, 400, 30) for index in range(8)]
    simulation = Watched(jobs, 'sarathi {"prefill_chunk": 64}')
    simulation.run()
    mixed = [event for event in simulation.events if event.num_decoding and event.prefill_tokens]
    assert mixed
    for event in simulation.events:
        assert sum(part.nodes for part in event.decoding) + event.prefill_tokens <= 64
    assert max(sum(p.nodes for p in event.decoding) + event.prefill_tokens for event in mixed) == 64


def test_lower_priorities_take_the_room_of_higher_ones():
    jobs = [Job(0.0, 10, 50, 1.0, priority=0), Job(0.5, 10, 5, 1.0, priority=-1)]
    for system, is_first in (("vllm-priority", 1), ("vllm", 0)):
        run = Watched(jobs, f'{system} {{"max_batch": 1}}').run()
        assert min(run.outcomes, key=lambda outcome: outcome.finish_s).index == is_first
        assert [outcome.preempted for outcome in run.outcomes] == [is_first, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_followers_arrive_after_the_end_of_another(replicas):
    jobs = [
        Job(0.0, 50, 10, 1.0),
        Job(0.5, 30, 5, 1.0, 2.0, after=0),
        Job(0.0, 20, 5, after=1),
        Job(0.1, 10, 4),
    ]
    simulation = Watched(jobs, "auto", replicas=replicas)
    first, second, third, other = simulation.run().outcomes
    assert (first.arrival_s, other.arrival_s) == (0.0, 0.1)
    assert second.arrival_s == first.finish_s + 0.5 and third.arrival_s == second.finish_s
    assert second.ttft_s == pytest.approx(second.first_token_s - second.arrival_s)
    assert sum(event.committed for event in simulation.events) == 24


def test_an_interrupt_while_tokens_are_chosen_ends_the_run():
    simulation = Watched([Job(0.0, 5, 50)])

    def interrupted(request, node):
        raise KeyboardInterrupt

    simulation.replicas[0].engine.target._choose = interrupted
    with pytest.raises(KeyboardInterrupt):
        simulation.run()


JOB = Job(0.0, 100, 50)


def test_make_policy_replaces_the_policy_of_the_config():
    jobs = some_jobs(0, 8)
    config = config_of(
        '{"policy": "none", "max_depth": 6, "max_width": 1}'
    )  # what it is called does not count

    def run(**options):
        return Simulation(jobs, library_of(jobs), HARDWARE, config, replicas=2, **options).run()

    own, named = (
        run(make_policy=SmartSpecPolicy),
        Simulation(
            jobs,
            library_of(jobs),
            HARDWARE,
            config.model_copy(update={"policy": "smartspec"}),
            replicas=2,
        ).run(),
    )
    assert own.outcomes == named.outcomes
    assert own.totals.nodes > run().totals.nodes


def test_plans_beyond_the_limits_of_a_custom_policy_are_refused():
    class Greedy(FixedPolicy):
        def plan(self, *given):
            return Plan(7, 1)

    config = config_of('{"policy": "none", "max_depth": 6, "max_width": 1}')
    with pytest.raises(
        InvalidInputError, match="depth 7 and width 1, but a request has room for 6"
    ):
        Simulation([JOB], library_of([JOB]), HARDWARE, config, make_policy=Greedy).run()


def test_a_machine_at_half_speed_for_a_minute_is_predicted_again_soon():
    jobs = [Job(0.0, 20, 7000) for _ in range(2)]
    watched = Watched(
        jobs,
        "auto",
        replace(HARDWARE, kv_tokens=50_000),
        new_clock=partial(SlowedClock, 10.0, 70.0),
    )
    watched.run()

    def errors(begin_s, end_s):
        within = [
            event
            for event in watched.events
            if begin_s <= event.begun_s < end_s and event.predicted_s
        ]
        return [abs(event.predicted_s / event.phases.total_s - 1.0) for event in within]

    assert np.median(errors(0.0, 10.0)) < 0.05
    assert errors(10.0, 11.0)[0] > 0.4  # the first step took twice what was expected
    assert np.median(errors(16.0, 70.0)) < 0.1
    assert len(errors(80.0, math.inf)) > 50 and np.median(errors(80.0, math.inf)) < 0.1
    is_drafting = [event.depth > 0 for event in watched.events if 5.0 < event.begun_s < 100.0]
    # half speed of both models changes no decision; a few looks are plain
    assert np.mean(is_drafting) > 0.95
    assert all(map(max, is_drafting, is_drafting[1:]))


def test_the_oracle_verifies_what_is_accepted_and_nobody_is_faster():
    jobs = [Job(0.0, 20, 60) for _ in range(6)]
    oracle = Watched(jobs, "oracle", oracle=True)
    run = oracle.run()
    assert run.totals.nodes == run.totals.committed == run.totals.expected
    assert (
        sum(outcome.drafted for outcome in run.outcomes)
        == sum(outcome.accepted for outcome in run.outcomes)
        > 0
    )
    for system in ("vllm-spec4", "auto", "vllm", '{"policy": "sequoia"}'):
        other = Watched(jobs, system)
        assert run.seconds < other.run().seconds
        assert other.tokens == oracle.tokens


def test_thinking_ends_at_a_marker_and_each_stage_has_its_own_slo():
    job = Job(0.0, 50, 60, 0.5, think_tokens=40, think_tpot_slo_s=0.01, answer_ttft_slo_s=0.03)
    (slow,) = Watched([job]).run().outcomes  # a step takes 20 ms
    assert slow.attained is False and slow.tpot_slo_s == 0.5 and slow.think_tokens == 40
    assert METRICS["slos-serve"](slow) is False and METRICS["adaserve"](slow) is False
    simulation = Watched([replace(job, think_tpot_slo_s=0.03)])
    (outcome,) = simulation.run().outcomes
    assert outcome.attained is True and METRICS["slos-serve"](outcome) is True
    paces = [part.tpot_slo_s for event in simulation.events for part in event.requests]
    assert paces == [0.03] * 40 + [0.5] * 20
    (late,) = Watched([replace(job, think_tpot_slo_s=0.03, answer_ttft_slo_s=0.01)]).run().outcomes
    assert late.attained is False


@pytest.mark.parametrize("kv_tokens", [5000, 420])
@pytest.mark.parametrize("system", ["vllm", "auto"])
def test_a_pause_keeps_kv_while_there_is_room(kv_tokens, system):
    hardware = replace(HARDWARE, kv_tokens=kv_tokens)
    jobs = [
        Job(0.0, 200, 10),
        Job(2.0, 240, 10, after=0, continues=True),
        Job(1.0, 250, 10, 1.0, 1.0),  # during the pause
    ]
    simulation = Watched(jobs, system, hardware)
    first, second, other = simulation.run().outcomes
    is_kept = kv_tokens == 5000
    assert second.arrival_s == first.finish_s + 2.0 > other.finish_s
    assert (first.reused, second.reused) == (0, 209 if is_kept else 0)
    prefills = [event.prefill_tokens for event in simulation.events if event.prefill_tokens]
    assert sum(prefills) == 200 + 250 + 240 - second.reused
    assert (second.ttft_s < first.ttft_s) == is_kept


def test_first_tokens_are_in_time_though_others_are_drafted_for(monkeypatch):
    rng = np.random.default_rng(5)
    jobs = [
        Job(float(time_s), 40, 150, 0.2, 0.055) for time_s in np.cumsum(rng.exponential(0.3, 25))
    ]
    missed = []
    depths = []
    for is_watched in (True, False):
        if not is_watched:
            monkeypatch.setattr(FirstTokens, "begin", lambda self, due_s, own_s: None)
        run = Watched(jobs, "auto").run()
        missed.append(sum(outcome.ttft_s > 0.055 for outcome in run.outcomes))
        depths.append(run.summary()["depth"])
    assert missed[0] <= 1 and missed[1] >= 5, missed
    assert depths[0] > 0.5, depths


def test_first_tokens_change_nothing_without_ttft_slos(monkeypatch):
    rng = np.random.default_rng(6)
    jobs = [Job(float(time_s), 40, 60, 0.03) for time_s in np.cumsum(rng.exponential(0.2, 12))]
    run = Watched(jobs, "auto").run()
    monkeypatch.setattr(FirstTokens, "begin", lambda self, due_s, own_s: None)
    assert Watched(jobs, "auto").run().outcomes == run.outcomes
