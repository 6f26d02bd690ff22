"""Several drafters at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator
from hf_slospec.algo.calibration import Conditionals, path_products, shifted
from hf_slospec.algo.tree import ROOT, Forest, TokenTree
from hf_slospec.drafters import hybrid
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.hybrid import LOOK_GAP, PRIOR_LOOKS, HybridDrafter, HybridMethod, Yields
from hf_slospec.drafters.methods import Room
from hf_slospec.drafters.prompt_lookup import LookupMethod, PromptLookupDrafter
from hf_slospec.drafters.suffix import SuffixDrafter
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request, RequestParams
from hf_slospec.models.checked_model import CheckedModel
from tests.support.breadth import nightly_but, nightly_rows_but, quick_or
from tests.support.toys.models import Clock
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model
from tests.support.toys.trees import SEEDS, UNEVEN, path_to, random_tree

SETTLED = 40  # steps after which a choice has followed from what was seen


class Scripted(Drafter):
    """Drafts by a function of the text; counts its calls."""

    def __init__(self, guess: Callable[[list[int]], Sequence[int]], conditional: float = 0.5):
        self.guess, self.conditional = guess, conditional
        self.asked: list[int] = []
        self.released: list[int] = []
        self.closed = 0

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self.asked += [request.index for request in requests]
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


def even(tokens: list[int]) -> list[int]:
    return right(tokens) if tokens[0] % 2 == 0 else wrong(tokens)


def odd(tokens: list[int]) -> list[int]:
    return right(tokens) if tokens[0] % 2 else wrong(tokens)


def request_of(index: int) -> Request:
    """A request whose text begins with its index."""
    return Request(index, RequestParams([index], 10**6))


def step(drafter: Drafter, requests: Sequence[Request], plan: Plan) -> int:
    """Verify what is drafted against the text that goes on by 1 (modulo 50); return the number of new tokens."""
    num_tokens = 0
    for request, tree in zip(requests, drafter.draft(requests, plan), strict=True):
        tree.check()
        assert tree.tokens[ROOT] == request.tokens[-1]
        assert tree.max_depth <= plan.depth and tree.num_nodes - 1 <= plan.depth * plan.width
        node: int | None = ROOT
        while node is not None:
            token = (request.tokens[-1] + 1) % 50
            request.emit(token)
            node, num_tokens = tree.child(node, token), num_tokens + 1
    return num_tokens


def run(drafter: HybridDrafter, request: Request, steps: int, plan: Plan) -> TokenTree:
    """Commit the text 1, 2, 3, ... (modulo 50), two tokens a step or three."""
    for number in range(steps):
        [tree] = drafter.draft([request], plan)
        for _ in range(2 + number % 2):
            request.emit((request.tokens[-1] + 1) % 50)
    [tree] = drafter.draft([request], plan)
    tree.check()
    assert tree.max_depth <= plan.depth and tree.num_nodes - 1 <= plan.depth * plan.width
    return tree


def test_each_request_asks_the_part_that_knows_it() -> None:
    """Parts that know half of the requests: the others are asked in looks only, for as many tokens as from all."""
    parts, plan, counts = (Scripted(even), Scripted(odd)), Plan(4, 2), list[int]()
    for gap in (LOOK_GAP, 1):
        drafter, requests = HybridDrafter(parts, 2.0), [request_of(0), request_of(1)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hybrid, "LOOK_GAP", gap)
            for _ in range(SETTLED):
                step(drafter, requests, plan)
            for part in parts:
                part.asked.clear()
            counts.append(sum(step(drafter, requests, plan) for _ in range(8 * LOOK_GAP)))
        num_asked = 8 * LOOK_GAP, 8 * LOOK_GAP // gap
        assert [[part.asked.count(index) for index in (0, 1)] for part in parts] == [[*num_asked], [*num_asked[::-1]]]
    assert counts[0] >= 0.98 * counts[1]


def test_a_request_that_changes_is_followed() -> None:
    parts = Scripted(right), Scripted(wrong)
    drafter, request, plan = HybridDrafter(parts, 2.0), request_of(0), Plan(4, 1)
    for guesses, known in (((right, wrong), 0), ((wrong, right), 1), ((right, wrong), 0)):
        for part, guess in zip(parts, guesses, strict=True):
            part.guess = guess
        for _ in range(32 * LOOK_GAP):
            step(drafter, [request], plan)
        for part in parts:
            part.asked.clear()
        for _ in range(LOOK_GAP):
            step(drafter, [request], plan)
        assert len(parts[known].asked) == LOOK_GAP and len(parts[1 - known].asked) == 1


def test_parts_that_complement_each_other_are_asked_together() -> None:
    def at(rest: int) -> Scripted:
        return Scripted(lambda tokens: right(tokens) if tokens[-1] % 2 == rest else wrong(tokens))

    parts = [at(0), at(1)]
    drafter, request = HybridDrafter([*parts, Scripted(wrong)], 2.0), request_of(0)
    for _ in range(SETTLED):
        step(drafter, [request], Plan(2, 2))
    for part in parts:
        part.asked.clear()
    for _ in range(LOOK_GAP):
        assert step(drafter, [request], Plan(2, 2)) == 3
    assert [len(part.asked) for part in parts] == [LOOK_GAP] * 2


def test_new_requests_start_from_what_others_found() -> None:
    parts, plan = (Scripted(wrong), Scripted(right)), Plan(4, 1)
    first, request = HybridDrafter(parts, 2.0), request_of(0)
    for _ in range(SETTLED):
        step(first, [request], plan)
    for drafter in (first, HybridDrafter(parts, 2.0, first.experience)):
        parts[0].asked.clear()
        for index in range(1, LOOK_GAP):  # each for one step
            step(drafter, [request_of(index)], plan)
        assert len(parts[0].asked) <= 1


@pytest.mark.parametrize(("part_s", "pays"), [(0.1, True), (0.6, False)])
def test_a_part_is_asked_if_it_gains_more_than_its_time_would(part_s: float, pays: bool) -> None:
    """Steps take a second but for the second part, which raises their tokens from 2 to 3; its first call is slow."""
    clock = Clock()

    class Slow(Scripted):
        def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
            clock.now_s += part_s * len(requests) if self.asked else 1000.0
            return super().draft(requests, plan)

    cheap, slow = Scripted(lambda tokens: right(tokens)[:1]), Slow(right)
    drafter, requests = HybridDrafter((cheap, slow), 2.0, clock=clock), [request_of(index) for index in range(2)]
    for number in range(2 * SETTLED + LOOK_GAP):
        if number == 2 * SETTLED:
            slow.asked.clear()
        step(drafter, requests, Plan(2, 1))
        clock.now_s += 2.0  # a second per request
    assert len(slow.asked) == 2 * (LOOK_GAP if pays else 1)


def test_without_a_clock_choices_depend_on_tokens_only() -> None:
    """Neither times nor other drafters' experience matter, as processes of a tensor-parallel model need it."""
    method = HybridMethod([LookupMethod(), LookupMethod(max_ngram=1)])
    room = Room(8, 100)
    kept = [method.new_drafter(None, each) for each in (room._replace(clock=Clock()), room._replace(clock=Clock()))]
    new = [method.new_drafter(None, room), method.new_drafter(None, room)]
    assert all(isinstance(each, HybridDrafter) for each in (*kept, *new))
    assert kept[0].experience is kept[1].experience
    assert len({id(each.experience) for each in (*kept, *new)}) == 3
    request = request_of(0)
    for _ in range(SETTLED):
        step(new[0], [request], Plan(2, 2))
    assert not any(new[0].experience.seconds.values()) and new[0].experience.step_s == float("inf")


