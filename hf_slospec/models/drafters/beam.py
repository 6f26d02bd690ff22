"""Beam search of all requests at a time, on the probabilities of a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log
from typing import NamedTuple

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.coupling import coupled
from hf_slospec.models.cuda.deferred import DeferredFlags
from hf_slospec.models.cuda.transfer import to_device

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, parents and path_logprobs, [num_requests, beam] each


class Scores(NamedTuple):
    """Outputs of a draft model for the roots or for a layer of the beam."""

    logits: torch.Tensor  # [num_requests, beam, draft_vocab]
    states: torch.Tensor | None = None  # [num_requests, beam, hidden], of which a child takes its parent's


class BeamLayer(NamedTuple):
    """Nodes of one layer that a draft model forwards."""

    tokens: torch.Tensor  # [num_requests, beam] int64
    positions: torch.Tensor  # [num_requests, num_staged] int64, of the nodes of all layers so far
    ancestors: torch.Tensor  # [num_requests, beam, num_staged] bool, True = the node may attend to it
    states: torch.Tensor | None  # [num_requests, beam, hidden], the parents' states


class Vocabulary(NamedTuple):
    """Tokens that a draft model proposes, where they are not simply the target's first ones."""

    target_ids: torch.Tensor  # [draft_vocab] int64, the target's id of each column of the logits
    size: int  # of the target's vocabulary

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's whole vocabulary; -inf where the draft has none."""
        whole = logits.new_full((*logits.shape[:-1], self.size), -inf)
        return whole.index_copy_(-1, self.target_ids, logits)


def extend_beam(path_logprobs: torch.Tensor, logits: torch.Tensor, width: int) -> Layer:
    """Return the next layer of every request's beam, best first, ties by (parent, rank of the child).

    Args:
        path_logprobs: [num_requests, beam] f32, of the current layer, best first.
        logits: [num_requests, beam, vocab] of the same nodes.
        width: nodes to keep per request.

    Returns:
        tokens, parents (index into the current layer) and path_logprobs, each [num_requests, new_beam] with
        new_beam = min(width, beam * vocab).
    """
    # Rounding may put a certain token's probability above 1; a NaN would sort before every real path.
    logprobs = logits.float().log_softmax(-1).clamp(max=0.0).nan_to_num(nan=-inf, neginf=-inf)
    children = logprobs.topk(min(width, logits.shape[-1]), dim=-1)
    num_children = children.values.shape[-1]
    paths = (path_logprobs[..., None] + children.values).flatten(1)  # [num_requests, beam * num_children]
    paths, order = paths.sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return children.indices.flatten(1).gather(1, order), order // num_children, paths[:, :width]


def _extend(
    layers: list[Layer], requests: Sequence[Request], logits: torch.Tensor, width: int, vocabulary: Vocabulary | None
) -> None:
    """Append the next layer; ``logits`` [num_requests, beam, draft_vocab] are of the last one, or of the roots."""
    if vocabulary is not None and any(request.noise is not None for request in requests):
        logits, vocabulary = vocabulary.spread(logits), None  # noise and processors are the target's, by its ids
    logits = coupled(requests, len(layers), logits, lambda place: _paths(layers, place))
    path_logprobs = layers[-1][2] if layers else logits.new_zeros(len(requests), 1, dtype=torch.float32)
    tokens, parents, path_logprobs = extend_beam(path_logprobs, logits, width)
    layers.append((tokens if vocabulary is None else vocabulary.target_ids[tokens], parents, path_logprobs))


def _paths(layers: Sequence[Layer], place: int) -> torch.Tensor:
    """Return the tokens from below the root to each node of one request's last layer.  -> [beam, depth] int64"""
    if not layers:
        return torch.empty(1, 0, dtype=torch.int64)
    tokens, parents = layers[-1][0][place], layers[-1][1][place]
    above = _paths(layers[:-1], place).to(tokens.device)
    return torch.cat((above[parents], tokens[:, None]), dim=1)


