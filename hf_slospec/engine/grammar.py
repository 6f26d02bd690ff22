"""Drafts of requests whose output follows a grammar: only tokens that it allows, and those that it
expects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.interfaces import Plan
from hf_slospec.request.params import Grammar
from hf_slospec.request.request import Request
from hf_slospec.tree.merge import merge_trees
from hf_slospec.tree.tree import ROOT, TokenTree

MAX_GROWN = (
    3  # nodes of a candidate tree, the most probable ones, that get the tokens expected after them
)
# Probability of expected tokens together, as a share of what the drafter's other proposals leave
EXPECTED = 0.95


def followed(trees: dict[Request, TokenTree], plan: Plan) -> dict[Request, TokenTree]:
    """Return candidate trees without what the requests' grammars forbid, and with the tokens that
    they expect.

    Requests without a grammar keep their trees. The others' have no more levels and nodes than the
    plan allows."""
    grammars = {
        request: request.params.grammar for request in trees if request.params.grammar is not None
    }
    if not grammars:
        return trees
    grown = [
        [_grown(trees[request], request.tokens[request.prompt_len :], grammar, plan.depth)]
        for request, grammar in grammars.items()
    ]
    merged = merge_trees(grown, plan.depth * plan.width)
    return trees | dict(zip(grammars, merged, strict=True))


def _grown(tree: TokenTree, output: Sequence[int], grammar: Grammar, max_depth: int) -> TokenTree:
    """Return the allowed part of a tree, with expected tokens; two nodes may have the same path.

    Args:
        tree: its root is the last token of ``output``.
        output: the request's new tokens.
        grammar: that of the request.
        max_depth: maximum depth of expected tokens.
    """
    below = [list[int]() for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        below[parent].append(node)
    is_grown = set(np.argsort(-tree.path_probs, kind="stable")[:MAX_GROWN].tolist())
    tokens = tree.tokens.tolist()
    probs = tree.path_probs.tolist()
    grown = list[
        tuple[int, int, int, float]
    ]()  # token, parent, depth and path probability of each node
    # Nodes depth first, with their parent in ``grown``, depth and output.
    visits = [(ROOT, -1, 0, list(output))]
    while visits:
        node, parent, depth, path = visits.pop()
        index = len(grown)
        grown.append((tokens[node], parent, depth, probs[node]))
        proposed = [tokens[child] for child in below[node]]
        is_allowed = grammar.allows(path, proposed) if proposed else []
        children = [
            child for child, is_kept in zip(below[node], is_allowed, strict=True) if is_kept
        ]
        visits += [(child, index, depth + 1, [*path, tokens[child]]) for child in children]
        ways = grammar.expected(path) if node in is_grown and depth < max_depth else []
        firsts = {way[0] for way in ways}
        left = max(
            probs[node] - sum(probs[child] for child in children if tokens[child] not in firsts),
            0.0,
        )
        for way in ways:
            for place, token in enumerate(way[: max_depth - depth], 1):
                share = sum(other[:place] == way[:place] for other in ways) / len(ways)
                above = index if place == 1 else len(grown) - 1
                grown.append((token, above, depth + place, left * share * EXPECTED**place))
    columns = zip(*grown, strict=True)
    return TokenTree(*(np.array(column) for column in columns))
