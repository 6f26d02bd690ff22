"""Beam search against brute force, and that a beam contains the optimal tree (AdaServe, theorem
4.1).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.level import extend_beam
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.lab.policies.goodput import confident_length
from hf_slospec.lab.policies.optimal import optimal_nodes
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree
from tests.support.breadth import quick_or
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model
from tests.support.toys.trees import SEEDS, path_to

NEVER = -torch.inf
DRAFT = tiny_model("llama")


def random_beam(seed, beam, vocab, is_tied):
    """A layer of three requests: its path log probabilities and the logits after its nodes."""
    rng = np.random.default_rng(seed)
    if is_tied:
        paths = rng.integers(-2, 1, (3, beam))
        logits = rng.integers(0, 3, (3, beam, vocab))
    else:
        paths = -rng.exponential(size=(3, beam))
        logits = 3.0 * rng.normal(size=(3, beam, vocab))
    logits = torch.tensor(logits, dtype=torch.float32)
    logits[..., 1:][torch.tensor(rng.random((3, beam, vocab - 1)) < 0.2)] = (
        NEVER  # as a grammar mask does
    )
    return torch.tensor(paths, dtype=torch.float32).sort(dim=-1, descending=True).values, logits


def all_children(paths, logits):
    """Path log probabilities of every child, [3, beam, vocab]."""
    children = paths[..., None] + (logits - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0)
    return children.numpy()


BEAMS = given(seed=SEEDS, beam=st.integers(1, 5), vocab=st.integers(2, 7), width=st.integers(1, 12))


@BEAMS
@settings(deadline=None)
def test_extend_beam_keeps_the_best_children(seed: int, beam: int, vocab: int, width: int) -> None:
    paths, logits = random_beam(seed, beam, vocab, is_tied=False)
    tokens, parents, extended = extend_beam(paths, logits, width)
    assert tokens.shape == parents.shape == extended.shape == (3, min(width, beam * vocab))
    children = all_children(paths, logits)
    for request in range(3):
        best = sorted(
            (
                (children[request, parent, token], parent, token)
                for parent in range(beam)
                for token in range(vocab)
            ),
            key=lambda child: -child[0],
        )
        found = list(
            zip(*(column[request].tolist() for column in (extended, parents, tokens)), strict=True)
        )
        possible = [child for child in best[: len(found)] if child[0] > NEVER]
        assert found[: len(possible)] == possible
        assert all(child[0] == NEVER for child in found[len(possible) :])


@BEAMS
@settings(deadline=None)
def test_extend_beam_breaks_ties_by_parent(seed: int, beam: int, vocab: int, width: int) -> None:
    paths, logits = random_beam(seed, beam, vocab, is_tied=True)
    tokens, parents, extended = (column.numpy() for column in extend_beam(paths, logits, width))
    children = all_children(paths, logits)
    for request in range(3):
        assert (extended[request] == np.sort(children[request].ravel())[::-1][:width]).all()
        assert (extended[request] == children[request, parents[request], tokens[request]]).all()
        assert len({*zip(parents[request], tokens[request], strict=True)}) == len(tokens[request])
        order = list(zip(-extended[request], parents[request], strict=True))
        assert order == sorted(order)


def test_extend_beam_never_raises_a_path_probability():
    paths = torch.tensor([[0.0, -1e-7]])
    certain = torch.tensor([[[0.0, 1e4, 0.0], [90.0, 0.0, 0.0]]])
    tokens, parents, extended = extend_beam(paths, certain, 2)
    assert tokens.tolist() == [[1, 0]]
    assert parents.tolist() == [[0, 1]]
    assert (extended <= paths).all()


def test_requests_leave_the_beam_once_they_are_unsure():
    draft = tiny_model("llama")
    requests = [Request(index, RequestParams([1, 5 + index, 9], 40)) for index in range(4)]

    def trees(min_confidence, width=1):
        drafter = AssistantDrafter(packed_model(draft, "sdpa"), Room(8 * width, 101))
        return drafter.draft(requests, Plan(8, width, min_confidence=min_confidence))

    whole = trees(0.0)
    confidences = np.sort(
        np.concatenate([tree.path_probs[1:] / tree.path_probs[:-1] for tree in whole])
    )
    depths = set()
    for threshold in ((confidences[:-1] + confidences[1:]) / 2).tolist():
        for cut, tree in zip(trees(threshold), whole, strict=True):
            depths.add(depth := confident_length(tree, threshold))
            assert cut.tokens.tolist() == tree.up_to(depth).tokens.tolist()
    assert {1, 8} <= depths and len(depths) > 2
    assert trees(0.999, width=3)[0].max_depth < 8  # beams stop, too: no path is sure all along


def worthwhile_levels(tree, weight, plan):
    """The gain of every level of one request's whole tree, less what it must exceed."""
    gains = np.maximum(weight * tree.path_probs - plan.min_path_prob, 0.0)
    return [
        float(gains[tree.depths == depth].sum()) - plan.min_request_gain
        for depth in range(1, plan.depth + 1)
    ]


