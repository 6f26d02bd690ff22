"""Beam search of all requests at once, on the probabilities of a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, log

import numpy as np
import torch

from hf_slospec.drafters.level import Beam, Level, LevelLimits, Network, Scores
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.coupling import coupled, is_ranked
from hf_slospec.model.transfer import DeferredFlags, to_device
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray, TokenTree

# bits of the f32 log probability -inf, that of rows of padding
NO_PATH = int(np.float32(-inf).view(np.int32))


def beam_search(
    requests: Sequence[Request],
    plan: Plan,
    network: Network | None,
    run: Callable[[IntArray, Level], Beam | Scores],
    device: torch.device,
    num_rows: int | None = None,
    states: torch.Tensor | None = None,
) -> list[TokenTree]:
    """Return the candidate trees of requests, which hold all nodes of their beams.

    On a CPU, a request leaves the search once one more level is not worth its time for it. On other
    devices, which would have to wait for the host, all requests stay until one more level is worth
    its time for none.

    Args:
        network: the draft model; see :class:`Level`.
        run: forwards the last tree level (at first the roots) of the requests at the given indices,
            and returns the result of ``Level.grown``.
        device: device of the draft model.
        num_rows: number of rows of the beam, padding included, none of which leaves; None: one row
            per request, which may leave.
        states: [num_requests, 1, hidden], states that are inputs of the roots, if the network takes
            any.
    """
    flags = DeferredFlags(device)
    trees = dict[int, TokenTree]()
    indices: IntArray = np.arange(len(requests))
    may_leave = num_rows is None and not flags.lag
    has_graphs = num_rows is not None
    num_rows = num_rows or len(requests)
    limits = _limits(plan, requests, num_rows)
    nodes = to_device(_roots(requests, num_rows), device)
    level = Level(network, (1,), plan.width, nodes, states, limits, is_coupled=False)
    for depth in range(1, plan.depth + 1):
        drafting = [requests[index] for index in indices]
        is_last = depth == plan.depth
        is_coupled = any(map(is_ranked, drafting))
        # With CUDA graphs, the last level has limits, too, so that it uses the same graph as other
        # levels.
        level = replace(
            level, limits=limits if has_graphs or not is_last else None, is_coupled=is_coupled
        )
        grown = run(indices, level)
        beam = grown if isinstance(grown, Beam) else _coupled(drafting, level, grown)
        sizes = *level.sizes, beam.nodes.shape[2] - sum(level.sizes)
        if is_last:
            break
        goes_on = None if beam.is_worthwhile is None else flags.next(beam.is_worthwhile)
        if plan.goes_on is not None:
            path_probs = beam.path_logprobs[: len(indices)].exp().double().cpu().numpy()
            by_policy = plan.goes_on(path_probs, indices)
            goes_on = by_policy if goes_on is None else by_policy & goes_on[: len(indices)]
        if goes_on is not None and not goes_on.any():
            break
        level = replace(level, sizes=sizes, nodes=beam.nodes, states=beam.states)
        if may_leave and goes_on is not None and not goes_on.all():
            rows = torch.from_numpy(goes_on)
            trees |= zip(indices[~goes_on].tolist(), _trees(level.nodes[~rows], sizes), strict=True)
            indices = indices[goes_on]
            level = level.of(rows)
            limits = level.limits
    trees |= zip(indices.tolist(), _trees(beam.nodes[: len(indices)], sizes), strict=True)
    return [trees[index] for index in range(len(requests))]


def _limits(plan: Plan, requests: Sequence[Request], num_rows: int) -> LevelLimits | None:
    if not (plan.min_gain or plan.min_request_gain or plan.min_confidence or plan.depths):
        return None
    weights = torch.ones(num_rows, 1, device="cpu")
    weights_asked = [plan.weight_of(each) for each in requests]
    weights[: len(requests), 0] = torch.tensor(weights_asked, device="cpu")
    levels = torch.full((num_rows,), plan.depth, device="cpu")
    levels_asked = [plan.levels_of(each) for each in requests]
    levels[: len(requests)] = torch.tensor(levels_asked, device="cpu")
    limits = (plan.min_gain, plan.min_request_gain, plan.min_path_prob)
    gain, request_gain, prob = torch.tensor(limits, dtype=torch.float64, device="cpu").unbind()
    log_min = None
    if plan.min_confidence:
        log_min = torch.tensor(log(plan.min_confidence), dtype=torch.float64, device="cpu")
    return LevelLimits(gain, request_gain, prob, weights, levels, log_min)


def _roots(requests: Sequence[Request], num_rows: int) -> torch.Tensor:
    """Return the roots, the first tree level of the beam; see :class:`Beam`. -> [num_rows, 3, 1]
    int64
    """
    padding = [(0, -1, NO_PATH)] * (num_rows - len(requests))
    return torch.tensor(
        [*((request.tokens[-1], -1, 0) for request in requests), *padding], device="cpu"
    )[..., None]


def _coupled(requests: Sequence[Request], level: Level, scores: Scores) -> Beam:
    """Return the beam with its next tree level, ranked by the noise of sampled requests and by
    grammars.
    """
    logits = scores.logits
    vocabulary = level.vocabulary
    if vocabulary is not None:
        logits = vocabulary.spread(logits)  # noise and logits processors use the target's token ids
    logits = coupled(requests, len(level.sizes) - 1, logits, level.path_tokens)
    return level.extended(scores._replace(logits=logits), None)


def _trees(nodes: torch.Tensor, sizes: Sequence[int]) -> list[TokenTree]:
    """Return candidate trees (node 0 is the root, then level after level), with one copy from the
    device.
    """
    tokens, parents, bits = nodes.cpu().numpy().swapaxes(0, 1)
    probs = np.exp(bits.astype(np.int32).view(np.float32).astype(np.float64))
    depths = np.repeat(np.arange(len(sizes)), sizes)
    columns = zip(tokens, parents, probs, strict=True)
    return [
        TokenTree(row_tokens, row_parents, depths, row_probs)
        for row_tokens, row_parents, row_probs in columns
    ]
