"""One level of a beam search: the draft model's inputs for the last tree level, and the next tree
level, computed from its outputs. ``beam.py`` has the loop over levels.
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

# Nodes of one tree level: tokens, parents, path_logprobs, each [num_rows, beam]
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(NamedTuple):
    """Outputs of a draft model for one tree level of the beam; the first level is the root."""

    logits: torch.Tensor  # [num_rows, beam, draft_vocab]
    states: torch.Tensor | None = None  # [num_rows, beam, hidden], inputs of the nodes' children
    # [num_rows, beam] f32 <= 0, added to the children's path_logprobs
    log_acceptance: torch.Tensor | None = None


class Beam(NamedTuple):
    """All tree levels of the beam so far."""

    # [num_rows, 3, num_nodes] int64: tokens, parents, bits of the f32 path log probabilities
    nodes: torch.Tensor
    path_logprobs: torch.Tensor  # [num_rows, beam] f32, of the last level
    states: torch.Tensor | None  # [num_rows, parent_beam, hidden], of the level before the last
    # [num_rows] bool: rows for which one more level may be worth its time; None: not computed
    is_worthwhile: torch.Tensor | None


class Vocabulary(NamedTuple):
    """Vocabulary of a draft model whose token ids differ from the target's."""

    # [draft_vocab] int64, the target's token id for each column of the draft model's logits
    target_ids: torch.Tensor
    size: int  # number of tokens in the target's vocabulary

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf for tokens that the draft model cannot
        propose. [..., draft_vocab] -> [..., size]
        """
        whole = logits.new_full((*logits.shape[:-1], self.size), -inf)
        return whole.index_copy_(-1, self.target_ids, logits)


class Network(Protocol):
    """Protocol that makes the inputs of a draft model and reads its outputs.

    CUDA graphs are cached by the attributes of this object, and read its tensors, which must
    therefore stay at their addresses."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of the logits' columns; None: the target's."""

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the model's inputs by name, [1, num_tokens, ...].

        Args:
            tokens: [num_tokens] int64, token ids of the target.
            states: [num_tokens, hidden], ``Scores.states`` of the tokens' parents; None: there are
                none.
        """

    def scores(self, outputs: torch.Tensor) -> Scores:
        """Return the scores that a model's output [num_rows, beam, ...] holds."""


class LevelLimits(NamedTuple):
    """Limits of :class:`Plan` below which one more level is not worth its time; tensors, as they
    change with every step.
    """

    min_gain: torch.Tensor  # [] f64
    min_request_gain: torch.Tensor  # [] f64
    min_path_prob: torch.Tensor  # [] f64
    weights: torch.Tensor  # [num_rows, 1] f32
    levels: torch.Tensor  # [num_rows] int64, maximum depths
    log_min_confidence: torch.Tensor | None  # [] f64; None: no limit