@given(seed=SEEDS, num_parts=st.integers(1, 3), gap=st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_requests_that_come_pause_and_leave(seed: int, num_parts: int, gap: int) -> None:
    """Trees are valid, looks are as rare as planned, and the same run asks the same parts."""

    def asked_in_one_run() -> list[list[list[int]]]:
        rng, plan = np.random.default_rng(seed), Plan(4, 2)

        def guess(tokens: list[int]) -> list[int]:
            return right(tokens)[: int(rng.integers(0, 5))] + [77] * int(rng.integers(0, 3))

        parts = [Scripted(guess, conditional) for conditional in rng.choice(UNEVEN, num_parts)]
        drafter, requests, log = HybridDrafter(parts, float(rng.choice([0.5, 2.0]))), [request_of(0)], []
        for number in range(40):
            if rng.random() < 0.2:
                requests.append(request_of(number + 1))
            if rng.random() < 0.2 and len(requests) > 1:
                drafter.release(requests[0])  # finished, or preempted
                requests = requests[1:] + requests[: int(rng.integers(2))]
            for part in parts:
                part.asked.clear()
            drafting = [request for request in requests if rng.random() < 0.8] or requests[:1]
            step(drafter, drafting, plan)
            every = [request.index for request in drafting]
            asked = {index for part in parts for index in part.asked}
            assert parts[0].asked == every if number % gap == 0 else asked == set(every)
            log.append([list(part.asked) for part in parts])
        assert all(-hybrid.MAX_SHIFT <= shift <= hybrid.MAX_SHIFT for shift in drafter.experience.shifts.values())
        return log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, "LOOK_GAP", gap)
        assert asked_in_one_run() == asked_in_one_run()


