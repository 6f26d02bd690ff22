"""A user's own policy: output equals stock's, and its errors are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    Plan,
    Policy,
    Request,
    Selection,
    SLOSpecConfig,
    SLOSpecGenerator,
    TokenTree,
    disable,
    enable,
)
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

CONFIG = SLOSpecConfig(max_depth=4, max_width=2)


class Odd:
    """Drafts for every other request, as much as there is room for."""

    made: list[Odd] = []  # noqa: RUF012

    def __init__(self, config, costs):
        assert costs.verify_s(8) > 0
        self.config = config
        self.steps = 0
        Odd.made.append(self)

    def plan(self, requests, begun_s, num_prefill_tokens=0):
        depth = min(self.config.max_depth, *(max(request.num_left - 1, 0) for request in requests))
        return Plan(depth, self.config.max_width, drafting=requests[::2])

    def select(self, requests, candidates, plan):
        return Selection(candidates, [float(tree.path_probs.sum()) for tree in candidates])

    def observe(self, requests, accepted, phases):
        self.steps += 1


def test_own_policy():
    Odd.made.clear()
    model = tiny_model("llama")
    draft = tiny_model("llama", noise=0.03)
    inputs = ragged_prompts(3)
    gen = SLOSpecGenerator(model, draft, config=CONFIG, make_policy=Odd)
    for do_sample in (False, True):
        out = assert_same_as_stock(
            model, gen.generate, inputs, do_sample=do_sample, max_new_tokens=24
        )
        assert [metrics.drafted > 0 for metrics in out.slo] == [True, False, True]
    assert len(Odd.made) == 2 and all(policy.steps for policy in Odd.made)
    enable(model, draft, config=CONFIG, make_policy=Odd)
    try:
        assert_same_as_stock(
            model, lambda **k: model.generate(**k, slo_tpot=0.1), inputs, max_new_tokens=9
        )
    finally:
        disable(model)
    assert len(Odd.made) == 3


class InSteps(Policy):
    """Keeps what it needs from its plan to the outcome in local variables."""

    made: list[InSteps] = []  # noqa: RUF012

    def __init__(self, config, costs):
        self.config = config
        self.accepted = 0
        InSteps.made.append(self)

    def step(self, requests, begun_s, num_prefill_tokens=0):
        planned, number = (
            Plan(max(min(request.num_left for request in requests) - 1, 0), 1),
            len(requests),
        )
        candidates, plan = yield planned
        assert plan == planned and len(candidates) == number
        accepted, phases = yield Selection(
            candidates, [float(tree.path_probs.sum()) for tree in candidates]
        )
        assert phases.verify_s > 0.0
        self.accepted += sum(map(len, accepted))


def test_a_policy_whose_step_is_a_generator():
    InSteps.made.clear()
    config = SLOSpecConfig(max_depth=24, max_width=1)
    model = tiny_model("llama")
    draft = tiny_model("llama", noise=0.03)
    inputs = ragged_prompts(3)
    gen = SLOSpecGenerator(model, draft, config=config, make_policy=InSteps)
    out = assert_same_as_stock(model, gen.generate, inputs, max_new_tokens=24)
    assert InSteps.made[0].accepted == sum(metrics.accepted for metrics in out.slo) > 0


def test_a_policy_of_the_base_class_needs_to_observe_nothing_and_precedes_the_configs():
    config = SLOSpecConfig(policy="none", max_depth=4, max_width=2)

    class Brief(Policy):
        plan = Odd.plan
        select = Odd.select

        def __init__(self, config, costs):
            self.config = config

    gen = SLOSpecGenerator(
        tiny_model("llama"), tiny_model("llama"), config=config, make_policy=Brief
    )
    out = gen.generate(**ragged_prompts(1), max_new_tokens=9, return_dict_in_generate=True)
    assert out.slo[0].accepted > 0


@pytest.mark.parametrize(
    ("decisions", "why"),
    [
        ([], "policy.plan returned NoneType, where hf_slospec.Plan"),
        ([Selection([], [])], "policy.plan returned Selection, where hf_slospec.Plan"),
        ([Plan(1, 1)], "policy.select returned NoneType, where hf_slospec.Selection"),
        ([Plan(1, 1), Plan(1, 1)], "policy.select returned Plan, where hf_slospec.Selection"),
    ],
)
def test_what_is_wrong_with_a_generator_is_said(decisions, why):
    class Broken(Policy):
        def step(self, *_):
            for decision in decisions:  # noqa: UP028  a list cannot be sent anything
                yield decision

    gen = SLOSpecGenerator(
        tiny_model("llama"),
        tiny_model("llama"),
        config=CONFIG,
        make_policy=lambda config, costs: Broken(),
    )
    with pytest.raises(InvalidInputError, match=why):
        gen.generate(**ragged_prompts(1), max_new_tokens=9)


def test_in_the_batcher_until_another_is_set():
    Odd.made.clear()
    gen = SLOSpecGenerator(
        tiny_model("llama"), tiny_model("llama", noise=0.03), config=CONFIG, make_policy=Odd
    )
    with gen:
        first = gen.submit([5, 6, 7], max_new_tokens=9).result(60)
        steps = Odd.made[0].steps
        gen.set_policy(SLOSpecConfig(policy="none"))
        second = gen.submit([5, 6, 7], max_new_tokens=9).result(60)
    assert first.token_ids == second.token_ids
    assert Odd.made[0].steps == steps > 0 and len(Odd.made) == 1


ROOT = TokenTree.root_only
BROKEN_PLANS: dict[str, Any] = {
    "NoneType, where hf_slospec.Plan": lambda requests: None,
    "depth 5 and width 2": lambda requests: Plan(5, 2),
    "width 0": lambda requests: Plan(1, 0),
    "depth 1.5": lambda requests: Plan(1.5, 1),
    "depth nan": lambda requests: Plan(float("nan"), 1),
    "a request twice": lambda requests: Plan(1, 1, drafting=[*requests, *requests]),
    "lets 1 requests decode": lambda requests: Plan(
        1, 1, decoding=[Request(99, requests[0].params)]
    ),
    "lets 0 requests decode": lambda requests: Plan(1, 1, decoding=[]),
    "do not decode": lambda requests: Plan(1, 1, drafting=[Request(99, requests[0].params)]),
}
BROKEN_SELECTIONS: dict[str, Any] = {
    "list, where hf_slospec.Selection": lambda requests, trees: trees,
    "0 trees": lambda requests, trees: Selection([], []),
    "0 expectations": lambda requests, trees: Selection(trees, []),
    "not finite": lambda requests, trees: Selection(trees, [float("nan")]),
    "seconds that are not finite": lambda requests, trees: Selection(trees, [1.0], None),
    "made of numpy arrays": lambda requests, trees: Selection(
        [TokenTree([requests[0].tokens[-1]], [-1], [0], [1.0])], [1.0]
    ),
    "integers but for": lambda requests, trees: Selection(
        [replace(trees[0], tokens=trees[0].tokens / 1.0)], [1.0]
    ),
    "root is not": lambda requests, trees: Selection([ROOT(requests[0].tokens[-1] + 1)], [1.0]),
    "outside 0": lambda requests, trees: Selection(
        [TokenTree.chain(requests[0].tokens[-1], [101], 0.5)], [1.0]
    ),
    "room for 8": lambda requests, trees: Selection(
        [TokenTree.chain(requests[0].tokens[-1], [5] * 9, 0.5)], [1.0]
    ),
}


@pytest.mark.parametrize("why", [*BROKEN_PLANS, *BROKEN_SELECTIONS])
def test_what_is_wrong_with_its_decisions_is_said(why):
    class Broken(Odd):
        def plan(self, requests, begun_s, num_prefill_tokens=0):
            return BROKEN_PLANS[why](requests) if why in BROKEN_PLANS else Plan(1, 1)

        def select(self, requests, candidates, plan):
            return BROKEN_SELECTIONS[why](requests, candidates)

    gen = SLOSpecGenerator(
        tiny_model("llama"), tiny_model("llama"), config=CONFIG, make_policy=Broken
    )
    with pytest.raises(InvalidInputError, match=f"policy.* {why}"):
        gen.generate(**ragged_prompts(1), max_new_tokens=9)


def test_a_policy_of_the_base_class_must_define_what_that_does_not():
    class Undecided(Policy):
        plan = Odd.plan

    gen = SLOSpecGenerator(tiny_model("llama"), make_policy=lambda config, costs: Undecided())
    with pytest.raises(InvalidTypeError, match="a policy with a method 'select'"):
        gen.generate(**ragged_prompts(1), max_new_tokens=9)
