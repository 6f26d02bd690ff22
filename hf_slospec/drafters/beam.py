"""Beam search of all requests at once, on the probabilities of a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, log

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.drafters.level import Beam, Level, Limits, Network, Scores
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.coupling import coupled, is_ranked
from hf_slospec.models.device.deferred import DeferredFlags
from hf_slospec.models.device.transfer import to_device

NO_PATH = int(np.float32(-inf).view(np.int32))  # bits of the log probability of a row of padding


def beam_search(
    requests: Sequence[Request],
    plan: Plan,
    network: Network | None,
    run: Callable[[Level], Beam | Scores],
    device: torch.device,
    num_rows: int | None = None,
    states: torch.Tensor | None = None,
) -> list[TokenTree]:
    """Return the candidate trees of requests, which hold all nodes of the beam.

    Args:
        network: the draft model; see :class:`Level`.
        run: forwards the last layer of the beam (at first the roots), and returns ``Level.grown``.
        device: of the draft model.
        num_rows: rows of the beam, padding included; None: no padding.
        states: [num_requests, 1, hidden], inputs of the roots, if the network takes states.
    """
    limits, is_over = _limits(plan), DeferredFlags(device)
    nodes = to_device(_roots(requests, num_rows or len(requests)), device)
    level = Level(network, (1,), plan.width, nodes, states, limits, is_coupled=False)
    for depth in range(plan.depth):
        is_last = depth == plan.depth - 1
        is_coupled = any(map(is_ranked, requests))
        level = replace(level, limits=None if is_last else limits, is_coupled=is_coupled)
        grown = run(level)
        beam = grown if isinstance(grown, Beam) else _coupled(requests, level, grown)
        sizes = *level.sizes, beam.nodes.shape[2] - sum(level.sizes)
        if is_last or (beam.is_futile is not None and is_over.next(beam.is_futile)):
            break
        if plan.goes_on is not None:
            path_probs = beam.path_logprobs[: len(requests)].exp().double().cpu().numpy()
            if not plan.goes_on(path_probs):
                break
        level = replace(level, sizes=sizes, nodes=beam.nodes, states=beam.states)
    return _trees(requests, beam.nodes, sizes)


def _limits(plan: Plan) -> Limits | None:
    if not plan.min_gain and not plan.min_confidence:
        return None
    log_min = torch.tensor(log(plan.min_confidence), dtype=torch.float64) if plan.min_confidence else None
    gain, prob = torch.tensor((plan.min_gain, plan.min_path_prob), dtype=torch.float64).unbind()
    return Limits(gain, prob, log_min)


def _roots(requests: Sequence[Request], num_rows: int) -> torch.Tensor:
    """Return the nodes of the beam's first layer; see :class:`Beam`.  -> [num_rows, 3, 1] int64"""
    padding = [(0, -1, NO_PATH)] * (num_rows - len(requests))
    return torch.tensor([*((request.tokens[-1], -1, 0) for request in requests), *padding])[..., None]


def _coupled(requests: Sequence[Request], level: Level, scores: Scores) -> Beam:
    """Return the beam with its next layer, ranked by the noise of sampled requests and by grammars."""
    logits, vocabulary = scores.logits, level.vocabulary
    if vocabulary is not None:
        logits = vocabulary.spread(logits)  # noise and processors are by the target's ids
    logits = coupled(requests, len(level.sizes) - 1, logits, level.path_tokens)
    return level.extended(scores._replace(logits=logits), None)


def _trees(requests: Sequence[Request], nodes: torch.Tensor, sizes: Sequence[int]) -> list[TokenTree]:
    """Return candidate trees (node 0 the root, then layer after layer), with one copy from the device."""
    tokens, parents, bits = nodes[: len(requests)].cpu().numpy().swapaxes(0, 1)
    probs = np.exp(bits.astype(np.int32).view(np.float32).astype(np.float64))
    depths = np.repeat(np.arange(len(sizes)), sizes)
    columns = zip(tokens, parents, probs, strict=True)
    return [TokenTree(row_tokens, row_parents, depths, row_probs) for row_tokens, row_parents, row_probs in columns]
