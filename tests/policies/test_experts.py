"""``auto`` on a mixture of experts at batch 1, where every further token reads further experts."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.engine.step import Engine
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from tests.support.toys.models import VOCAB, Clock, ToyDrafter, ToyTarget, one_hot

NUM_TOKENS = 300
LEVEL_S = 0.02  # seconds of a draft level; a forward of one token takes 1 s
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
SHARE = 0.9  # share of a forward of one token that its experts take


def forward_s(num_tokens, num_experts=16, top_k=2):
    """Return the seconds of a forward whose tokens are routed to experts at random."""
    read = num_experts / top_k * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)
    return 1.0 + SHARE * (read - 1.0)


def token_after(tokens):
    return (3 * tokens[-1] + len(tokens)) % VOCAB


def decoded_s(policy, accepted=0.0, says=1.0, known=1.0):
    """Return the simulated seconds of a request.

    Args:
        policy: name of the policy.
        accepted: share of drafted tokens that are right.
        says: probability that the drafter gives its tokens.
        known: share of the growth of forwards with their tokens that is in the profile.
    """
    clock = Clock()

    class MixtureOfExperts(ToyTarget):
        def verify(self, requests, trees, chunks=()):
            clock.now_s += forward_s(sum(tree.num_nodes for tree in trees)) if trees else 0.0
            return super().verify(requests, trees, chunks)

    class TimedDrafter(ToyDrafter):
        def draft(self, requests, plan):
            clock.now_s += LEVEL_S * plan.depth
            return super().draft(requests, plan)

    def choose(request):
        is_right = np.random.default_rng(len(request.tokens)).random() < accepted
        return (token_after(request.tokens) + (not is_right)) % VOCAB

    def draft(tokens):
        right = one_hot(token_after(tokens))
        return says * right + (1.0 - says) / (VOCAB - 1) * (1.0 - right)

    curve = LatencyCurve(SIZES, tuple(1.0 + known * (forward_s(size) - 1.0) for size in SIZES))
    costs = StepCosts(ForwardCost(curve), ForwardCost(LatencyCurve((1, 64), (LEVEL_S, LEVEL_S))))
    requests = [Request(0, RequestParams([0, 1], NUM_TOKENS))]
    scheduler = ContinuousScheduler.of_call(requests, costs)
    config = SLOSpecConfig(policy=policy, max_depth=4, max_width=1)
    made = new_policy(config, costs, SpeculationHistory(config))
    engine = Engine(MixtureOfExperts(choose), TimedDrafter(draft), made, scheduler, costs, clock)
    while engine.scheduler.running:
        engine.step()
    return clock.now_s


@pytest.mark.parametrize("known", [1.0, 0.85])
@pytest.mark.parametrize("says", [0.6, 0.95])
def test_auto_does_not_lose_to_no_drafts(says, known):
    plain_s = decoded_s("none")
    for accepted in (0.0, 0.5, 0.7, 0.9):
        assert decoded_s("auto", accepted, says, known) < 1.05 * plain_s
    assert decoded_s("auto", 1.0, says, known) < 0.8 * plain_s


@pytest.mark.parametrize("says", [0.6, 0.95])
@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.7])
def test_a_profile_that_knows_nothing_of_experts_is_found_wrong(says, accepted):
    """By it all forwards take as long, so that drafts seem to cost nothing."""
    assert decoded_s("auto", accepted, says, known=0.0) < 1.05 * decoded_s("none")
    assert decoded_s("fixed", accepted) > 1.2 * decoded_s("none")


@pytest.mark.parametrize("known", [0.0, 1.0])
def test_finding_out_costs_good_drafts_little(known):
    assert decoded_s("auto", 1.0, 0.95, known) < 1.07 * decoded_s("fixed", 1.0)


def test_constant_drafts_lose_where_experts_dominate():
    """Without the cost of experts, drafts that are right in 7 of 10 cases would seem to gain."""
    assert decoded_s("fixed", 0.7) > 1.2 * decoded_s("none")