@given(
    weights=st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=3, max_size=3),
    levels=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    request_gain=st.sampled_from([0.0, 0.01, 0.05, 0.2]),
    min_gain=st.sampled_from([1e-9, 0.05, 0.3]),
)
@settings(deadline=None, max_examples=25)
def test_every_request_is_drafted_for_as_deep_as_it_is_worth_and_no_deeper(
    weights, levels, request_gain, min_gain
):
    requests = [Request(index, RequestParams([1, 5 + index, 9 + index], 40)) for index in range(3)]
    plan = Plan(
        5, 2, 0.02, min_gain, min_request_gain=request_gain,
        depths=dict(zip(requests, levels, strict=True)), weights=dict(zip(requests, weights, strict=True)),
    )  # fmt: skip
    whole = AssistantDrafter(packed_model(DRAFT, "sdpa"), Room(10, 101)).draft(requests, Plan(5, 2))
    gains = np.array([worthwhile_levels(*pair, plan) for pair in zip(whole, weights, strict=True)])
    goes_on = np.ones(3, dtype=np.bool_)
    depths = np.zeros(3, dtype=np.int64)
    for depth in range(1, 6):
        depths += goes_on
        goes_on &= (gains[:, depth - 1] > 0.0) & (np.array(levels) > depth)
        goes_on &= gains[goes_on, depth - 1].sum() >= min_gain
    trees = AssistantDrafter(packed_model(DRAFT, "sdpa"), Room(10, 101)).draft(requests, plan)
    assert [tree.max_depth for tree in trees] == depths.tolist()
    for tree, full in zip(trees, whole, strict=True):
        cut = full.up_to(tree.max_depth)
        assert (
            tree.tokens.tolist() == cut.tokens.tolist()
            and tree.parents.tolist() == cut.parents.tolist()
        )
        assert tree.path_probs == pytest.approx(cut.path_probs, rel=1e-5)


def test_requests_leave_where_a_plan_does_not_go_on_with_them():
    requests = [Request(index, RequestParams([1, 5 + index, 9], 40)) for index in range(3)]
    model = tiny_model("llama")
    seen = dict[int, list[np.ndarray]]()

    def goes_on(path_probs, rows):
        for row, level in zip(rows.tolist(), path_probs, strict=True):
            seen.setdefault(row, []).append(level)
        return np.array([len(seen[row]) < 3 + row for row in rows.tolist()])

    trees = AssistantDrafter(packed_model(model, "sdpa"), Room(16, 101)).draft(
        requests, Plan(8, 2, goes_on=goes_on)
    )
    whole = AssistantDrafter(packed_model(model, "sdpa"), Room(16, 101)).draft(requests, Plan(8, 2))
    for index, (tree, own) in enumerate(zip(trees, whole, strict=True)):
        assert tree.tokens.tolist() == own.up_to(3 + index).tokens.tolist()
        assert np.concatenate(seen[index]) == pytest.approx(tree.path_probs[1:])


