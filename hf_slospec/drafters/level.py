"""Levels of a beam search: the inputs and outputs of a draft model for the last layer, and the next
layer computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from hf_slospec.model.batch import FIRST_SEEN, NewTokens
from hf_slospec.model.transfer import to_device

# tokens, parents, path_logprobs, each [num_rows, beam]
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(NamedTuple):
    """Outputs of a draft model for one layer of the beam; the first layer is the root."""

    logits: torch.Tensor  # [num_rows, beam, draft_vocab]
    states: torch.Tensor | None = None  # [num_rows, beam, hidden], inputs of the nodes' children
    # [num_rows, beam] f32 <= 0, added to the children's path_logprobs
    log_acceptance: torch.Tensor | None = None


class Beam(NamedTuple):
    """All layers of the beam so far."""

    # [num_rows, 3, num_nodes] int64: tokens, parents, bits of the f32 path log probabilities
    nodes: torch.Tensor
    path_logprobs: torch.Tensor  # [num_rows, beam] f32, of the last layer
    states: torch.Tensor | None  # [num_rows, parent_beam, hidden], of the layer before the last
    # [num_rows] bool: rows of which one more level may be worth its time
    is_worthwhile: torch.Tensor | None


class Vocabulary(NamedTuple):
    """Tokens that a draft model proposes, if its ids differ from the target's."""

    # [draft_vocab] int64, the target's id of each column of the draft's logits
    target_ids: torch.Tensor
    size: int  # number of tokens in the target's vocabulary

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf for other tokens.  [..., draft_vocab] ->
        [..., size]
        """
        whole = logits.new_full((*logits.shape[:-1], self.size), -inf)
        return whole.index_copy_(-1, self.target_ids, logits)


class Network(Protocol):
    """Inputs and outputs of a draft model.

    CUDA graphs are kept by its attributes, and read its tensors, which therefore keep their
    addresses."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Tokens of the logits' columns; None: the target's ids."""

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the model's inputs by name, [1, num_tokens, ...].

        Args:
            tokens: [num_tokens] int64, ids of the target.
            states: [num_tokens, hidden], of the tokens' parents.
        """

    def scores(self, outputs: torch.Tensor) -> Scores:
        """Return the scores in a model's output [num_rows, beam, ...]."""


class LevelLimits(NamedTuple):
    """Limits below which a level is not worth its time; tensors, as they change with every step."""

    min_gain: torch.Tensor  # [] f64
    min_request_gain: torch.Tensor  # [] f64
    min_path_prob: torch.Tensor  # [] f64
    weights: torch.Tensor  # [num_rows, 1] f32
    levels: torch.Tensor  # [num_rows] int64, maximum depths
    log_min_confidence: torch.Tensor | None  # [] f64; None: no limit