def test_a_part_that_is_asked_alone_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, request = HybridDrafter((Scripted(right), Scripted(wrong)), 2.0), request_of(0)
    for _ in range(SETTLED + 1):
        step(drafter, [request], Plan(4, 2))

    def merged(*_: object) -> None:
        raise AssertionError("trees were merged")

    monkeypatch.setattr(hybrid, "merge_forests", merged)
    for _ in range(LOOK_GAP // 2):
        step(drafter, [request], Plan(4, 2))
    silent = HybridDrafter((PromptLookupDrafter(), Scripted(right)), 2.0)  # the first proposes nothing
    for _ in range(PRIOR_LOOKS):
        assert step(silent, [request_of(0)], Plan(4, 2)) == 5


@given(seed=SEEDS, lengths=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=20))
def test_yields_are_averages_of_the_best_part(seed: int, lengths: list[list[int]]) -> None:
    rng, yields, sets = np.random.default_rng(seed), Yields(100), [(0,), (2,), (0, 1), (0, 1, 2)]
    skipped = rng.random(len(lengths)) < 0.3  # in such looks the last part was
    for row, is_skipped in zip(lengths, skipped, strict=True):
        yields.observe(dict(enumerate(row[:2] if is_skipped else row)), sets)
    for parts in sets[2:]:
        best = [max(row[i] for i in parts if i < 2 or not s) for row, s in zip(lengths, skipped, strict=True)]
        assert yields.tokens[parts] == pytest.approx(np.mean(best))
    prices = {parts: float(rng.random()) for parts in sets}
    values = {parts: yields.tokens.get(parts, 0.0) - price for parts, price in prices.items()}
    assert values[yields.best(prices)] == max(values.values())
    started = Yields(8, yields)
    assert started.tokens == yields.tokens and started.num_looks <= PRIOR_LOOKS


@given(seed=SEEDS, num_nodes=st.integers(1, 20), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_nodes_that_follow_a_committed_path_are_observed(seed: int, num_nodes: int, tokens: list[int]) -> None:
    tree = random_tree(np.random.default_rng(seed), num_nodes, UNEVEN)
    num_foreseen, surplus = hybrid._followed(tree, tokens)
    expected_surplus, longest, conditionals = 0.0, 0, Conditionals.of(Forest.of([tree])).probs
    for node in range(1, num_nodes):
        *above, _ = path = path_to(tree, node)
        if len(path) <= len(tokens) and above == tokens[: len(above)]:
            is_hit = path == tokens[: len(path)]
            expected_surplus += is_hit - conditionals[node]
            longest = max(longest, len(path) * is_hit)
    assert num_foreseen == longest and surplus == pytest.approx(expected_surplus)


@given(seed=SEEDS, num_nodes=st.integers(1, 20), log_odds=st.floats(-3.0, 3.0))
def test_shifted_trees_are_trees(seed: int, num_nodes: int, log_odds: float) -> None:
    tree = random_tree(np.random.default_rng(seed), num_nodes, UNEVEN)
    moved, forest = hybrid._shifted(tree, log_odds), Forest.of([tree])
    moved.check()
    expected = path_products(forest, shifted(Conditionals.of(forest).probs, np.array(log_odds)))
    assert moved.path_probs == pytest.approx(expected) and moved.tokens.tolist() == tree.tokens.tolist()


def test_each_part_is_calibrated_by_itself() -> None:
    drafter = HybridDrafter([Scripted(wrong), Scripted(right)], 2.0)
    tree = run(drafter, request_of(0), 85, Plan(4, 1))
    assert tree.tokens[1:].tolist() == right([int(tree.tokens[0])])[:4]
    assert tree.path_probs[4] > 0.7
    assert drafter.experience.shifts[0] < 0.0 < drafter.experience.shifts[1]


def test_model_is_not_asked_where_the_cheap_part_is_confident() -> None:
    for guess, is_asked in ((right, False), (wrong, True)):
        model = Scripted(right)
        drafter, request = HybridDrafter([Scripted(guess, 0.9), model]), request_of(0)
        run(drafter, request, 60, Plan(4, 1))
        model.asked.clear()
        run(drafter, request, 2 * LOOK_GAP, Plan(4, 1))
        assert bool(model.asked) is is_asked


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


@pytest.mark.parametrize("cheap", nightly_but([SuffixDrafter], [PromptLookupDrafter, SuffixDrafter]))
@pytest.mark.parametrize(
    ("confident", "gap"), nightly_rows_but([(0.3, LOOK_GAP), (2.0, 3)], [(0.3, LOOK_GAP), (2.0, LOOK_GAP), (2.0, 3)])
)
def test_same_tokens_as_stock(
    cheap: Callable[[], Drafter], confident: float, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "LOOK_GAP", gap)
    model = tiny_model("llama")
    packed = CheckedModel(tiny_model("llama", noise=0.02), SLOSpecConfig(), 0.1).packed
    drafter = HybridDrafter([cheap(), AssistantDrafter(packed, 64, VOCAB)], confident)
    config = SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40)
    ours = SLOSpecGenerator(model, drafter=drafter, config=config)
    for options in (dict(do_sample=False), dict(do_sample=True, temperature=0.7)):
        out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **options, max_new_tokens=quick_or(16, 30))
        assert sum(metrics.accepted for metrics in out.slo) > 0
    prompts = [torch.randint(3, VOCAB, (9,)).repeat(2).tolist() for _ in range(3)]
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=15)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    with ours:
        handles = [ours.submit(prompt, max_new_tokens=15, do_sample=False) for prompt in prompts]
        assert [handle.result(timeout=60).token_ids for handle in handles] == expected
