"""Drafts that follow a grammar, on the toy model: plain constrained decoding's tokens, and no node
in vain.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.grammar import EXPECTED, MAX_GROWN, followed
from hf_slospec.engine.interfaces import Plan
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import ROOT, TokenTree
from tests.support.toys.engine import policy_of, run
from tests.support.toys.models import (
    VOCAB,
    Clock,
    ToyDrafter,
    ToyTarget,
    WholeTrees,
    engine_of,
    greedy,
)
from tests.support.toys.trees import SEEDS, beam_tree, markov_model, path_to


class ToyGrammar:
    """Allows the tokens of a table after the last token at even and odd places; often it is a
    single one.
    """

    def __init__(self, rng):
        self.table = rng.random((2, VOCAB, VOCAB)) < 0.3
        self.table[:, np.arange(VOCAB), rng.integers(0, VOCAB, VOCAB)] = True

    def allowed(self, token_ids):
        return (
            self.table[len(token_ids) % 2, token_ids[-1]]
            if token_ids
            else np.ones(VOCAB, dtype=np.bool_)
        )

    def allows(self, token_ids, proposed):
        return self.allowed(token_ids)[list(proposed)].tolist()

    def expected(self, token_ids):
        """Goes on while one token is allowed; where two are, in two ways, once."""
        stem = self.forced(token_ids)
        nexts = np.flatnonzero(self.allowed([*token_ids, *stem])).tolist()
        if len(nexts) != 2:
            return [stem] if stem else []
        return [[*stem, token, *self.forced([*token_ids, *stem, token])] for token in nexts]

    def forced(self, token_ids):
        found = []
        while len(found) < 9 and self.allowed([*token_ids, *found]).sum() == 1:
            found.append(int(self.allowed([*token_ids, *found]).argmax()))
        return found

    def masked(self, token_ids, scores):
        raise AssertionError("the toy drafter asks for no masks")

    def keep(self, target, prompt_len):
        """The target's distribution, restricted to allowed tokens."""

        def next_probs(tokens):
            probs = target(tokens) * self.allowed(tokens[prompt_len:])
            return probs / probs.sum()

        return next_probs


def request_with(rng, index, has_grammar, num_new=16):
    prompt = rng.integers(0, VOCAB, 3).tolist()
    return Request(
        index, RequestParams(prompt, num_new, grammar=ToyGrammar(rng) if has_grammar else None)
    )


def is_allowed(request, path):
    grammar = request.params.grammar
    output = request.tokens[request.prompt_len :]
    return all(
        grammar is None or grammar.allows([*output, *path[:at]], [path[at]])[0]
        for at in range(len(path))
    )


@given(seed=SEEDS, depth=st.integers(1, 5), width=st.integers(1, 3))
@settings(deadline=None)
def test_nodes_are_the_allowed_ones_and_the_expected_ones(seed, depth, width):
    rng = np.random.default_rng(seed)
    plan = Plan(depth, width)
    draft = markov_model(rng, VOCAB)
    free = request_with(rng, 1, has_grammar=False)
    bound = request_with(rng, 0, has_grammar=True)
    bound.emit(int(rng.integers(0, VOCAB)))
    trees = {request: beam_tree(draft, request.tokens, depth, width) for request in (bound, free)}
    found = followed(trees, plan)
    assert list(found) == [bound, free] and found[free] is trees[free]
    tree = found[bound]
    before = trees[bound]
    tree.check()
    assert tree.num_nodes - 1 <= depth * width and tree.max_depth <= depth
    probs = {tuple(path_to(tree, node)): tree.path_probs[node] for node in range(tree.num_nodes)}
    assert len(probs) == tree.num_nodes, "siblings carry equal tokens"
    assert all(is_allowed(bound, path) for path in probs)
    # Brute force: what the drafter proposed and the grammar allows, then what follows its most
    # probable nodes.
    output = bound.tokens[bound.prompt_len :]
    paths = [path_to(before, node) for node in range(before.num_nodes)]
    proposed = {tuple(path) for path in paths if is_allowed(bound, path)}
    wanted = set(proposed)
    for node in np.argsort(-before.path_probs, kind="stable")[:MAX_GROWN].tolist():
        if tuple(path := paths[node]) in proposed:
            ways = bound.params.grammar.expected([*output, *path])
            wanted |= {
                (*path, *way[:end])
                for way in ways
                for end in range(len(way) + 1)
                if len(path) + end <= depth
            }
    assert probs.keys() == wanted if len(wanted) - 1 <= depth * width else probs.keys() < wanted


