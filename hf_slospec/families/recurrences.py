"""Convolutions and recurrences over the nodes of draft trees.

A layer with a state S [key_dim, value_dim] per head computes, token after token,

    S_i = exp(decay_i) * S_parent + key_i value_i^T        output_i = query_i S_i

where a delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464) replaces value_i by the
correction beta_i * (value_i - key_i exp(decay_i) S_parent). Unrolled from a node to the state
before the tree, both are attention over the node's ancestors with decays between them, as chunked
prefill computes it, with the tree mask in place of the causal mask; the delta rule also solves a
triangular system. So no node needs a state, and a tree costs about as much as a chain.

Shapes: ``batch`` trees of the same size; N nodes in this forward; S staged nodes, which are the
nodes that earlier forwards of this step staged, followed by the N nodes of this forward. Parents
come before children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Updates(NamedTuple):
    """Keys and values that staged nodes add to the state of a linear recurrence.

    Shapes are those of one tree; tensors of a batch have a batch dimension in front.
    """

    keys: torch.Tensor  # [heads, S, key_dim]
    values: torch.Tensor  # [heads, S, value_dim]
    decays: torch.Tensor  # [heads, S, 1 or key_dim], log decay of each node
    totals: torch.Tensor  # shape of decays; sum of log decays over the path up to each node

    def after(self, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return the state after the nodes of a path, each of which is the parent of the next.

        Args:
            state: [heads, key_dim, value_dim], before the first staged node.
            path: [num_nodes] int64, indices of staged nodes; at least one.
        """
        keys, values, _, totals = (tensor.index_select(-2, path) for tensor in self)
        total = totals[..., -1:, :]
        decayed = state * total.transpose(-1, -2).exp()
        return torch.baddbmm(decayed, (keys * (total - totals).exp()).transpose(-1, -2), values)


def linear_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    mask: torch.Tensor,
    earlier: Updates | None = None,
) -> tuple[torch.Tensor, Updates]:
    """Compute a linear recurrence or a gated delta rule at the new nodes of a batch of trees.

    Args:
        query, key: [batch, heads, N, key_dim] f32.
        value: [batch, heads, N, value_dim] f32.
        decay: [batch, heads, N, 1 or key_dim] f32, log decays.
        beta: [batch, heads, N, 1] f32, factors of the delta rule; None: a linear recurrence.
        state: [batch, heads, key_dim, value_dim] f32, before the first staged node.
        mask: [batch, N, S] bool, True = an ancestor of the node, or itself.
        earlier: updates of the S - N nodes that earlier forwards of this step staged.

    Returns:
        The outputs of the new nodes, [batch, heads, N, value_dim], and the updates of all S staged
        nodes.
    """
    if earlier is None and value.is_cpu and bool((is_lost := value[:, 0, :, 0].isnan()).any()):
        # The mask multiplies by 0, and 0 times NaN is NaN: NaN in one branch would spread to other
        # branches of the tree. So nodes with NaN values are computed as zeros, and NaN is then set
        # at these nodes and their descendants.
        q, k, v, decay = (
            each.masked_fill(is_lost[:, None, :, None], 0.0) for each in (query, key, value, decay)
        )
        rate = None if beta is None else beta.masked_fill(is_lost[:, None, :, None], 0.0)
        out, updates = linear_recurrence(q, k, v, decay, rate, state, mask)
        lost = (mask & is_lost[:, None]).any(-1)[:, None, :, None]
        values = updates.values.masked_fill(lost, torch.nan)
        return out.masked_fill(lost, torch.nan), updates._replace(values=values)
    num_earlier = 0 if earlier is None else earlier.keys.shape[-2]
    decays = decay if earlier is None else torch.cat((earlier.decays, decay), -2)
    new_totals = mask[:, None].to(decay) @ decays
    totals = new_totals if earlier is None else torch.cat((earlier.totals, new_totals), -2)
    keys = key if earlier is None else torch.cat((earlier.keys, key), -2)
    between = (
        new_totals[..., :, None, :] - totals[..., None, :, :]
    )  # [batch, heads, N, S, 1 or key_dim]
    between = between.masked_fill(~mask[:, None, :, :, None], -torch.inf).exp()

    def scores(rows: torch.Tensor) -> torch.Tensor:
        """Return products of ``rows`` with the keys of ancestors, decayed from the ancestor to the
        node.  [batch, heads, N, key_dim] -> [batch, heads, N, S]
        """
        if between.shape[-1] == 1:
            return rows @ keys.transpose(-1, -2) * between[..., 0]
        return torch.einsum("...nd,...sd,...nsd->...ns", rows, keys, between)

    reach = new_totals.exp()
    if beta is None:
        out = (query * reach) @ state
    else:
        # One product for both keys and queries reads the state, which is large, only once.
        recalled, out = (torch.cat((key * reach, query * reach), -2) @ state).split(
            query.shape[-2], -2
        )
        overlaps = beta * scores(key)
        value = beta * (value - recalled)
        if earlier is not None:
            value = value - overlaps[..., :num_earlier] @ earlier.values
        system = overlaps[..., num_earlier:]  # unitriangular: the diagonal is not read
        value = torch.linalg.solve_triangular(system, value, upper=False, unitriangular=True)
    values = value if earlier is None else torch.cat((earlier.values, value), -2)
    return out + scores(query) @ values, Updates(keys, values, decays, totals)