@dataclass(frozen=True, eq=False)
class Level:
    """The beam so far, and the computation of its next layer from the draft model's outputs for the
    last one.

    Rows are requests, then padding whose paths have probability 0.
    """

    # None: ``inputs`` and ``outputs`` are not used, and logits are of the target's ids
    network: Network | None
    sizes: tuple[int, ...]  # nodes per row in each layer so far; the first one is the root
    width: int  # maximum number of nodes per row in the next layer
    nodes: torch.Tensor  # see Beam
    states: torch.Tensor | None  # see Beam; at the root, the root's own, [num_rows, 1, hidden]
    limits: LevelLimits | None  # None: is_worthwhile is not computed
    # The next layer needs the requests' noise or grammars, so it is computed outside of graphs
    is_coupled: bool

    def of(self, rows: torch.Tensor) -> Level:
        """Return the level of some rows, [num_rows] bool."""
        limits = self.limits
        states = self.states
        return replace(
            self,
            nodes=self.nodes[rows],
            states=None if states is None else states[rows],
            limits=limits
            and limits._replace(weights=limits.weights[rows], levels=limits.levels[rows]),
        )

    @property
    def beam(self) -> int:
        """Nodes per row in the last layer."""
        return self.sizes[-1]

    @property
    def is_root(self) -> bool:
        return len(self.sizes) == 1

    @property
    def num_logits(self) -> int:
        """Rows of logits that the next layer is computed from."""
        return len(self.nodes) * self.beam

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens of the last layer.  [num_rows, beam] int64"""
        return self.nodes[:, 0, -self.beam :]

    @property
    def inherited_states(self) -> torch.Tensor | None:
        """States of the last layer's parents, one per node.  [num_rows, beam, hidden]"""
        if self.states is None or self.is_root:
            return self.states
        parents = self.nodes[:, 1, -self.beam :] - sum(self.sizes[:-2])
        return self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))

    @property
    def ancestors(self) -> torch.Tensor:
        """Mask of the last layer's nodes over staged ones, True = may attend.  [num_rows, beam,
        num_staged] bool
        """
        num_nodes = self.nodes.shape[2]
        paths = _paths(self.nodes, self.beam, len(self.sizes) - 1)
        return (paths[..., None] == torch.arange(1, num_nodes, device=paths.device)).any(-2)

    def resolved(self, parts: Sequence[NewTokens]) -> Sequence[NewTokens]:
        """Return the parts with boolean masks, instead of masks that index ``seen``."""
        if self.is_root:
            return parts
        positions = to_device([part.positions for part in parts], self.nodes.device)
        masks = self.ancestors.unbind()
        return [
            replace(part, positions=part_positions, mask=mask)
            for part, part_positions, mask in zip(
                parts, positions, masks, strict=False
            )  # without rows of padding
        ]

    @property
    def seen(self) -> torch.Tensor | None:
        """Values that the parts' masks index: False, True, then ``ancestors``; None for roots.
        [num_values] bool
        """
        if self.is_root:
            return None
        return F.pad(F.pad(self.ancestors.flatten(), (1, 0), value=True), (FIRST_SEEN - 1, 0))

    def inputs(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's inputs, of ids of roots or indices into the last layer, [1,
        num_tokens].
        """
        if self.is_root:
            return tokens
        assert self.network is not None
        indices = tokens["input_ids"][0]
        states = self.inherited_states
        node_states = None if states is None else states.flatten(0, 1)[indices]
        return self.network.inputs(self.tokens.flatten()[indices], node_states)

    def outputs(self, logits: torch.Tensor) -> Beam | Scores:
        """Return the beam with its next layer, or the scores if the next layer needs noise.

        Args:
            logits: [num_rows * beam, ...], the model's output for the last layer; heads append
                states.
        """
        assert self.network is not None
        return self.grown(self.network.scores(logits.unflatten(0, (len(self.nodes), self.beam))))

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Tokens of the logits' columns; None: the target's ids."""
        return None if self.network is None else self.network.vocabulary

    def grown(self, scores: Scores) -> Beam | Scores:
        """Return the beam with its next layer, or the unchanged scores if the next layer needs
        noise.
        """
        return scores if self.is_coupled else self.extended(scores, self.vocabulary)

    def extended(self, scores: Scores, vocabulary: Vocabulary | None) -> Beam:
        """Return the beam with its next layer."""
        path_logprobs = _logprobs(self.nodes[:, 2, -self.beam :])
        if scores.log_acceptance is not None:
            path_logprobs = path_logprobs + scores.log_acceptance
        tokens, parents, path_logprobs = extend_beam(path_logprobs, scores.logits, self.width)
        if vocabulary is not None:
            tokens = vocabulary.target_ids[tokens]
        layer = torch.stack(
            (tokens, parents + sum(self.sizes[:-1]), path_logprobs.view(torch.int32).long()), dim=1
        )
        nodes = torch.cat((self.nodes, layer), dim=2)
        depth = len(self.sizes)
        limits = self.limits
        is_worthwhile = (
            None if limits is None else _is_worthwhile(nodes, path_logprobs, depth, limits)
        )
        return Beam(nodes, path_logprobs, scores.states, is_worthwhile)

    def path_tokens(self, row: int) -> torch.Tensor:
        """Return the path to each node of one row's last layer, without the root.  -> [beam, depth]
        int64
        """
        paths = _paths(self.nodes[row : row + 1], self.beam, len(self.sizes) - 1)[0]
        return self.nodes[row, 0][paths]