def test_ways_share_what_other_proposals_leave():
    grammar = ToyGrammar(np.random.default_rng(0))
    # After 0 comes 1, after 1 comes 3, ...
    grammar.table[:] = np.eye(VOCAB, dtype=np.bool_)[[1, 3, 0, 4, 4]]
    grammar.table[:, 1, 2] = True  # ... or 2
    request = Request(0, RequestParams([0], 9, grammar=grammar))
    request.emit(1)
    # Nothing, a way, a forbidden token.
    for proposed, conditional in (([], 0.0), ([2], 0.25), ([4], 0.25)):
        (tree,) = followed(
            {request: TokenTree.chain(1, proposed, conditional)}, Plan(2, 9)
        ).values()
        found = {
            tuple(path_to(tree, node)): tree.path_probs[node] for node in range(1, tree.num_nodes)
        }
        first = EXPECTED / 2
        expected = {(2,): first, (3,): first, (2, 0): first * EXPECTED, (3, 4): first * EXPECTED}
        assert found == pytest.approx(expected)
    grammar.table[:, 1, 0] = True  # a third token, which leaves too much choice for the toy
    (tree,) = followed({request: TokenTree.chain(1, [2], 0.25)}, Plan(2, 9)).values()
    assert [path_to(tree, node) for node in range(tree.num_nodes)] == [[], [2], [2, 0]]


@pytest.mark.parametrize("policy_name", ["fixed", "auto"])
def test_what_the_grammar_forces_needs_no_drafter(policy_name):
    """Without any proposal, a step commits what is forced after the root, and one token more."""

    class Cycle(ToyGrammar):
        """Chooses freely after token 0; then 1, 2, 3, 4, 0."""

        def __init__(self):
            self.table = np.stack([np.roll(np.eye(VOCAB, dtype=np.bool_), 1, axis=1)] * 2)
            self.table[:, 0, :2] = True

    class Silent(ToyDrafter):
        def draft(self, requests, plan):
            return [TokenTree.root_only(request.tokens[-1]) for request in requests]

    rng = np.random.default_rng(3)
    target = markov_model(rng, VOCAB)
    grammar = Cycle()
    request = Request(0, RequestParams([0, 1, 1], 200, grammar=grammar))
    toy = ToyTarget(greedy(grammar.keep(lambda tokens: np.array([0.1, 0.3, 0.2, 0.2, 0.2]), 3)))
    run(
        engine_of(
            [request],
            toy,
            Silent(target),
            policy_of(SLOSpecConfig(policy=policy_name, max_depth=6)),
            Clock(),
        )
    )
    metrics = request.metrics()
    assert metrics.tokens == 200 and metrics.acceptance_length > 4.0


def test_nodes_below_forbidden_ones_are_gone():
    grammar = ToyGrammar(np.random.default_rng(0))
    grammar.table[:] = True
    grammar.table[:, :, 2] = False
    request = Request(0, RequestParams([0], 9, grammar=grammar))
    request.emit(1)
    chain = TokenTree.chain(1, [3, 2, 3], 0.5)
    (tree,) = followed({request: chain}, Plan(3, 1)).values()
    assert tree.tokens.tolist() == [1, 3] and tree.parents.tolist() == [-1, ROOT]
    toy = ToyTarget(greedy(grammar.keep(markov_model(np.random.default_rng(1), VOCAB), 1)))
    plan = Plan(3, 2)
    late = Request(0, RequestParams([0, 1], 9, grammar=grammar, may_draft=False))
    run(
        engine_of(
            [late],
            toy,
            ToyDrafter(markov_model(np.random.default_rng(2), VOCAB)),
            WholeTrees(plan),
            Clock(),
        )
    )
    assert all(tree.num_nodes == 1 for step in toy.steps for _, tree, _ in step), (
        "may_draft=False drafts nothing"
    )
