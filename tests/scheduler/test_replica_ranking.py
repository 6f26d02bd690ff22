"""Routing: the order in which replicas are asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.scheduler.load import (
    Need,
    ReplicaLoad,
    ranked,
    utilisation,
)
from tests.support.toys.trees import SEEDS

LINE = LatencyCurve((1, 1001), (0.02, 0.12))  # 20 ms and 0.1 ms a token
SLOS = st.sampled_from([0.0, 1e-9, 0.03, 0.1, math.inf])
NEEDS = st.builds(Need, st.integers(0, 5000), st.integers(1, 9000), SLOS, SLOS)
LOADS = st.builds(
    ReplicaLoad,
    guaranteed=st.dictionaries(SLOS, st.integers(1, 50), max_size=3).map(
        lambda counts: tuple(sorted(counts.items()))
    ),
    best_effort=st.integers(0, 9),
    prefill_tokens=st.integers(1, 10_000),
    kv_free=st.integers(-100, 20_000),
    step_s=st.just(LINE),
    acceptance_length=st.floats(1.0, 5.0),
    nodes=st.floats(1.0, 20.0),
    draft_s=st.floats(0.0, 0.1),
    output_tokens=st.floats(1.0, 1000.0),
)


@given(loads=st.lists(LOADS, min_size=1, max_size=6), need=NEEDS)
def test_every_replica_is_ranked_once_and_those_with_room_first(loads, need):
    order = ranked(loads, need)
    assert sorted(order) == list(range(len(loads))) and order == ranked(
        loads, need, [0] * len(loads)
    )
    if need.has_slo:
        has_room = [loads[index].kv_free >= need.kv_tokens for index in order]
        assert has_room == sorted(has_room, reverse=True)
    else:
        assert order[0] == min(
            range(len(loads)),
            key=lambda index: (
                loads[index].num_requests,
                loads[index].prefill_tokens,
                -loads[index].kv_free,
                index,
            ),
        )


@given(load=LOADS, need=NEEDS, number=st.integers(2, 5), data=st.data())
def test_reusable_prompt_tokens_attract_a_request(load, need, number, data):
    need = replace(need, tpot_slo_s=0.05)
    num_reusable = [0] * number
    index = data.draw(st.integers(0, number - 1))
    num_reusable[index] = data.draw(st.integers(1, max(need.prompt_tokens, 1)))
    expected = index if need.prompt_tokens else 0
    assert ranked([load] * number, need, num_reusable)[0] == expected


@given(
    load=LOADS,
    need=NEEDS,
    more=NEEDS,
    is_guaranteed=st.booleans(),
    number=st.integers(2, 4),
    data=st.data(),
)
def test_a_replica_with_more_to_do_comes_after_its_equals(
    load, need, more, is_guaranteed, number, data
):
    """Holds for linear step times; where a second token doubles a step and a third is free, it need
    not.
    """
    busier = data.draw(st.integers(0, number - 1))
    loads = [load] * number
    loads[busier] = load.with_request(
        replace(more, prompt_tokens=more.prompt_tokens + 1), is_guaranteed
    )
    slos = {slo_s for own in loads for slo_s, _ in own.guaranteed}
    if (
        not need.has_slo or min({need.tpot_slo_s, need.ttft_slo_s} | slos) >= 0.03
    ):  # others exceed the floats' precision
        assert ranked(loads, need)[-1] == busier


@given(load=LOADS, need=NEEDS, is_guaranteed=st.booleans())
def test_what_was_sent_is_part_of_the_load(load, need, is_guaranteed):
    later = load.with_request(need, is_guaranteed)
    assert later.num_requests == load.num_requests + 1
    assert later.prefill_tokens == load.prefill_tokens + need.prompt_tokens
    assert later.kv_free == load.kv_free - need.kv_tokens
    assert utilisation(later) >= utilisation(load) >= 0.0
    assert later.strain >= load.strain


def test_prompts_are_balanced_as_well_as_requests():
    """Two replicas with as many requests each: a request with a TTFT SLO is not put behind a long
    prompt.
    """
    load = ReplicaLoad(((0.1, 4),), step_s=LINE, kv_free=10**6)
    need = Need(100, 300, 0.1, 0.2)
    assert ranked([replace(load, prefill_tokens=4000), load], need) == [1, 0]


def test_loose_requests_are_kept_apart_from_tight_ones():
    """A large batch of loose requests takes a loose one, and the tight one goes to the other
    replica.
    """
    loose = ReplicaLoad(((0.5, 30),), nodes=8.0, step_s=LINE, kv_free=10**6)
    tight = ReplicaLoad(((0.03, 8),), nodes=8.0, step_s=LINE, kv_free=10**6)
    assert ranked([loose, tight], Need(10, 100, 0.03)) == [1, 0]
    assert ranked([loose, tight], Need(10, 100, 0.5)) == [0, 1]


@given(seed=SEEDS, sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=9, unique=True))
def test_a_curve_at_one_point_is_the_curve(seed, sizes):
    rng = np.random.default_rng(seed)
    curve = LatencyCurve(tuple(sorted(sizes)), tuple(np.sort(rng.random(len(sizes))).tolist()))
    for tokens in (0, 1, *sizes, *rng.uniform(0, 5000, 5).tolist()):
        assert curve(tokens) == curve(np.array([tokens]))[0]
