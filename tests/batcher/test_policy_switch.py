"""Policies that are switched while requests run."""

from __future__ import annotations

import pytest

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecGenerator,
)
from tests.support.breadth import quick_or
from tests.support.policy_names import POLICIES
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S, alone

SWITCHED = [
    SLOSpecConfig(policy="none"),
    SLOSpecConfig(policy="fixed", max_depth=4, max_width=1),
    SLOSpecConfig(policy="adaserve"),
    SLOSpecConfig(policy="auto"),
    SLOSpecConfig(policy="auto", max_depth=3),
]


def test_switching_the_policy_loses_and_changes_nothing_that_runs(pair):
    expected = [alone(pair, prompt, max_new_tokens=quick_or(40, 80)) for prompt in PROMPTS[:3]]
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        handles = [
            generator.submit(prompt, max_new_tokens=quick_or(40, 80)) for prompt in PROMPTS[:3]
        ]
        stream = handles[0].tokens()
        for config in SWITCHED:
            generator.set_policy(config)
            for _ in range(8):
                next(stream)
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected


def test_a_policy_stays_set_over_stop_and_start_and_must_fit(pair):
    generator = SLOSpecGenerator(*pair, CONFIG)
    generator.set_policy(SWITCHED[0])
    for _ in range(2):
        with generator:
            assert (
                generator.submit(PROMPTS[0], max_new_tokens=9).result(WAIT_S).metrics.drafted == 0
            )
    with generator:
        generator.set_policy(SWITCHED[1])
        assert generator.submit(PROMPTS[0], max_new_tokens=9).result(WAIT_S).metrics.drafted > 0
        with pytest.raises(InvalidInputError, match="room"):
            generator.set_policy(SLOSpecConfig(max_depth=100))


def test_policies_are_set_by_name_with_the_limits_of_the_generator(pair):
    with SLOSpecGenerator(*pair, CONFIG.model_copy(update={"token_budget": 30})) as generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=20 * len(POLICIES))
        stream = handle.tokens()
        for name in POLICIES:
            generator.set_policy(name)
            next(stream)
            policy = generator.decoder.batcher_config
            assert (policy.policy, policy.token_budget) == (name, 30)
        with pytest.raises(InvalidInputError, match="no policy 'nothing'; choose among 'auto'"):
            generator.set_policy("nothing")
        with pytest.raises(InvalidTypeError, match="name of a policy, got NoneType"):
            generator.set_policy(None)
        handle.cancel()