def search(table, depth, width_at):
    """One request's candidate tree after token 0; ``table[t]`` holds the logits after token t."""
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    path_logprobs = torch.zeros(1, 1)
    columns, begin, num_nodes = (
        [(np.array([0]), np.array([-1]), np.array([0]), np.array([1.0]))],
        0,
        1,
    )
    for level in range(1, depth + 1):
        tokens, parents, path_logprobs = extend_beam(path_logprobs, table[tokens], width_at(level))
        layer = (
            begin + parents[0].numpy(),
            np.full(tokens.shape[1], level),
            path_logprobs[0].double().exp().numpy(),
        )
        columns.append((tokens[0].numpy(), *layer))
        begin = num_nodes
        num_nodes = num_nodes + tokens.shape[1]
    return TokenTree(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def optimal(tree, budget):
    """Nodes of the optimal tree in canonical order, and their path probabilities."""
    chosen = optimal_nodes([tree], [0.0], budget)
    assert chosen is not None
    return chosen[0], tree.path_probs[chosen[0]]


@given(seed=SEEDS, vocab=st.integers(2, 3), budget=st.integers(2, 7))
@settings(deadline=None, max_examples=quick_or(20, 60))
def test_beam_of_width_budget_minus_level_contains_the_optimal_tree(seed, vocab, budget):
    table = torch.tensor(
        3.0 * np.random.default_rng(seed).normal(size=(vocab, vocab)), dtype=torch.float32
    )
    full = search(table, budget - 1, lambda level: vocab**level)
    narrow = search(table, budget - 1, lambda level: budget - level)
    in_beam = {tuple(path_to(narrow, node)) for node in range(narrow.num_nodes)}
    assert {tuple(path_to(full, node)) for node in optimal(full, budget)[0]} <= in_beam


@pytest.mark.parametrize("level", [1, 2, 4])
@pytest.mark.parametrize("fan", [2, 3, 6])
def test_one_node_narrower_loses_a_chain_with_a_fan(level, fan):
    """A certain chain of level - 1 tokens, then ``fan`` equally likely ones, each followed by
    anything.
    """
    vocab = level + fan
    budget = level + fan
    table = torch.zeros(vocab, vocab)
    for token in range(level - 1):
        table[token] = NEVER
        table[token, token + 1] = 0.0
    table[level - 1, :level] = NEVER

    wide = search(table, level + 1, lambda at: vocab)
    enough = search(table, level + 1, lambda at: budget - at if at == level else vocab)
    too_narrow = search(table, level + 1, lambda at: budget - at - 1 if at == level else vocab)
    best = optimal(wide, budget)[1].sum()
    assert best == pytest.approx(level + 1)
    assert optimal(enough, budget)[1].sum() == pytest.approx(best)
    assert optimal(too_narrow, budget)[1].sum() < best - 0.1 / fan


class Parity:
    """Allows tokens that are odd after an even number of them, and even ones after an odd number."""

    def allowed(self, path):
        return torch.arange(101) % 2 != len(path) % 2

    def allows(self, token_ids, proposed):
        return self.allowed(token_ids)[list(proposed)].tolist()

    def expected(self, token_ids):
        return []

    def masked(self, token_ids, scores):
        return scores.masked_fill(~torch.stack([self.allowed(path) for path in token_ids]), NEVER)


@torch.no_grad()
def test_beams_hold_the_most_probable_of_the_allowed_paths():
    model = tiny_model("llama")
    plan = Plan(3, 4)
    requests = [
        Request(index, RequestParams([1, 5 + index, 9], 40, grammar=Parity())) for index in range(2)
    ]
    requests.append(Request(2, RequestParams([1, 7, 9], 40)))
    for request in requests:
        request.emit(11)
    for request, tree in zip(
        requests,
        AssistantDrafter(packed_model(model, "sdpa"), Room(12, 101)).draft(requests, plan),
        strict=True,
    ):
        layer: list[tuple[list[int], float]] = [([], 0.0)]
        for depth in range(1, plan.depth + 1):
            children = list[tuple[list[int], float]]()
            for path, logprob in layer:
                logits = model(torch.tensor([[*request.tokens, *path]])).logits[0, -1]
                if request.params.grammar is not None:
                    logits = request.params.grammar.masked([[11, *path]], logits[None])[0]
                logprobs = logits.log_softmax(-1)
                children += [
                    ([*path, token], logprob + float(logprobs[token])) for token in range(101)
                ]
            layer = sorted(children, key=lambda child: -child[1])[: plan.width]
            nodes = np.flatnonzero(tree.depths == depth).tolist()
            assert [path_to(tree, node) for node in nodes] == [path for path, _ in layer]
            assert tree.path_probs[nodes] == pytest.approx(
                np.exp([logprob for _, logprob in layer]), rel=1e-3
            )
