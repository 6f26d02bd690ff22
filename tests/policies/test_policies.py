"""All policies by name: limits, budgets, and the properties that the documentation lists."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.policies.thesis import ThesisOptions
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.adaserve import AdaServeOptions, AdaServePolicy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.policies.registry import MAX_BUDGET, roofline_tokens
from tests.support.paths import ROOT
from tests.support.policy_costs import costs, late, plan_of, requests_of, selected
from tests.support.policy_names import POLICIES
from tests.support.toys.trees import SEEDS, UNEVEN, path_to, random_tree


def test_the_budget_of_the_roofline_is_its_ridge():
    def ridge(*points):
        curve = LatencyCurve(*(tuple(column) for column in zip(*points, strict=True)))
        return roofline_tokens(
            StepCosts(ForwardCost(curve), ForwardCost(LatencyCurve((1,), (0.0,))))
        )

    assert ridge((1, 2.0), (100, 2.0), (1000, 20.0)) == 100  # a roofline as drawn
    assert ridge((1, 1.0), (2, 1.5), (2000, 1000.5)) == 2  # half a second more for each token
    assert ridge((1, 1.0)) == MAX_BUDGET  # no limit was seen
    assert (
        AdaServePolicy(SLOSpecConfig(policy="adaserve"), costs(0.02)).budget == 48
    )  # 1 s and 1024 / 21.46 tokens/s
    assert AdaServePolicy(SLOSpecConfig(policy="adaserve", token_budget=7), costs(0.02)).budget == 7


def test_errors_list_every_policy():
    with pytest.raises(InvalidInputError) as error:
        SLOSpecConfig(policy="adaserv")
    assert all(f"'{name}'" in str(error.value) for name in POLICIES)


@pytest.mark.parametrize("policy_name", POLICIES)
def test_plans_stay_within_what_storage_was_made_for(policy_name):
    config = SLOSpecConfig(policy=policy_name, max_depth=9, max_width=2)
    policy = new_policy(config, costs(1e-4, 0.0), SpeculationHistory(config))
    for number in (1, 20):
        plan = plan_of(policy, requests_of(number))
        assert plan.depth * plan.width <= max_nodes_per_request(config)
        assert plan.depth <= 9
    assert (max_nodes_per_request(config) == 0) == (policy_name == "none")


@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    budget=st.integers(1, 30),
    policy_name=st.sampled_from(["adaserve", "thesis", "thesis-slo", "thesis-slo-capped"]),
)
@settings(deadline=None)
def test_budgets_are_kept_and_expected_tokens_are_sums_of_path_probabilities(
    seed, sizes, budget, policy_name
):
    """Property 4."""
    rng = np.random.default_rng(seed)
    config = SLOSpecConfig(policy=policy_name, token_budget=budget)
    policy = new_policy(config, costs(0.02), SpeculationHistory(config))
    requests = [late(index, rng.choice([None, 0.1, 5.0])) for index in range(len(sizes))]
    candidates = [random_tree(rng, size, UNEVEN) for size in sizes]
    selection = selected(policy, requests, candidates, 1.0)
    assert sum(tree.num_nodes for tree in selection.trees) <= max(budget, len(requests))
    for tree, candidate, expected in zip(
        selection.trees, candidates, selection.expected, strict=True
    ):
        tree.check()
        paths = {
            tuple(path_to(candidate, v)): candidate.path_probs[v]
            for v in range(candidate.num_nodes)
        }
        assert {tuple(path_to(tree, v)) for v in range(tree.num_nodes)} <= paths.keys()
        assert expected == pytest.approx(tree.path_probs.sum())


def test_settings_of_single_policies_are_given_as_fields_or_as_options():
    config = SLOSpecConfig(policy="thesis", **{"max_tree_nodes": 32})
    assert config == SLOSpecConfig(policy="thesis", policy_options=ThesisOptions(max_tree_nodes=32))
    assert config == SLOSpecConfig(policy="thesis", policy_options={"max_tree_nodes": 32})  # type: ignore[arg-type]
    assert (
        config
        == SLOSpecConfig(**config.model_dump())
        == SLOSpecConfig.model_validate_json(config.model_dump_json())
    )
    assert config.options_of(ThesisOptions).max_tree_nodes == 32
    assert (
        config.options_of(AdaServeOptions) == AdaServeOptions()
    )  # a policy whose name the config does not hold
    other = config.model_copy(update={"policy": "adaserve", "max_slo_share": 2.0})
    assert other == SLOSpecConfig(policy="adaserve", **{"max_slo_share": 2.0})


def test_properties_in_the_documentation_are_tested():
    tests = ROOT / "tests"
    named = re.findall(
        r"`(test_\w+)\.py`|`(test_\w+)`", (ROOT / "docs" / "policies.md").read_text()
    )
    sources = "".join(path.read_text() for path in tests.rglob("test_*.py"))
    assert len(named) > 12
    for file, test in named:
        assert any(tests.rglob(f"{file}.py")) if file else f"def {test}(" in sources, file or test