def _least_confident(layers: Sequence[Layer]) -> torch.Tensor:
    """Return the log probability of the least probable token, given its parent, on each path to the last layer.

    -> [num_requests, beam] f32
    """
    _, _, path_logprobs = layers[0]
    least = path_logprobs
    for _, parents, deeper in layers[1:]:
        least = torch.minimum(least.gather(1, parents), deeper - path_logprobs.gather(1, parents))
        path_logprobs = deeper
    return least


def _is_futile(layers: Sequence[Layer], plan: Plan) -> torch.Tensor:
    """Return whether no node deeper than these can be worth its level.  -> [] bool"""
    _, _, path_logprobs = layers[-1]
    futile = path_logprobs.new_zeros((), dtype=torch.bool)
    if plan.min_gain:
        gain = (path_logprobs.exp() - plan.min_path_prob).clamp(min=0.0).sum()
        futile |= gain.double() < plan.min_gain
    if plan.min_confidence:
        futile |= ~(_least_confident(layers) > log(plan.min_confidence)).any()
    return futile


def beam_search(
    requests: Sequence[Request],
    plan: Plan,
    roots: Scores,
    forward: Callable[[BeamLayer], Scores],
    root_positions: Sequence[int],
    vocabulary: Vocabulary | None = None,
) -> list[TokenTree]:
    """Return the candidate trees of requests, with all nodes of the beam.

    Args:
        roots: what the draft model returned for the roots, ``beam`` being 1.
        forward: forwards a layer, whose nodes see the text and their ancestors.
        root_positions: [num_requests], the roots' positions in the draft's text.
        vocabulary: what the columns of the logits stand for; None: the target's ids.
    """
    logits, states = roots
    device = logits.device
    positions_of_roots = to_device(torch.tensor(root_positions), device)
    layers = list[Layer]()
    _extend(layers, requests, logits, plan.width, vocabulary)
    # ancestors[i, v, u]: node v of request i's last layer may attend to node u of all its layers so far
    ancestors = _own(layers[0][0])
    positions = torch.empty(len(requests), 0, dtype=torch.int64, device=device)
    is_over = DeferredFlags(device)
    for depth in range(1, plan.depth):
        tokens, parents, _ = layers[-1]
        if (plan.min_gain or plan.min_confidence) and is_over.next(_is_futile(layers, plan)):
            break
        own_positions = (positions_of_roots + depth)[:, None].expand(-1, tokens.shape[1])
        positions = torch.cat((positions, own_positions), dim=1)
        if states is not None:
            states = states.gather(1, parents[..., None].expand(-1, -1, states.shape[-1]))
        logits, states = forward(BeamLayer(tokens, positions, ancestors, states))
        _extend(layers, requests, logits, plan.width, vocabulary)
        tokens, parents, _ = layers[-1]
        inherited = ancestors.gather(1, parents[..., None].expand(-1, -1, ancestors.shape[-1]))
        ancestors = torch.cat((inherited, _own(tokens)), dim=-1)
    return _trees(requests, layers)


def _own(tokens: torch.Tensor) -> torch.Tensor:
    """Return a layer's mask among itself: each node sees itself only.  -> [num_requests, beam, beam] bool"""
    eye = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return eye.expand(len(tokens), -1, -1)


def _trees(requests: Sequence[Request], layers: Sequence[Layer]) -> list[TokenTree]:
    """Return candidate trees (node 0 the root, then layer after layer), by one copy from the device."""
    tokens, parents, path_logprobs = (torch.cat(columns, dim=1) for columns in zip(*layers, strict=True))
    packed = torch.stack((tokens.double(), parents.double(), path_logprobs.double())).cpu().numpy()
    widths = [layer[0].shape[1] for layer in layers]
    depths = np.repeat(np.arange(len(layers) + 1), [1, *widths])
    first_of_parent_layer = np.repeat(np.cumsum([0, 1, *widths])[: len(layers)], widths)
    trees = []
    for index, request in enumerate(requests):
        own_tokens, own_parents, own_logprobs = packed[:, index]
        trees.append(
            TokenTree(
                np.concatenate(([request.tokens[-1]], own_tokens.astype(np.int64))),
                np.concatenate(([-1], first_of_parent_layer + own_parents.astype(np.int64))),
                depths,
                np.concatenate(([1.0], np.exp(own_logprobs))),
            )
        )
    return trees
