"""Routers of simulated replicas: nothing is lost, nothing happens before its time, and ours does
better.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.outcomes import Run
from hf_slospec.lab.systems import (
    MAX_HOPS,
    OURS,
    ROUTERS,
    WITHOUT_SLO,
    Arrival,
    router_of,
    sequential,
)
from hf_slospec.lab.workload import Job
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.load import Need, ReplicaLoad
from tests.lab.test_simulation import CHECKED, Watched, check, library_of, some_jobs
from tests.support.toys.trees import SEEDS


class Offered(Watched):
    """Keeps which replicas each request was passed to, with when they decide and when it arrived at
    the router.
    """

    def __init__(self, jobs, system, **options):
        super().__init__(jobs, system, **options)
        self.passed: dict[int, list[tuple[int, float, float]]] = {}
        for index, replica in enumerate(self.replicas):
            replica.add = self._noted(replica.add, index)

    def _noted(self, method, index):
        def noted(request, now_s, *given):
            done = method(request, now_s, *given)
            self.passed.setdefault(request.index, []).append(
                (index, self.replicas[index].clock.now_s, now_s)
            )
            return done

        return noted


@given(
    seed=SEEDS,
    number=st.integers(1, 10),
    replicas=st.integers(2, 5),
    router=st.sampled_from(sorted(ROUTERS)),
)
@settings(deadline=None, max_examples=30)
def test_every_request_is_served_once_by_every_router(seed, number, replicas, router):
    jobs = some_jobs(seed, number)
    simulation = Offered(
        jobs, f"auto {{{CHECKED}}}", replicas=replicas, router=router, seed=seed % 1000
    )
    simulation.library = library_of(jobs)
    run = simulation.run()
    check(jobs, simulation, run)
    for job, outcome in zip(jobs, run.outcomes, strict=True):
        passed = simulation.passed[outcome.index]
        refused_by = [replica for replica, *_ in passed[:-1]]
        assert passed[-1][0] == outcome.replica and outcome.reroutes == len(refused_by)
        most = {OURS: replicas, "sequential": min(replicas, MAX_HOPS + 1)}.get(router, 0)
        assert len(refused_by) <= most
        assert len({*refused_by}) == len(refused_by)
        arrives_s = job.arrival_s
        for (
            _,
            decides_s,
            now_s,
        ) in passed:  # each replica decides after its present step, and the next is asked then
            assert decides_s >= now_s == arrives_s
            arrives_s = decides_s
        assert outcome.first_token_s > passed[-1][1]


@pytest.mark.parametrize("router", sorted(set(ROUTERS) - {OURS}))
def test_one_replica_needs_no_router(router):
    jobs = some_jobs(5, 10)
    assert (
        Watched(jobs, "auto", router=router).run().outcomes == Watched(jobs, "auto").run().outcomes
    )


def test_a_request_that_none_guarantees_is_offered_to_all_and_served():
    jobs = [Job(0.1 * index, 50, 20, tpot_slo_s=0.001) for index in range(6)]
    run = Watched(jobs, replicas=3, system="auto").run()
    assert [outcome.reroutes for outcome in run.outcomes] == [3] * 6
    assert run.not_guaranteed == 6 and not any(outcome.guaranteed for outcome in run.outcomes)


@pytest.mark.parametrize(("num_replicas", "asked"), [(2, 2), (3, 3), (6, MAX_HOPS + 1)])
def test_the_sequential_router_goes_round_and_moves_on_a_limited_number_of_times(
    num_replicas, asked
):
    choose = sequential(0)
    loads = loads_of(*[0] * num_replicas)

    def asked_of(is_guaranteed_by, has_slo=True):
        """Replicas that are asked until one takes the request, and whether it stays as best effort."""
        refused: list[int] = []
        while True:
            need = Need(1, 1, tpot_slo_s=0.1) if has_slo else WITHOUT_SLO
            request = Request(0, RequestParams([1], 1))
            choice = choose(Arrival(request, need, loads, refused, (), 0.0))
            if not choice.may_refuse or choice.replica == is_guaranteed_by:
                return [*refused, choice.replica][
                    : len(refused) + choice.may_refuse
                ], not choice.may_refuse
            refused.append(choice.replica)

    assert asked_of(0) == ([0], False)
    assert asked_of(None) == (
        [(1 + hop) % num_replicas for hop in range(asked)],
        True,
    )  # the second one begins at the next
    assert asked_of(0, has_slo=False) == ([], True)  # nobody is asked


def test_many_requests_at_once_are_guaranteed_as_far_as_there_is_room():
    """More than one decision of the dynamic programme takes are decided one after the other, none
    unexamined.
    """
    jobs = [Job(0.0, 50, 20, tpot_slo_s=5.0) for _ in range(60)]
    run = Watched(jobs, replicas=2, system="auto").run()
    assert run.not_guaranteed == 0 and all(outcome.reroutes == 0 for outcome in run.outcomes)
    assert {outcome.replica for outcome in run.outcomes[:2]} == {0, 1}


def test_requests_without_slos_go_to_the_least_loaded_replica():
    run = Watched(
        [Job(0.001 * index, 50, 20) for index in range(6)], replicas=3, system="auto"
    ).run()
    assert [outcome.replica for outcome in run.outcomes] == [0, 1, 2, 0, 1, 2]


def test_ours_keeps_short_prompts_away_from_long_ones():
    """Every second, long prompts come to two replicas, and short ones whose first tokens are due
    soon.
    """
    jobs = []
    for second in range(8):
        jobs += [Job(second + 0.001 * place, 1500, 5, 1.0, 2.0) for place in range(2)]
        jobs += [Job(second + 0.05 + 0.02 * place, 10, 5, 1.0, 0.1) for place in range(6)]

    def attained(router):
        run: Run = Watched(jobs, 'auto {"prefill_chunk": 2048}', replicas=3, router=router).run()
        return float(np.mean([outcome.attained for outcome in run.outcomes]))

    found = {router: attained(router) for router in ROUTERS}
    assert found[OURS] == 1.0
    assert all(
        found[router] < 0.9 for router in ("shortest-queue", "power-of-two", "round-robin")
    ), found


def loads_of(*counts):
    return [ReplicaLoad(best_effort=count) for count in counts]


def test_baselines_count_requests():
    def chosen(name, *counts):
        router = router_of(name, 0)
        request = Request(0, RequestParams([1], 1))
        arrival = Arrival(request, WITHOUT_SLO, loads_of(*counts), (), (), 0.0)
        return {router(arrival).replica for _ in range(50)}

    assert chosen("shortest-queue", 3, 1, 2, 1) == {1}
    assert chosen("power-of-two", 3, 1, 2) == {1, 2}  # the longest is never the shorter of two


def test_unknown_routers_are_refused():
    with pytest.raises(InvalidInputError, match="unknown router 'x'; known are: guarantees"):
        Watched(some_jobs(0, 1), replicas=2, router="x")