def extend_beam(path_logprobs: torch.Tensor, logits: torch.Tensor, width: int) -> Layer:
    """Return the next layer of every request's beam, best first, ties by (parent, rank of the
    child).

    Only the best children are normalised, so the vocabulary is read twice: by topk and by
    logsumexp.

    Args:
        path_logprobs: [num_requests, beam] f32, of the current layer, best first.
        logits: [num_requests, beam, vocab] of the same nodes.
        width: nodes to keep per request.

    Returns:
        tokens, parents (index into the current layer) and path_logprobs, each [num_requests,
        new_beam] with new_beam = min(width, beam * vocab).
    """
    children = logits.topk(min(width, logits.shape[-1]), dim=-1)
    logprobs = children.values.float() - logits.float().logsumexp(-1, keepdim=True)
    # Rounding may put a certain token's probability above 1; a NaN would sort before every real
    # path.
    logprobs = logprobs.clamp(max=0.0).nan_to_num(nan=-inf, neginf=-inf)
    num_children = logprobs.shape[-1]
    paths = (path_logprobs[..., None] + logprobs).flatten(1)  # [num_requests, beam * num_children]
    paths, order = paths.sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return children.indices.flatten(1).gather(1, order), order // num_children, paths[:, :width]


def _logprobs(bits: torch.Tensor) -> torch.Tensor:
    """Return floats from their bits.  [...] int64 -> [...] f32"""
    return bits.int().view(torch.float32)


def _paths(nodes: torch.Tensor, num_last: int, depth: int) -> torch.Tensor:
    """Return the path to each of the last nodes, without the root.  -> [num_rows, num_last, depth]
    int64
    """
    num_rows, _, num_nodes = nodes.shape
    node = torch.arange(num_nodes - num_last, num_nodes, device=nodes.device).expand(num_rows, -1)
    path = [node]
    for _ in range(depth - 1):
        path.append(nodes[:, 1].gather(1, path[-1]))
    return torch.stack(path[::-1], dim=-1) if depth else node[..., None][..., :0]


def _is_worthwhile(
    nodes: torch.Tensor, path_logprobs: torch.Tensor, depth: int, limits: LevelLimits
) -> torch.Tensor:
    """Return the rows of which a level below the last one may be worth its time; none if it is not.
     -> [num_rows] bool

    ``path_logprobs`` [num_rows, beam] f32 are those of the last layer, at ``depth``.
    """
    weights, levels = to_device((limits.weights, limits.levels), nodes.device)
    values = weights * path_logprobs.exp()
    gains: torch.Tensor = (values - limits.min_path_prob).clamp(min=0.0).sum(1, dtype=torch.float64)
    is_worthwhile: torch.Tensor = (gains > limits.min_request_gain) & (levels > depth)
    if limits.log_min_confidence is not None:
        paths = _paths(nodes, path_logprobs.shape[1], depth).flatten(1)
        parents = nodes[:, 1].gather(1, paths)
        logprobs = _logprobs(nodes[:, 2])
        # Log probability of each token on the path to a node, given its parent.
        conditionals = (logprobs.gather(1, paths) - logprobs.gather(1, parents)).view(
            *path_logprobs.shape, depth
        )
        is_worthwhile &= (conditionals.amin(-1) > limits.log_min_confidence).any(1)
    return is_worthwhile & (
        ((gains - limits.min_request_gain) * is_worthwhile).sum() >= limits.min_gain
    )
