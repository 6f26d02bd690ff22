"""A model is tried out before it is trusted: a small packed row must give the logits of plain forwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.models.compatibility.probe import cannot_be_packed, evaluating, refused_if_it_fails
from hf_slospec.models.kv_cache.sequences import Sequences
from hf_slospec.models.packed import PackedModel

# Relative error of a node's logits: beyond rounding, and far below what attending to a wrong token makes.
TOLERANCE, REDUCED_TOLERANCE = 5e-3, 0.1
NOISE = 4.0  # times the error between two plain forwards of different shapes, where that is more (int8, TF32)
DRAWS = 5  # of tokens, if the first shows errors: a mixture of experts may route a token elsewhere, a fault stays
PROMPTS = (6, 4)  # tokens of two requests in one row
PARENTS = ((-1, 0, 0, 1), (-1, 0, 1))  # of their trees: one branches after its root, one is a chain
LEAVES = ((0, 2), (0, 3), (1, 2))  # (request, node); their paths hold all nodes


def check_by_trial(packed: PackedModel) -> None:
    """Raise UnsupportedModelError unless a packed row with two trees gives what plain forwards of its paths give."""
    with evaluating(packed.model), refused_if_it_fails(packed.model), torch.no_grad():
        errors = _errors(packed, 0)
        if bool((errors <= _tolerance(packed)).all()):
            return
        errors = torch.stack([errors, *(_errors(packed, draw) for draw in range(1, DRAWS))]).median(0).values
        error = float(errors.nan_to_num(nan=torch.inf).max())
        if error > max(_tolerance(packed), NOISE * _noise(packed)):
            raise cannot_be_packed(
                packed.model,
                f"on a trial tree its logits differed from those of its own forward (by {error:.1%}), so its layers do "
                "something that a packed row does not know of",
            )


def _tolerance(packed: PackedModel) -> float:
    dtypes = {stored.dtype for layer in packed.layers for stored in layer.shape}
    return TOLERANCE if all(torch.finfo(dtype).bits >= 32 for dtype in dtypes) else REDUCED_TOLERANCE


def _errors(packed: PackedModel, draw: int) -> torch.Tensor:
    """Relative error of every node of both trees.  -> [num_nodes] f64"""
    tokens = iter(np.random.default_rng(draw).permutation(packed.vocab_size).tolist())
    requests = [Request(i, [next(tokens) for _ in range(n)], max_new_tokens=0) for i, n in enumerate(PROMPTS)]
    trees = [_tree(request, parents, tokens) for request, parents in zip(requests, PARENTS, strict=True)]
    sequences = Sequences(packed, max_nodes=max(map(len, PARENTS)))
    sequences.reserve(requests)
    sequences.forward([sequences.chain(r, r.tokens[:-1]) for r in requests], torch.tensor([0]))
    for request in requests:
        sequences.of(request).length = request.prompt_len - 1
    parts = [sequences.chain_and_tree(r, r.tokens[-1:], tree) for r, tree in zip(requests, trees, strict=True)]
    ours = sequences.forward(parts, torch.arange(sum(tree.num_nodes for tree in trees)))
    split = ours.cpu().split([tree.num_nodes for tree in trees])

    errors = []
    for index, leaf in LEAVES:
        request, tree = requests[index], trees[index]
        path = np.flatnonzero(tree.ancestor_mask()[leaf])
        text = [*request.tokens[:-1], *(int(tree.tokens[node]) for node in path)]
        errors.append(_relative(split[index][path], _plain(packed, text)[-len(path) :]))
    return torch.cat(errors)


def _noise(packed: PackedModel) -> float:
    """The error between plain forwards of a text alone and as a batch of copies."""
    text = np.random.default_rng(0).permutation(packed.vocab_size)[: max(PROMPTS)].tolist()
    return float(_relative(_plain(packed, text, copies=8), _plain(packed, text)).max())


def _plain(packed: PackedModel, tokens: list[int], copies: int = 1) -> torch.Tensor:
    """Logits after each of some tokens, from a forward as ``generate`` makes it.  -> [num_tokens, vocab]"""
    input_ids = torch.tensor([tokens] * copies, device=packed.device)
    position_ids = torch.arange(len(tokens), device=packed.device)[None]
    return packed.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[0].cpu()


def _relative(ours: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """-> [num_tokens] f64"""
    ours, plain = (logits.double() - logits.double().mean(-1, keepdim=True) for logits in (ours, plain))
    return (ours - plain).norm(dim=-1) / plain.norm(dim=-1)


def _tree(request: Request, parents: tuple[int, ...], tokens: Iterator[int]) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    own = [request.tokens[-1], *(next(tokens) for _ in parents[1:])]
    return TokenTree(np.array(own), np.array(parents), np.array(depths), 0.5 ** np.array(depths))
