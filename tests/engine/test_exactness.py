"""Every policy on an exact toy model: the tokens of plain decoding, and consistent step events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.breadth import quick_or
from tests.support.policy_names import POLICIES
from tests.support.toys.engine import decode_plainly, policy_of, run
from tests.support.toys.models import (
    STOP,
    VOCAB,
    Clock,
    ToyDrafter,
    ToyTarget,
    engine_of,
    greedy,
    sampled,
)
from tests.support.toys.trees import SEEDS, markov_model


def random_stages(rng):
    """One to three, that end after some tokens or with one that is even."""
    targets = rng.choice([None, 0.01, 0.8, 10.0], rng.integers(1, 4)).tolist()
    ends = [
        (dict(num_tokens=3), dict(is_over=lambda tokens: tokens[-1] % 2 == 0))[rng.integers(2)]
        for _ in targets
    ]
    return tuple(Stage(tpot_slo_s, **end) for tpot_slo_s, end in zip(targets, ends, strict=True))


def random_requests(rng, num_requests, stops=True):
    return [
        Request(
            index,
            RequestParams(
                rng.integers(0, VOCAB, rng.integers(2, 6)).tolist(),
                int(rng.integers(1, 16)),
                random_stages(rng),
                is_stop=(lambda tokens: tokens[-1] == STOP) if stops else (lambda tokens: False),
            ),
        )
        for index in range(num_requests)
    ]


def check_events(events, requests):
    """What happened in the steps adds up to what requests say of themselves."""
    for event in events:
        assert event.nodes == sum(part.nodes for part in event.requests)
        assert event.committed == sum(part.committed for part in event.requests)
        assert event.depth or event.nodes == len(event.requests)
    for request in requests:
        metrics = request.metrics()
        parts = []
        phases = PhaseTimes()
        expected = 0.0
        for event in events:
            own = [part for part in event.requests if part.index == request.index]
            if own:
                parts += own
                phases += event.phases
                expected += 0.0 if event.is_prefill else own[0].expected
        assert sum(part.committed for part in parts) == metrics.tokens
        assert sum(part.nodes - 1 for part in parts) == metrics.drafted
        assert all(1 <= part.committed <= part.nodes for part in parts)
        assert {part.tpot_slo_s for part in parts} <= {
            stage.tpot_slo_s for stage in request.params.stages
        }
        assert metrics.phases == phases
        assert metrics.expected_tokens == pytest.approx(expected)


@given(
    seed=SEEDS,
    num_requests=st.integers(1, 6) | st.integers(7, 20),
    is_sampled=st.booleans(),
    likeness=st.sampled_from([0.0, 0.7, 1.0]),
    policy_name=st.sampled_from(POLICIES),
    max_depth=st.integers(0, 5),
    max_width=st.integers(1, 4),
    token_budget=st.none() | st.integers(1, 40),
    order=st.sampled_from(["ascending", "descending"]),
    tick_s=st.sampled_from([0.0, 0.1]),
)
@settings(deadline=None, max_examples=quick_or(40, 120))
def test_every_request_gets_what_plain_decoding_gives(
    seed,
    num_requests,
    is_sampled,
    likeness,
    policy_name,
    max_depth,
    max_width,
    token_budget,
    order,
    tick_s,
):
    rng = np.random.default_rng(seed)
    target = markov_model(rng, VOCAB)
    other = markov_model(rng, VOCAB)
    choose = sampled(target, seed) if is_sampled else greedy(target)
    requests = random_requests(rng, num_requests)
    expected = [decode_plainly(choose, request) for request in requests]

    own = dict(slo_order=order) if policy_name == "adaserve" else {}
    config = SLOSpecConfig(
        policy=policy_name,
        max_depth=max_depth,
        max_width=max_width,
        token_budget=token_budget,
        **own,
    )
    policy = policy_of(config)
    toy = ToyTarget(choose)
    drafter = ToyDrafter(
        lambda tokens: likeness * target(tokens) + (1.0 - likeness) * other(tokens)
    )
    events = run(engine_of(requests, toy, drafter, policy, Clock(tick_s=tick_s)))

    assert [request.tokens for request in requests] == expected
    assert (
        sorted(r.index for r in toy.released)
        == sorted(r.index for r in drafter.released)
        == [*range(num_requests)]
    )
    for step in toy.steps:
        if policy_name in ("auto", "adaserve"):
            assert sum(tree.num_nodes for _, tree, _ in step) <= max(policy.budget, len(step))
        # Deeper nodes could not be committed.
        assert all(tree.max_depth < num_left for _, tree, num_left in step)
    for request in requests:
        metrics = request.metrics()
        own = [tree for step in toy.steps for r, tree, _ in step if r is request]
        assert metrics.tokens == len(request.tokens) - request.prompt_len
        # Also when the request stops inside a walk.
        assert metrics.tokens == 1 + metrics.steps + metrics.accepted
        assert metrics.steps == len(own) - 1  # the prefill is no step
        assert metrics.drafted == sum(tree.num_nodes - 1 for tree in own) >= metrics.accepted
    check_events(events, requests)
