"""A model is tried out before it is trusted: a small tree must give the logits of plain forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.models.packed import PackedModel, refused_if_it_fails
from hf_slospec.models.sequences import Sequences

# Relative error of a node's logits, the median over the nodes (a mixture of experts may route one of them elsewhere):
# beyond rounding, and far below what attending to a wrong token makes.
TOLERANCE, REDUCED_TOLERANCE = 5e-3, 0.1
PROMPTS = (6, 4)  # tokens of two requests in one row
PARENTS = ((-1, 0, 0, 1), (-1, 0, 1))  # of their trees: one branches after its root, one is a chain


def check_by_trial(packed: PackedModel) -> None:
    """Raise UnsupportedModelError unless a packed row with two trees gives what plain forwards of all paths give."""
    with _evaluating(packed.model), refused_if_it_fails(packed.model):
        error = _relative_error(packed)
        if not error <= (TOLERANCE if torch.finfo(packed.dtype).bits >= 32 else REDUCED_TOLERANCE):
            raise ValueError(
                f"on a trial tree its logits differed from those of its own forward (by {error:.1%}), so its layers "
                "do something that a packed row does not know of"
            )


@torch.no_grad()
def _relative_error(packed: PackedModel) -> float:
    tokens = iter(np.arange(3, 3 + 7 * sum(PROMPTS) * 2, 7) % packed.vocab_size)
    requests = [Request(i, [int(next(tokens)) for _ in range(n)], max_new_tokens=0) for i, n in enumerate(PROMPTS)]
    trees = [_tree(request, parents, tokens) for request, parents in zip(requests, PARENTS, strict=True)]
    sequences = Sequences(packed, requests, max_nodes=max(map(len, PARENTS)))
    prefill = [sequences.chain(request, request.tokens[:-1]) for request in requests]
    sequences.forward(prefill, torch.tensor([0], device=packed.device))
    for request in requests:
        sequences.of(request).length = request.prompt_len - 1
    parts = [sequences.chain_and_tree(r, r.tokens[-1:], tree) for r, tree in zip(requests, trees, strict=True)]
    ours = sequences.forward(parts, torch.arange(sum(tree.num_nodes for tree in trees), device=packed.device))

    paths = [
        request.tokens[:-1] + [int(tree.tokens[n]) for n in np.flatnonzero(tree.ancestor_mask()[node])]
        for request, tree in zip(requests, trees, strict=True)
        for node in range(tree.num_nodes)
    ]
    plain = torch.stack([_plain(packed, path) for path in paths])
    ours, plain = (logits.double() - logits.double().mean(-1, keepdim=True) for logits in (ours, plain.to(ours.device)))
    return float(((ours - plain).norm(dim=-1) / plain.norm(dim=-1)).median())


def _plain(packed: PackedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of some tokens, from a forward as ``generate`` makes it.  -> [vocab]"""
    input_ids = torch.tensor([tokens], device=packed.device)
    position_ids = torch.arange(len(tokens), device=packed.device)[None]
    return packed.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[0, -1]


def _tree(request: Request, parents: tuple[int, ...], tokens: Iterator[Any]) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    own = [request.tokens[-1], *(int(next(tokens)) for _ in parents[1:])]
    return TokenTree(np.array(own), np.array(parents), np.array(depths), 0.5 ** np.array(depths))


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout, whatever mode the modules are in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
