"""Levels of a beam search as functions of tensors, which CUDA graphs hold together with the draft model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from hf_slospec.models.attention import FIRST_SEEN, NewTokens
from hf_slospec.models.device.transfer import to_device

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, parents and path_logprobs, [num_rows, beam] each


class Scores(NamedTuple):
    """Outputs of a draft model for one layer of the beam; the root is the first."""

    logits: torch.Tensor  # [num_rows, beam, draft_vocab]
    states: torch.Tensor | None = None  # [num_rows, beam, hidden], of which a child takes its parent's


class Beam(NamedTuple):
    """Layers of the beam so far, and what the host or the next level reads of the last one."""

    nodes: torch.Tensor  # [num_rows, 3, num_nodes] int64: tokens, parents, bits of the f32 path log probabilities
    path_logprobs: torch.Tensor  # [num_rows, beam] f32
    states: torch.Tensor | None  # [num_rows, parent_beam, hidden], of the layer above the last
    is_futile: torch.Tensor | None  # [1] bool: no deeper node can be worth its level


class Vocabulary(NamedTuple):
    """Tokens that a draft model proposes, where they are not simply the target's first ones."""

    target_ids: torch.Tensor  # [draft_vocab] int64, the target's id of each column of the logits
    size: int  # size of the target's vocabulary

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's whole vocabulary; -inf where the draft has none."""
        whole = logits.new_full((*logits.shape[:-1], self.size), -inf)
        return whole.index_copy_(-1, self.target_ids, logits)


class Network(Protocol):
    """Inputs and outputs of a draft model; its tensors keep their addresses, and its attributes tell it from others."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return the tokens that the columns of the logits stand for; None: the target's ids."""

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the model's input by name, [1, num_tokens, ...], for tokens [num_tokens] of the target.

        ``states`` [num_tokens, hidden] are those of the tokens' parents.
        """

    def scores(self, found: torch.Tensor) -> Scores:
        """Return what the model's output means.  [num_rows, beam, ...]"""


class Limits(NamedTuple):
    """Limits of a plan below which a level is not worth its time; tensors, as they change with every step."""

    min_gain: torch.Tensor  # [] f64
    min_path_prob: torch.Tensor  # [] f64
    log_min_confidence: torch.Tensor | None  # [] f64; None: no limit


