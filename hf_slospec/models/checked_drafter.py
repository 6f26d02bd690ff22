"""A drafter that came from outside: what it proposes is checked before it is verified."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError


class CheckedDrafter:
    """Hands on a user's candidate trees, or says what is wrong with them."""

    def __init__(self, drafter: Drafter, vocab_size: int, keeps_rng: bool = True):
        """With ``keeps_rng`` the global generator is put back after drafting: the target samples by it."""
        self.drafter, self.vocab_size, self.keeps_rng = drafter, vocab_size, keeps_rng

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        with torch.random.fork_rng(enabled=self.keeps_rng):
            trees = list(self.drafter.draft(requests, plan))
        if len(trees) != len(requests):
            raise InvalidInputError(f"drafter returned {len(trees)} trees for {len(requests)} requests")
        for request, tree in zip(requests, trees, strict=True):
            self._check(request, tree, plan)
        return trees

    def _check(self, request: Request, tree: TokenTree, plan: Plan) -> None:
        if not isinstance(tree, TokenTree):
            raise InvalidInputError(f"drafter returned {type(tree).__name__} objects, where TokenTree was expected")
        if (fault := tree.fault()) is not None:
            raise InvalidInputError(f"drafter returned a tree with a fault: {fault}")
        if int(tree.tokens[0]) != request.tokens[-1]:
            raise InvalidInputError("drafter returned a tree whose root is not the request's last token")
        if tree.tokens.min() < 0 or tree.tokens.max() >= self.vocab_size:
            raise InvalidInputError(f"drafter proposed a token outside 0 .. {self.vocab_size - 1}")
        if tree.max_depth > plan.depth or tree.num_nodes - 1 > plan.depth * plan.width:
            raise InvalidInputError(
                f"drafter returned a tree of {tree.num_nodes - 1} nodes, {tree.max_depth} deep, for a plan of depth "
                f"{plan.depth} and width {plan.width}"
            )

    def release(self, request: Request) -> None:
        self.drafter.release(request)
