"""The batcher in simulated schedules of users, faults and times; ``scripts/simulate_faults.py``
runs more of them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from hf_slospec.model.kv_cache import KVPool
from hf_slospec.scheduler.continuous import Limits
from scripts import simulate_faults
from tests.support.breadth import quick_or
from tests.support.simulation.batcher import Simulation, fault_of, simulate
from tests.support.simulation.schedules import (
    Fault,
    Generate,
    Job,
    Stop,
    schedule_of,
    shrunk,
)

# 7 to 18 ms each, on fast and on busy cores
SEEDS = 2_000
BLOCKS = 4


@pytest.fixture(autouse=True)
def _no_messages():
    logging.disable(logging.CRITICAL)  # injected errors would be logged
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, BLOCKS))]
)
def test_every_schedule_gives_what_plain_decoding_gives(block):
    for seed in range(block, quick_or(SEEDS // 2, SEEDS), BLOCKS):
        if (error := fault_of(schedule_of(seed))) is not None:
            raise AssertionError(
                f"seed {seed} fails; run scripts/simulate_faults.py --seeds {seed}:{seed + 1}"
            ) from error


@pytest.mark.parametrize("seed", [3, 71, 118])
def test_a_seed_always_gives_the_same_run(seed):
    runs = []
    for _ in range(2):
        simulation = Simulation(schedule_of(seed))
        simulation.run()
        outcomes = [
            (own.handle.token_ids, own.handle.finish_reason, own.seen)
            for own in simulation.submitted
        ]
        runs.append(
            (outcomes, simulation.world.now_s, [point for point, _ in simulation.world.struck])
        )
    assert runs[0] == runs[1]


PLAIN = replace(
    schedule_of(0), max_queue=100, admission="slo", prefill="beside", policy="whole", depth=2, width=2, num_batchers=1,
    has_assistant=True, faults=(), users=(), seconds=(1.0,), limits=Limits(2, 404, 4, 16, 20.0), kept=float("inf"),
    switching=0.9,
)  # fmt: skip
MEMORY_POINTS = ("target pool", "target move", "target copy", "target forward", "sampler")
DRAFT_POINTS = ("draft pool", "draft copy", "draft forward")
JOB = Job(family=0, prompt_len=24, own_tokens=2, new=30)


def simulated(*faults, jobs=3, **changes):
    """Run jobs of as many users under faults; what is wrong with them raises."""
    users = tuple((replace(JOB, own_tokens=number, consumer="tokens"),) for number in range(jobs))
    simulation = Simulation(replace(PLAIN, users=users, faults=faults, **changes))
    simulation.run()
    return simulation


MEMORY = [
    (point, kind) for point in (*MEMORY_POINTS, *DRAFT_POINTS) for kind in ("memory", "torch")
]
HARMLESS = [
    *MEMORY,
    *((point, "memory") for point in ("plan", "select", "learn")),
    ("on_step", "observer"),
    ("on_end", "observer"),
]


@pytest.mark.parametrize(("point", "kind"), HARMLESS)
def test_memory_that_runs_short_and_errors_of_the_observer_end_nothing(point, kind):
    num_struck = 0
    for number in range(quick_or(3, 6)):
        simulation = simulated(Fault(point, number, kind))
        num_struck += len(simulation.world.struck)
        assert [own.handle.finish_reason for own in simulation.submitted] == ["length"] * 3
    assert num_struck


def test_memory_that_stays_short_while_committing_ends_nothing(monkeypatch):
    monkeypatch.setattr("hf_slospec.engine.step.PAUSE", 1)  # so that drafting soon goes on
    simulation = simulated(*(Fault("target move", number, "torch") for number in range(100)))
    assert len(simulation.world.struck) > 1
    assert [own.handle.finish_reason for own in simulation.submitted] == ["length"] * 3


@pytest.mark.parametrize("admission", ["slo", "fcfs"])
@pytest.mark.parametrize("has_assistant", [True, False])
def test_where_texts_fill_the_slots_they_are_decoded_without_drafts(has_assistant, admission):
    """Requests enter with room for the nodes of recent steps, and later steps draft more (seeds
    1670 and 13280).
    """
    first = replace(JOB, own_tokens=0, new=5, ttft_slo_s=1e7)
    jobs = [first, replace(JOB, prompt_len=42, own_tokens=5, new=2, tpot_slo_s=1e3)]
    plan = replace(
        PLAIN,
        limits=Limits(4, 73, 3, 16, 20.0),
        depth=3,
        width=1,
        users=tuple((job,) for job in jobs),
    )
    for seed in range(quick_or(4, 8)):
        simulation = Simulation(
            replace(plan, seed=seed, has_assistant=has_assistant, admission=admission)
        )
        simulation.run()
        assert [own.handle.finish_reason for own in simulation.submitted] == ["length"] * 2
        assert simulation.servers[0].most_running == 2


def test_batchers_and_generate_on_one_model_take_turns_whatever_their_load():
    """Each of them waits for one step of every other, or two where it came late; their K/V lies in
    one pool.
    """
    light = (replace(JOB, consumer="tokens", batcher=1),)
    heavy = tuple(
        replace(JOB, own_tokens=number, family=number % 2, consumer="none") for number in range(5)
    )
    plan = replace(PLAIN, num_batchers=2, users=(light, heavy, heavy, (Generate((JOB,)),)))
    for seed in range(3):
        simulation = Simulation(replace(plan, seed=seed))
        simulation.run()
        turns = simulation.engines.turns
        places = {
            user: [place for place, other in enumerate(turns) if other is user] for user in {*turns}
        }
        gaps = [after - before for own in places.values() for before, after in pairwise(own)]
        assert len(places) == 3 and max(gaps) <= 2 * 3
        first = sorted(places.values(), key=len)[0]
        last = max(places.values(), key=len)
        assert len(last) > 3 * len(first)
        assert first[-1] < last[len(last) // 2]  # few steps are over long before many are


@pytest.mark.parametrize("in_criterion", [False, True])
def test_errors_of_a_requests_own_end_it_alone(in_criterion):
    jobs = (
        replace(JOB, consumer="none", fails_at=3, in_criterion=in_criterion),
        replace(JOB, consumer="none"),
    )
    simulation = Simulation(replace(PLAIN, users=(jobs,)))
    simulation.run()
    assert [own.handle.finish_reason for own in simulation.submitted] == ["error", "length"]


@pytest.mark.parametrize("point", ["target forward", "draft forward", "target move"])
def test_when_the_engine_dies_every_request_ends_with_its_error(point):
    simulation = simulated(Fault(point, 2, "fatal"))
    ((_, error),) = simulation.world.struck
    assert {own.handle.request.error for own in simulation.submitted} == {error}


def test_when_the_engine_dies_and_the_observer_fails_too_every_request_ends():
    simulation = simulated(Fault("target forward", 2, "fatal"), Fault("on_end", 0, "observer"))
    assert len(simulation.world.struck) == 2


def test_an_engine_that_cannot_close_ends_every_request():
    users = ((replace(JOB, consumer="none"), Stop(drain=False, timeout=None)),)
    simulation = Simulation(replace(PLAIN, users=users, faults=(Fault("close", 0, "fatal"),)))
    simulation.run()
    ((_, error),) = simulation.world.struck
    assert [own.handle.request.error for own in simulation.submitted] == [error]


def test_failing_schedules_are_found_and_shrunk(monkeypatch):
    """K/V that is moved to wrong slots changes later tokens."""
    monkeypatch.setattr(KVPool, "move", lambda pool, source, destination: None)
    failing = next(plan for seed in range(1000) if fault_of(plan := schedule_of(seed)) is not None)
    smaller = shrunk(failing, lambda plan: fault_of(plan) is not None)
    assert isinstance(fault_of(smaller), AssertionError)
    assert size_of(smaller) < size_of(failing) or size_of(failing) == 1
    assert not smaller.faults


def test_the_script_runs_what_its_log_lacks(tmp_path, monkeypatch):
    app = typer.Typer()
    log = tmp_path / "log"
    ran = []
    app.command()(simulate_faults.main)
    monkeypatch.setattr(
        simulate_faults, "simulate", lambda plan: ran.append(plan.seed) or simulate(plan)
    )
    monkeypatch.setattr(simulate_faults, "provenance", lambda: {"commit": "abc"})
    monkeypatch.setattr(simulate_faults, "RANGE", 2)
    first, second = (
        CliRunner().invoke(app, ["--seeds", seeds, "--log", str(log)]) for seeds in ("0:4", "0:6")
    )
    assert first.exit_code == second.exit_code == 0, second.output
    assert ran == [0, 1, 2, 3, 4, 5]
    whole = log.read_text()
    log.write_text(whole + whole[:20])  # as the process that wrote it was ended
    third = CliRunner().invoke(app, ["--seeds", "0:8", "--log", str(log), "--counts"])
    assert (
        ran[6:] == [6, 7]
        and "steps that decode" in third.output
        and "0 of 8 schedules failed" in third.output
    )
    assert log.read_text().startswith(whole) and log.read_text().count("\n") == 4


def size_of(plan):
    return sum(map(len, plan.users)) + len(plan.faults)