@dataclass(frozen=True, eq=False)
class Level:
    """The beam before a level, and how its next layer is made of what the draft model returns for the last one.

    Rows are requests, and behind them padding whose paths have the probability 0.
    """

    network: Network | None  # None: ``outputs`` is not used, and logits are of the target's ids
    sizes: tuple[int, ...]  # nodes of each layer so far; the first one is the root
    width: int  # beam width of the next layer at most
    nodes: torch.Tensor  # see Beam
    states: torch.Tensor | None  # states of the parents' layer; at the root, those of the root itself
    limits: Limits | None  # None: whether the next layer is futile is not asked
    is_coupled: bool  # the next layer needs the requests' noise, so it is made outside of graphs

    @property
    def beam(self) -> int:
        """Nodes of the last layer."""
        return self.sizes[-1]

    @property
    def is_root(self) -> bool:
        """Return whether the last layer is the root."""
        return len(self.sizes) == 1

    @property
    def num_logits(self) -> int:
        """Rows of logits that the next layer is made of."""
        return len(self.nodes) * self.beam

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens of the last layer.  [num_rows, beam] int64"""
        return self.nodes[:, 0, -self.beam :]

    @property
    def inherited_states(self) -> torch.Tensor | None:
        """States that the nodes of the last layer take.  [num_rows, beam, hidden]"""
        if self.states is None or self.is_root:
            return self.states
        parents = self.nodes[:, 1, -self.beam :] - sum(self.sizes[:-2])
        return self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))

    @property
    def ancestors(self) -> torch.Tensor:
        """Return whether nodes of the last layer may attend to staged ones.  [num_rows, beam, num_staged] bool"""
        num_nodes = self.nodes.shape[2]
        paths = _paths(self.nodes, self.beam, len(self.sizes) - 1)
        return (paths[..., None] == torch.arange(1, num_nodes, device=paths.device)).any(-2)

    def resolved(self, parts: Sequence[NewTokens]) -> Sequence[NewTokens]:
        """Return parts whose masks say which staged tokens are seen, instead of where ``seen`` tells it."""
        if self.is_root:
            return parts
        positions = to_device([part.positions for part in parts], self.nodes.device)
        masks = self.ancestors.unbind()
        return [
            replace(part, positions=own, mask=mask)
            for part, own, mask in zip(parts, positions, masks, strict=False)  # without the rows of padding
        ]

    @property
    def seen(self) -> torch.Tensor | None:
        """Values that the parts' masks point to: False, True, then the ancestors; None for roots.  [num_values] bool"""
        if self.is_root:
            return None
        return F.pad(F.pad(self.ancestors.flatten(), (1, 0), value=True), (FIRST_SEEN - 1, 0))

    def inputs(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's inputs: roots as given, or nodes of the last layer by their places [1, num_tokens]."""
        if self.is_root:
            return tokens
        assert self.network is not None
        places, states = tokens["input_ids"][0], self.inherited_states
        own_states = None if states is None else states.flatten(0, 1)[places]
        return self.network.inputs(self.tokens.flatten()[places], own_states)

    def outputs(self, found: torch.Tensor) -> Beam | Scores:
        """Return the beam with its next layer, or what it is made of if noise is needed for it.

        Args:
            found: [num_rows * beam, ...], what the model returned for the last layer.
        """
        assert self.network is not None
        return self.grown(self.network.scores(found.unflatten(0, (len(self.nodes), self.beam))))

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return the tokens that the columns of the logits stand for; None: the target's ids."""
        return None if self.network is None else self.network.vocabulary

    def grown(self, scores: Scores) -> Beam | Scores:
        """Return the beam with its next layer, or the scores unchanged if noise is needed for it."""
        return scores if self.is_coupled else self.extended(scores, self.vocabulary)

    def extended(self, scores: Scores, vocabulary: Vocabulary | None) -> Beam:
        """Return the beam with its next layer."""
        path_logprobs = _logprobs(self.nodes[:, 2, -self.beam :])
        tokens, parents, path_logprobs = extend_beam(path_logprobs, scores.logits, self.width)
        if vocabulary is not None:
            tokens = vocabulary.target_ids[tokens]
        layer = torch.stack((tokens, parents + sum(self.sizes[:-1]), path_logprobs.view(torch.int32).long()), dim=1)
        nodes = torch.cat((self.nodes, layer), dim=2)
        is_futile = None if self.limits is None else _is_futile(nodes, path_logprobs, len(self.sizes), self.limits)
        return Beam(nodes, path_logprobs, scores.states, is_futile)

    def path_tokens(self, row: int) -> torch.Tensor:
        """Return the tokens from below the root to each node of one row's last layer.  -> [beam, depth] int64"""
        paths = _paths(self.nodes[row : row + 1], self.beam, len(self.sizes) - 1)[0]
        return self.nodes[row, 0][paths]


def extend_beam(path_logprobs: torch.Tensor, logits: torch.Tensor, width: int) -> Layer:
    """Return the next layer of every request's beam, best first, ties by (parent, rank of the child).

    Only the best children are normalised, so the vocabulary is read by one search and one sum.

    Args:
        path_logprobs: [num_requests, beam] f32, of the current layer, best first.
        logits: [num_requests, beam, vocab] of the same nodes.
        width: nodes to keep per request.

    Returns:
        tokens, parents (index into the current layer) and path_logprobs, each [num_requests, new_beam] with
        new_beam = min(width, beam * vocab).
    """
    children = logits.topk(min(width, logits.shape[-1]), dim=-1)
    logprobs = children.values.float() - logits.float().logsumexp(-1, keepdim=True)
    # Rounding may put a certain token's probability above 1; a NaN would sort before every real path.
    logprobs = logprobs.clamp(max=0.0).nan_to_num(nan=-inf, neginf=-inf)
    num_children = logprobs.shape[-1]
    paths = (path_logprobs[..., None] + logprobs).flatten(1)  # [num_requests, beam * num_children]
    paths, order = paths.sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return children.indices.flatten(1).gather(1, order), order // num_children, paths[:, :width]


def _logprobs(bits: torch.Tensor) -> torch.Tensor:
    """Return the numbers that these bits [...] int64 stand for.  -> [...] f32"""
    return bits.int().view(torch.float32)


def _paths(nodes: torch.Tensor, num_last: int, depth: int) -> torch.Tensor:
    """Return the nodes from below the root to each of the last ones.  -> [num_rows, num_last, depth] int64"""
    num_rows, _, num_nodes = nodes.shape
    node = torch.arange(num_nodes - num_last, num_nodes, device=nodes.device).expand(num_rows, -1)
    path = [node]
    for _ in range(depth - 1):
        path.append(nodes[:, 1].gather(1, path[-1]))
    return torch.stack(path[::-1], dim=-1) if depth else node[..., None][..., :0]


def _is_futile(nodes: torch.Tensor, path_logprobs: torch.Tensor, depth: int, limits: Limits) -> torch.Tensor:
    """Return whether no node deeper than these can be worth its level.  -> [1] bool

    ``path_logprobs`` [num_rows, beam] f32 are those of the last layer, at this depth.
    """
    gain = (path_logprobs.exp() - limits.min_path_prob).clamp(min=0.0).sum(dtype=torch.float64)
    is_futile = gain < limits.min_gain
    if limits.log_min_confidence is not None:
        paths = _paths(nodes, path_logprobs.shape[1], depth).flatten(1)
        above = nodes[:, 1].gather(1, paths)
        logprobs = _logprobs(nodes[:, 2])
        # Probability of each token on the path to a node, given its parent.
        own = (logprobs.gather(1, paths) - logprobs.gather(1, above)).view(*path_logprobs.shape, depth)
        is_futile = is_futile | ~(own.amin(-1) > limits.log_min_confidence).any()
    return is_futile.view(1)
