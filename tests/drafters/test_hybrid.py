"""Several drafters at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator
from hf_slospec.algo.acceptance import Drawing
from hf_slospec.algo.tree import TokenTree
from hf_slospec.drafters import hybrid
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.hybrid import HybridDrafter
from hf_slospec.drafters.prompt_lookup import PromptLookupDrafter
from hf_slospec.drafters.suffix import SuffixDrafter
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request, RequestParams
from hf_slospec.models.checked_model import CheckedModel
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model


class Scripted:
    """Drafts by a function of the text; counts its calls."""

    def __init__(self, guess: Callable[[list[int]], Sequence[int]], conditional: float = 0.5):
        self.guess, self.conditional = guess, conditional
        self.asked: list[int] = []
        self.plans: list[Plan] = []
        self.released: list[int] = []
        self.closed = 0

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self.asked += [request.index for request in requests]
        self.plans.append(plan)
        return [
            TokenTree.chain(request.tokens[-1], self.guess(request.tokens)[: plan.depth], self.conditional)
            for request in requests
        ]

    def release(self, request: Request) -> None:
        self.released.append(request.index)

    def reuse(self, request: Request) -> int:
        return 3

    def close(self) -> None:
        self.closed += 1


def right(tokens: list[int]) -> list[int]:
    return [(tokens[-1] + step) % 50 for step in range(1, 9)]


def wrong(tokens: list[int]) -> list[int]:
    return [77] * 8


def half(tokens: list[int]) -> list[int]:
    return right(tokens) if tokens[-1] % 2 else wrong(tokens)


def run(drafter: HybridDrafter, request: Request, steps: int, plan: Plan) -> TokenTree:
    """Commit the text 1, 2, 3, ... (modulo 50), two tokens a step or three."""
    for step in range(steps):
        [tree] = drafter.draft([request], plan)
        for _ in range(2 + step % 2):
            request.emit((request.tokens[-1] + 1) % 50)
    [tree] = drafter.draft([request], plan)
    tree.check()
    assert tree.max_depth <= plan.depth and tree.num_nodes - 1 <= plan.depth * plan.width
    return tree


def test_each_source_is_calibrated_by_itself() -> None:
    tree = run(
        HybridDrafter([Scripted(wrong), Scripted(right)], 2.0), Request(0, RequestParams([0], 1000)), 40, Plan(4, 1)
    )
    assert tree.tokens[1:].tolist() == right([int(tree.tokens[0])])[:4]
    assert tree.path_probs[4] > 0.7


def test_nodes_that_were_not_verified_are_observed() -> None:
    drafter = HybridDrafter([Scripted(wrong), Scripted(half)], 2.0)
    run(drafter, Request(0, RequestParams([0], 1000)), 40, Plan(4, 1))
    trials = [source.acceptance.calibrations[Drawing.GREEDY].trials.sum() for source in drafter._sources]
    hits = [source.acceptance.calibrations[Drawing.GREEDY].hits.sum() for source in drafter._sources]
    assert trials[0] == 40 and hits[0] == 0  # the first token of each wrong chain
    assert 40 < trials[1] < 120 and 0 < hits[1] < trials[1]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_observations_are_those_of_brute_force(is_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is tried if the text goes on along its parent's path by a further token, and hit if it is that token."""
    monkeypatch.setattr(hybrid, "WARM_TREES", 10**6 if is_at_once else 0)
    monkeypatch.setattr(hybrid, "BATCH_TREES", 10**6)
    rng, plan = np.random.default_rng(0), Plan(4, 1)
    scripted = Scripted(lambda tokens: (tokens[-1] + np.cumsum(rng.integers(0, 2, 6))).tolist())
    drafter, request = HybridDrafter([scripted]), Request(0, RequestParams([0], 10**6))
    chains, ends = list[tuple[int, list[int]]](), list[int]()
    for _ in range(60):
        [tree] = drafter.draft([request], plan)
        chains.append((len(request.tokens), tree.tokens[1:].tolist()))
        for _ in range(int(rng.integers(1, 6))):
            request.emit(request.tokens[-1] + int(rng.integers(0, 2)))
        ends.append(len(request.tokens))
    drafter.release(request)
    tried = hit = 0
    for (begin, chain), end in zip(chains, ends if is_at_once else ends[-1:] * len(ends), strict=True):
        for guess, token in zip(chain, request.tokens[begin:end], strict=False):
            tried += 1
            if guess != token:
                break
            hit += 1
    calibration = drafter._sources[0].acceptance.calibrations[Drawing.GREEDY]
    assert (calibration.trials.sum(), calibration.hits.sum()) == (tried, hit)


def test_model_is_not_asked_where_the_cheap_source_is_confident() -> None:
    for guess, is_asked in ((right, False), (wrong, True)):
        model = Scripted(right)
        drafter, request = HybridDrafter([Scripted(guess, 0.9), model]), Request(0, RequestParams([0], 1000))
        run(drafter, request, 60, Plan(4, 1))
        model.asked.clear()
        run(drafter, request, 10, Plan(4, 1))
        assert bool(model.asked) is is_asked


def test_cheap_chains_may_be_deeper_than_the_models() -> None:
    cheap, model = Scripted(right), Scripted(right)
    tree = run(
        HybridDrafter([cheap, model], 2.0, max_model_depth=2), Request(0, RequestParams([0], 100)), 3, Plan(6, 1)
    )
    assert tree.max_depth == 6
    assert {plan.depth for plan in cheap.plans} == {6} and {plan.depth for plan in model.plans} == {2}


def test_release_reuse_and_close_are_passed_on() -> None:
    parts = [Scripted(right), Scripted(wrong)]
    drafter: Drafter = HybridDrafter([PromptLookupDrafter(), *parts])
    request = Request(5, RequestParams([1, 2], 10))
    assert isinstance(drafter, HybridDrafter) and drafter.reuse(request) == 3
    drafter.draft([request], Plan(2, 2))
    drafter.release(request)
    drafter.close()
    assert all(part.released == [5] and part.closed == 1 for part in parts)
    assert HybridDrafter([PromptLookupDrafter()]).reuse(request) == 0


def test_requests_are_not_kept_alive() -> None:
    drafter, request = HybridDrafter([PromptLookupDrafter(), SuffixDrafter()]), Request(0, RequestParams([1, 2, 1], 10))
    run(drafter, request, 3, Plan(2, 2))
    known = weakref.ref(request)
    del request
    gc.collect()
    assert known() is None


def test_no_drafter() -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        HybridDrafter([])


@pytest.mark.parametrize("cheap", [PromptLookupDrafter, SuffixDrafter])
@pytest.mark.parametrize("confident", [0.3, 2.0])
def test_same_tokens_as_stock(cheap: Callable[[], Drafter], confident: float) -> None:
    model = tiny_model("llama")
    packed = CheckedModel(tiny_model("llama", noise=0.02), SLOSpecConfig(), 0.1).packed
    drafter = HybridDrafter([cheap(), AssistantDrafter(packed, 64, VOCAB)], confident)
    config = SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40)
    ours = SLOSpecGenerator(model, drafter=drafter, config=config)
    for options in (dict(do_sample=False), dict(do_sample=True, temperature=0.7)):
        out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **options, max_new_tokens=30)
        assert sum(metrics.accepted for metrics in out.slo) > 0
    prompts = [torch.randint(3, VOCAB, (9,)).repeat(2).tolist() for _ in range(3)]
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=15)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    with ours:
        handles = [ours.submit(prompt, max_new_tokens=15, do_sample=False) for prompt in prompts]
        assert [handle.result(timeout=60).token_ids for handle in handles] == expected