@dataclass(frozen=True, eq=False)
class Level:
    """The beam so far, and the computation of its next tree level from the draft model's outputs
    for the last one.

    Rows are requests, then padding whose paths have probability 0.
    """

    # None: ``inputs`` and ``outputs`` must not be called, and logits are over the target's
    # vocabulary
    network: Network | None
    sizes: tuple[int, ...]  # nodes per row in each level so far; the first level is the root
    width: int  # maximum number of nodes per row in the next level
    nodes: torch.Tensor  # see Beam
    # see Beam; at the first level, states of the roots, [num_rows, 1, hidden]
    states: torch.Tensor | None
    limits: LevelLimits | None  # None: is_worthwhile is not computed
    # The next level needs the requests' noise or grammars, so it is computed outside of CUDA graphs
    is_coupled: bool

    def of(self, rows: torch.Tensor) -> Level:
        """Return the level with only the rows that are True in ``rows``, [num_rows] bool."""
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
        """Nodes per row in the last tree level."""
        return self.sizes[-1]

    @property
    def is_root(self) -> bool:
        return len(self.sizes) == 1

    @property
    def num_logits(self) -> int:
        """Number of rows of logits from which the next tree level is computed."""
        return len(self.nodes) * self.beam

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens of the last tree level.  [num_rows, beam] int64"""
        return self.nodes[:, 0, -self.beam :]

    @property
    def inherited_states(self) -> torch.Tensor | None:
        """States of the parents of the last tree level's nodes, one per node. [num_rows, beam,
        hidden]
        """
        if self.states is None or self.is_root:
            return self.states
        parents = self.nodes[:, 1, -self.beam :] - sum(self.sizes[:-2])
        return self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))

    @property
    def ancestors(self) -> torch.Tensor:
        """Attention mask of the last tree level's nodes over all nodes but the root, True = may
        attend.  [num_rows, beam, num_nodes - 1] bool
        """
        num_nodes = self.nodes.shape[2]
        paths = _paths(self.nodes, self.beam, len(self.sizes) - 1)
        return (paths[..., None] == torch.arange(1, num_nodes, device=paths.device)).any(-2)

    def resolved(self, parts: Sequence[NewTokens]) -> Sequence[NewTokens]:
        """Return the new tokens with boolean masks, instead of masks that index :attr:`seen`."""
        if self.is_root:
            return parts
        positions = to_device([part.positions for part in parts], self.nodes.device)
        masks = self.ancestors.unbind()
        # `zip` ends with the parts, since the last rows of the masks are padding.
        return [
            replace(part, positions=part_positions, mask=mask)
            for part, part_positions, mask in zip(parts, positions, masks, strict=False)
        ]

    @property
    def seen(self) -> torch.Tensor | None:
        """Table of booleans that the masks of new tokens index: False, True, then ``ancestors``;
        None at the root.  [num_values] bool
        """
        if self.is_root:
            return None
        return F.pad(F.pad(self.ancestors.flatten(), (1, 0), value=True), (FIRST_SEEN - 1, 0))

    def inputs(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the draft model's inputs by name.

        Args:
            tokens: ``input_ids`` [1, num_tokens]: token ids at the root, later indices into the
                nodes of the last tree level.
        """
        if self.is_root:
            return tokens
        assert self.network is not None
        indices = tokens["input_ids"][0]
        states = self.inherited_states
        node_states = None if states is None else states.flatten(0, 1)[indices]
        return self.network.inputs(self.tokens.flatten()[indices], node_states)

    def outputs(self, logits: torch.Tensor) -> Beam | Scores:
        """Return the beam with its next tree level, or the scores if that level needs noise.

        Args:
            logits: [num_rows * beam, ...], the model's output for the last level; drafting heads
                append states to the logits.
        """
        assert self.network is not None
        return self.grown(self.network.scores(logits.unflatten(0, (len(self.nodes), self.beam))))

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of the logits' columns; None: the target's."""
        return None if self.network is None else self.network.vocabulary

    def grown(self, scores: Scores) -> Beam | Scores:
        """Return the beam with its next tree level, or the unchanged scores if that level needs
        noise.
        """
        return scores if self.is_coupled else self.extended(scores, self.vocabulary)

    def extended(self, scores: Scores, vocabulary: Vocabulary | None) -> Beam:
        """Return the beam with its next tree level; ``vocabulary`` is the vocabulary of the logits,
        None: the target's.
        """
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
        """Return the tokens on the path to each node of one row's last level, without the root.  ->
        [beam, depth] int64
        """
        paths = _paths(self.nodes[row : row + 1], self.beam, len(self.sizes) - 1)[0]
        return self.nodes[row, 0][paths]


def extend_beam(path_logprobs: torch.Tensor, logits: torch.Tensor, width: int) -> Layer:
    """Return the next tree level of every request's beam, best first, ties by (parent, rank of the
    child).

    Only the best children are normalised, so the logits are read just twice: by topk and by
    logsumexp.

    Args:
        path_logprobs: [num_requests, beam] f32, of the current level, best first.
        logits: [num_requests, beam, vocab] of the same nodes.
        width: nodes to keep per request.

    Returns:
        tokens, parents (index into the current level) and path_logprobs, each [num_requests,
        new_beam] with new_beam = min(width, beam * vocab).
    """
    children = logits.topk(min(width, logits.shape[-1]), dim=-1)
    logprobs = children.values.float() - logits.float().logsumexp(-1, keepdim=True)
    # Rounding may give a token of probability 1 a log probability above 0, and a NaN would sort
    # before every real path.
    logprobs = logprobs.clamp(max=0.0).nan_to_num(nan=-inf, neginf=-inf)
    num_children = logprobs.shape[-1]
    paths = (path_logprobs[..., None] + logprobs).flatten(1)  # [num_requests, beam * num_children]
    paths, order = paths.sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return children.indices.flatten(1).gather(1, order), order // num_children, paths[:, :width]


def _logprobs(bits: torch.Tensor) -> torch.Tensor:
    """Return floats from their bits, as :class:`Beam` stores them. [...] int64 -> [...] f32"""
    return bits.int().view(torch.float32)


def _paths(nodes: torch.Tensor, num_last: int, depth: int) -> torch.Tensor:
    """Return the node indices on the path to each of the last nodes, without the root.  ->
    [num_rows, num_last, depth] int64
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
    """Return the rows for which one more level may be worth its time; none if the gains of all rows
    together are too small. -> [num_rows] bool

    ``path_logprobs`` [num_rows, beam] f32 are those of the last level, at ``depth``.
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