class Inputs(NamedTuple):
    """Inputs of a causal convolution at staged nodes.

    The convolution's state is the last ``kernel_size - 1`` inputs before the first staged node.
    """

    rows: torch.Tensor  # [..., S, channels]

    def after(self, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return the state [kernel_size - 1, channels] after the nodes of a path; see
        :meth:`Updates.after`.
        """
        rows = torch.cat((state, self.rows.index_select(-2, path)), -2)
        return rows[..., rows.shape[-2] - state.shape[-2] :, :]


def windows(mask: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Return which inputs a causal convolution reads at each node: its last ancestors and itself.

    Args:
        mask: [batch, N, S] bool, True = an ancestor of the node, or itself.
        kernel_size: number of inputs that the convolution reads.

    Returns:
        [batch, N, kernel_size] int64, ascending indices into the kernel_size - 1 inputs of the
        state followed by the S staged inputs.
    """
    visible = torch.cat((mask.new_ones(*mask.shape[:-1], kernel_size - 1), mask), -1)
    indices = torch.arange(visible.shape[-1], device=mask.device)
    return torch.where(visible, indices, -1).topk(kernel_size, dim=-1).values.flip(-1)


def convolution(
    rows: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute a depthwise causal convolution at the new nodes.

    Args:
        rows: [batch, kernel_size - 1 + S, channels], the state followed by the staged inputs.
        window: [batch, N, kernel_size] int64, from :func:`windows`.
        weight: [channels, kernel_size].
        bias: [channels], or None.

    Returns:
        [batch, N, channels], in the weight's dtype.
    """
    batch, num_rows, channels = rows.shape
    begins = torch.arange(batch, device=rows.device)[:, None, None] * num_rows
    read = rows.to(weight.dtype).flatten(0, 1).index_select(0, (begins + window).flatten())
    out = (read.view(*window.shape, channels) * weight.T.contiguous()).sum(-2)
    return out if bias is None else out + bias


class Snapshots(NamedTuple):
    """State of a selective scan after each staged node."""

    states: torch.Tensor  # [S, channels, state_size]

    def after(self, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return the state after the last node of a path; see :meth:`Updates.after`."""
        del state
        return self.states[path[-1]]


class Whole(NamedTuple):
    """State after the last token of a long chain, which can only be committed as a whole."""

    state: torch.Tensor
    num_tokens: int

    def after(self, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return the state after the whole chain; ``path`` must be all its tokens."""
        del state
        assert len(path) == self.num_tokens, "a long chain is committed as a whole"
        return self.state


Staged = Updates | Inputs | Snapshots | Whole


def parents(mask: torch.Tensor) -> list[int]:
    """Return the index of each new node's parent among the staged nodes, -1 for a root.

    Args:
        mask: [N, S] bool, True = an ancestor of the node, or itself.
    """
    num_nodes, num_staged = mask.shape
    indices = torch.arange(num_staged, device=mask.device)
    nodes = indices[num_staged - num_nodes :, None]
    return torch.where(mask & (indices < nodes), indices, -1).amax(-1).tolist()


def selective_tree(
    state: torch.Tensor,
    earlier: torch.Tensor,
    decays: torch.Tensor,
    added: torch.Tensor,
    read: torch.Tensor,
    parents_: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a selective scan (Mamba) node by node: ``state = decay * parent's state + added``.

    The state is small and each of its elements decays at a different rate, so computing a state per
    node costs less than computing decays between all pairs of nodes.

    Args:
        state: [channels, state_size] f32, before the first staged node.
        earlier: [S - N, channels, state_size], states after the nodes that earlier forwards of
            this step staged.
        decays, added: [N, channels, state_size] f32, of each new node.
        read: [N, state_size]; a node's output is the product of its state with its row.
        parents_: [N], from :func:`parents`.

    Returns:
        The outputs of the new nodes, [N, channels], and the states after all staged nodes,
        [S, channels, state_size].
    """
    after = list(earlier)
    for parent, decay, more in zip(parents_, decays, added, strict=True):
        after.append(decay * (state if parent < 0 else after[parent]) + more)
    states = torch.stack(after)
    return torch.einsum("ncs,ns->nc", states[len(earlier) :], read.to(states)), states


def selective_chain(
    state: torch.Tensor, decays: torch.Tensor, added: torch.Tensor, read: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a selective scan along a chain; for the arguments see :func:`selective_tree`.

    Returns:
        The outputs of all tokens, [N, channels], and the state after the last one,
        [channels, state_size].
    """
    outputs = []
    for decay, more, row in zip(decays, added, read.to(state), strict=True):
        state = decay * state + more
        outputs.append(state @ row)
    return torch.stack(outputs), state
