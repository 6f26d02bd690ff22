"""Drafting with an assistant model, by a beam search of all requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.costs import MAX_CATCH_UP
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.compatibility.probe import evaluating
from hf_slospec.models.coupling import coupled
from hf_slospec.models.cuda.deferred import DeferredFlags
from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.kv_cache.request_sequences import RequestSequences
from hf_slospec.models.memory import as_memory_error
from hf_slospec.models.packed import PackedModel

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, parents and path_logprobs, [num_requests, beam] each


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


def _extend(layers: list[Layer], requests: Sequence[Request], logits: torch.Tensor, width: int) -> None:
    """Append the next layer; ``logits`` [num_requests, beam, vocab] are of the last one, or of the roots."""
    logits = coupled(requests, len(layers), logits, lambda place: _paths(layers, place))
    path_logprobs = layers[-1][2] if layers else logits.new_zeros(len(requests), 1, dtype=torch.float32)
    layers.append(extend_beam(path_logprobs, logits, width))


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


class AssistantDrafter:
    """Beam search on the draft model's probabilities, coupled to the noise of sampled requests.

    Its candidate trees hold every beam node. The draft's K/V cache holds committed tokens only: a call first processes
    every token that lacks K/V, be it the whole prompt, a stretch decoded without drafting, or the last step's tokens.
    Long stretches are processed over several steps, so that a long prompt does not stall other requests; until a
    request has caught up, its trees are roots.
    """

    CATCH_UP = 1024  # tokens processed per step at most, over all requests that lack more than FEW
    FEW = MAX_CATCH_UP

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        vocab_size: int,
        max_slots: int | None = None,
        max_kept: float = 0,
    ):
        """``max_nodes`` bounds depth times width of plans, ``vocab_size`` the proposed ids.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`.
        """
        self.packed, self.vocab_size = packed, vocab_size
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with as_memory_error(), evaluating(self.packed.model):
            return self._trees_of(requests, plan)

    def _trees_of(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self.sequences.reserve(requests)
        for request in requests:  # after a step that was undone the root may be cached; its logits are wanted again
            own = self.sequences.of(request)
            own.length = min(own.length, len(request.tokens) - 1)
        ready = self._catch_up(requests)
        trees = dict(zip(ready, self._draft(ready, plan) if ready else [], strict=True))
        return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _catch_up(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that can draft now, after processing as many tokens of others as a step may."""
        ready, left = [], self.CATCH_UP
        for request in requests:
            behind = len(self.sequences.uncached(request))
            if behind <= self.FEW:
                ready.append(request)
            elif behind <= left:
                ready.append(request)
                left -= behind
            elif left:
                self.sequences.prefill(request, left)
                left = 0
        return ready

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        logits = self._root_logits(requests)[:, None]  # [num_requests, 1, vocab]
        device = self.packed.device
        root_positions = to_device(torch.tensor([len(request.tokens) - 1 for request in requests]), device)
        layers = list[Layer]()
        _extend(layers, requests, logits, plan.width)
        # ancestors[i, v, u]: node v of request i's last layer may attend to node u of all its layers so far
        ancestors = self._own(layers[0][0])
        positions = torch.empty(len(requests), 0, dtype=torch.int64, device=device)
        is_over = DeferredFlags(device)
        for depth in range(1, plan.depth):
            tokens, _, _ = layers[-1]
            if (plan.min_gain or plan.min_confidence) and is_over.next(_is_futile(layers, plan)):
                break
            own_positions = (root_positions + depth)[:, None].expand(-1, tokens.shape[1])
            positions = torch.cat((positions, own_positions), dim=1)
            logits = self._forward_layer(requests, tokens, positions, ancestors)
            _extend(layers, requests, logits, plan.width)
            tokens, parents, _ = layers[-1]
            inherited = ancestors.gather(1, parents[..., None].expand(-1, -1, ancestors.shape[-1]))
            ancestors = torch.cat((inherited, self._own(tokens)), dim=-1)
        return self._trees(requests, layers)

    def reuse(self, request: Request) -> int:
        """Give a request that has no K/V that of a text which begins alike; return its tokens with K/V."""
        return self.sequences.reuse(request)

    def release(self, request: Request) -> None:
        self.sequences.release(request)

    def close(self) -> None:
        """Release all requests and the model's K/V cache."""
        self.sequences.close()

    def _own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a layer's mask among itself: each node sees itself only.  -> [num_requests, beam, beam] bool"""
        eye = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return eye.expand(len(tokens), -1, -1)

    def _root_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        """Cache all committed tokens that lack K/V.  -> logits after each root, [num_requests, vocab]"""
        tails = [self.sequences.uncached(request) for request in requests]
        parts = [self.sequences.chain(request, tail) for request, tail in zip(requests, tails, strict=True)]
        last_rows = np.cumsum([len(tail) for tail in tails]) - 1
        logits = self._logits(parts, torch.from_numpy(last_rows))
        for request in requests:
            self.sequences.of(request).length = len(request.tokens)
        return logits

    def _forward_layer(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor,  # [num_requests, beam]
        positions: torch.Tensor,  # [num_requests, num_staged]
        ancestors: torch.Tensor,  # [num_requests, beam, num_staged] bool
    ) -> torch.Tensor:
        """Return the logits of one beam layer.  -> [num_requests, beam, vocab]"""
        sequences = [self.sequences.of(request) for request in requests]
        positions = self.packed.clamp_positions(positions)
        parts = [NewTokens(*part) for part in zip(sequences, tokens, positions, ancestors, strict=True)]
        return self._logits(parts, torch.arange(tokens.numel())).view(*tokens.shape, -1)

    def _logits(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> torch.Tensor:
        """Return logits of the ids that both models have, as either vocabulary may be padded further than the other."""
        return self.sequences.forward(parts, logit_rows)[:, : self.vocab_size]

    def _trees(self, requests: Sequence[Request], layers: Sequence[Layer]) -> list[TokenTree]:
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
