"""Mixers of layers with a state, on the sequences of a packed batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_slospec.models.attention.packed_batch import Span
from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.recurrent.calls import (
    CONVOLUTION,
    DELTA_RULES,
    SELECTIVE_SCAN,
    STATE_SPACE,
    Key,
    Mixer,
    StateCache,
)
from hf_slospec.models.recurrent.operators import (
    Inputs,
    Snapshots,
    Staged,
    Updates,
    Whole,
    convolution,
    linear_recurrence,
    parents,
    selective_chain,
    selective_tree,
    windows,
)
from hf_slospec.models.recurrent.states import RecurrentStates

# Longer chains are computed by the layers' own functions, in chunks, so that the work grows linearly with their length.
MAX_AT_ONCE = 32
UNREAD = torch.empty(0)  # in place of the state after all tokens, which layers pass back to their cache


@dataclass(eq=False)
class Group:
    """Sequences whose tokens one call mixes: trees of one size, or a single long chain."""

    states: list[RecurrentStates]
    mask: torch.Tensor  # [batch, N, S] bool, True = an ancestor of the token, or itself
    rows: torch.Tensor  # [batch * N] int64, the tokens in the packed batch
    is_long_chain: bool
    _windows: dict[int, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def parents(self) -> list[list[int]]:
        """Parents of each sequence's nodes, see :func:`parents`."""
        return [parents(mask) for mask in self.mask]

    def windows(self, kernel_size: int) -> torch.Tensor:
        """Return the columns that a convolution reads, see :func:`windows`."""
        if kernel_size not in self._windows:
            self._windows[kernel_size] = windows(self.mask, kernel_size)
        return self._windows[kernel_size]

    def of(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the group's part of a tensor of the whole batch, whose ``dim`` are tokens.

        Args:
            packed: [1, ...], with num_tokens at ``dim``.

        Returns:
            [batch, ...], with N at ``dim``.
        """
        own = packed[0].index_select(dim - 1, self.rows)
        return own.unflatten(dim - 1, self.mask.shape[:2]).movedim(dim - 1, 0)

    def put(self, out: torch.Tensor, own: torch.Tensor, dim: int) -> None:
        """Write the group's part [batch, ...] of a tensor [1, ...] of the whole batch."""
        out[0].index_copy_(dim - 1, self.rows, own.movedim(0, dim - 1).flatten(dim - 1, dim).to(out.dtype))

    def state(self, key: Key, zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the states of all sequences in one layer.  -> [batch, ...]"""
        for own in self.states:
            if key not in own.states:
                own.states[key] = zeros()
        return torch.stack([own.states[key] for own in self.states])

    def stage(self, key: Key, staged: Staged) -> None:
        """Keep what the tokens add to the states of one layer; tensors [batch, ...]."""
        for index, own in enumerate(self.states):
            own.staged[key] = type(staged)(*(tensor[index] for tensor in staged))

    def earlier(self, key: Key) -> tuple[torch.Tensor, ...] | None:
        """Return what nodes staged by earlier forwards of the step add, [batch, ...] each; None without such nodes."""
        if self.mask.shape[1] == self.mask.shape[2]:
            return None
        return tuple(torch.stack(own) for own in zip(*(states.staged[key] for states in self.states), strict=True))


def grouped(spans: Sequence[Span], device: torch.device) -> list[Group]:
    """Return the sequences of a packed batch in groups, with their states as of now."""
    groups = dict[Hashable, list[Span]]()
    for place, span in enumerate(spans):
        if span.sequence.states is None:
            span.sequence.states = RecurrentStates()
        span.sequence.states.take_in(span.sequence.length, span.num_staged - span.num_tokens)
        is_long = span.is_chain and span.num_tokens > MAX_AT_ONCE
        groups.setdefault((is_long and place, span.num_tokens, span.num_staged), []).append(span)
    found = []
    for (is_long, *_), own in groups.items():
        rows = torch.cat([torch.arange(span.begin, span.end) for span in own])
        mask = torch.stack([span.staged_mask.to("cpu") for span in own])
        found.append(Group([_states(span) for span in own], *to_device((mask, rows), device), is_long is not False))
    return found


def _states(span: Span) -> RecurrentStates:
    assert span.sequence.states is not None
    return span.sequence.states


class RecurrentForward(StateCache):
    """Part of a packed forward that layers with a state use: every token continues its own sequence and branch."""

    def __init__(self, spans: Callable[[], Sequence[Span]]):
        super().__init__()
        self._spans = spans
        self._groups: dict[torch.device, list[Group]] = {}

    def _groups_on(self, device: torch.device) -> list[Group]:
        if device not in self._groups:
            if self._groups:
                known = next(iter(self._groups.values()))
                self._groups[device] = [
                    Group(group.states, group.mask.to(device), group.rows.to(device), group.is_long_chain)
                    for group in known
                ]
            else:
                self._groups[device] = grouped(self._spans(), device)
        return self._groups[device]

    @functools.cached_property
    def _is_prompt(self) -> torch.Tensor:
        """Return which tokens of the batch stock ``generate`` processes as a prompt.  -> [num_tokens] bool"""
        return torch.cat([span.staged_positions[-span.num_tokens :] < span.sequence.prompt_len for span in self._spans()])

    def _mix(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
        name = key[2]
        if name == CONVOLUTION:
            return self._convolution(key, plain, *args, **kwargs)
        if name in DELTA_RULES:
            return self._delta_rule(key, plain, *args, **kwargs)
        if name == STATE_SPACE:
            return self._state_space(key, plain, *args, **kwargs)
        assert name == SELECTIVE_SCAN
        return self._selective_scan(key, *args, **kwargs)

    def _convolution(
        self,
        key: Key,
        plain: Mixer,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the convolution [1, channels, num_tokens] of inputs of that shape, weight [channels, kernel_size]."""
        out = torch.empty_like(hidden_states)
        before = weight.shape[-1] - 1
        for group in self._groups_on(hidden_states.device):
            own = group.of(hidden_states, 2)
            state = group.state(key, lambda: own.new_zeros(own.shape[1], before))  # noqa: B023 - called at once
            if group.is_long_chain:
                columns = torch.cat((state, own), -1)
                mixed = plain(columns, weight, bias, activation=activation)[..., before:]
                group.stage(key, Inputs(own))
            else:
                earlier = group.earlier(key)
                staged = own if earlier is None else torch.cat((*earlier, own), -1)
                columns = torch.cat((state, staged), -1)
                mixed = convolution(columns, group.windows(weight.shape[-1]), weight, bias)
                mixed = mixed if activation is None else ACT2FN[activation](mixed)
                group.stage(key, Inputs(staged))
            group.put(out, mixed, 2)
        return out

    def _delta_rule(
        self,
        key_of_layer: Key,
        plain: Mixer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gated delta rule, as the layer's function for chunks does, [1, num_tokens, heads, value_dim].

        Args:
            query, key: [1, num_tokens, key_heads, key_dim].
            value: [1, num_tokens, heads, value_dim].
            g: decays, [1, num_tokens, heads], or [1, num_tokens, heads, key_dim] (Kimi).
            beta: [1, num_tokens, heads].
        """
        out = torch.empty_like(value)
        shape = value.shape[2], key.shape[3], value.shape[3]
        for group in self._groups_on(value.device):
            own = [group.of(tensor, 1) for tensor in (query, key, value, g, beta)]
            state = group.state(key_of_layer, lambda: value.new_zeros(shape, dtype=torch.float32))
            if group.is_long_chain:
                q, k, v, decay, rate = own
                mixed, after = plain(
                    q,
                    k,
                    v,
                    g=decay,
                    beta=rate,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                )
                _stage_whole(group, key_of_layer, after)
                group.put(out, mixed, 1)
                continue
            q, k, v, decay, rate = (tensor.float().movedim(1, 2) for tensor in own)
            if use_qk_l2norm_in_kernel:
                q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            q, k = (x.repeat_interleave(shape[0] // x.shape[1], dim=1) for x in (q, k))
            decay = decay if decay.ndim == 4 else decay[..., None]
            scaled = q * q.shape[-1] ** -0.5
            self._recur(group, key_of_layer, out, scaled, k, v, decay, rate[..., None], state)
        return out, UNREAD

    def _state_space(
        self,
        key: Key,
        plain: Mixer,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, torch.inf),
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Mamba 2's scan (Dao and Gu, arXiv 2405.21060), [1, num_tokens, heads, head_dim].

        Args:
            hidden_states: [1, num_tokens, heads, head_dim].
            dt: [1, num_tokens, heads].
            A, D, dt_bias: [heads].
            B, C: [1, num_tokens, groups, state_size].
        """
        assert z is None, "layers gate the output themselves"
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        if tuple(dt_limit) != (0.0, torch.inf):  # layers limit the steps of prompts, and not those of new tokens
            dt = torch.where(self._is_prompt.to(dt.device)[:, None], dt.clamp(*dt_limit), dt)
        out, num_heads = torch.empty_like(hidden_states), hidden_states.shape[2]
        for group in self._groups_on(hidden_states.device):
            x, step, keys, queries = (group.of(tensor, 1) for tensor in (hidden_states, dt, B, C))
            shape = num_heads, B.shape[3], hidden_states.shape[3]
            state = group.state(key, lambda: x.new_zeros(shape, dtype=torch.float32))  # noqa: B023 - called at once
            if group.is_long_chain:
                mixed, after = plain(
                    x,
                    step,
                    A,
                    keys,
                    queries,
                    chunk_size=chunk_size,
                    D=D,
                    initial_states=state.transpose(-1, -2),
                    return_final_states=True,
                )
                _stage_whole(group, key, after.transpose(-1, -2))
                group.put(out, mixed, 1)
                continue
            step = step.float()
            k, q = (x.float().repeat_interleave(num_heads // x.shape[2], dim=2) for x in (keys, queries))
            q, k, v, decay = (x.movedim(1, 2) for x in (q, k, x.float() * step[..., None], (A.float() * step)[..., None]))
            skipped = None if D is None else x.float() * D[:, None]
            self._recur(group, key, out, q, k, v, decay, None, state, skipped)
        return out, UNREAD

    @staticmethod
    def _recur(
        group: Group,
        key_of_layer: Key,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        state: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Write the outputs of a linear recurrence, plus ``skipped`` [batch, N, heads, value_dim], and stage it."""
        earlier = group.earlier(key_of_layer)
        known = None if earlier is None else Updates(*earlier)
        mixed, updates = linear_recurrence(query, key, value, decay, beta, state, group.mask, known)
        group.stage(key_of_layer, updates)
        mixed = mixed.movedim(1, 2)
        group.put(out, mixed if skipped is None else mixed + skipped, 1)

    def _selective_scan(
        self,
        key: Key,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Mamba's scan (Gu and Dao, arXiv 2312.00752), [1, channels, num_tokens], node after node.

        Args:
            hidden_states, dt, z: [1, channels, num_tokens].
            A: [channels, state_size].
            B, C: [1, state_size, num_tokens].
            D, delta_bias: [channels].
        """
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = nn.functional.softplus(step) if delta_softplus else step
        decays = torch.exp(A[None, None] * step.transpose(1, 2)[..., None])  # [1, num_tokens, channels, state_size]
        added = (step * hidden_states.float()).transpose(1, 2)[..., None] * B.float().transpose(1, 2)[:, :, None]
        out = torch.empty_like(hidden_states, dtype=torch.float32)
        for group in self._groups_on(hidden_states.device):
            own = [group.of(tensor, 1) for tensor in (decays, added, C.transpose(1, 2))]
            state = group.state(key, lambda: A.new_zeros(A.shape, dtype=torch.float32))
            if group.is_long_chain:
                mixed, after = selective_chain(state[0], *(tensor[0] for tensor in own))
                _stage_whole(group, key, after[None])
                group.put(out, mixed[None], 2)
                continue
            earlier = group.earlier(key)
            known = state.new_empty(len(state), 0, *A.shape) if earlier is None else earlier[0]
            scans = [selective_tree(*trees) for trees in zip(state, known, *own, group.parents, strict=True)]
            mixed, after = (torch.stack(tensors) for tensors in zip(*scans, strict=True))
            group.stage(key, Snapshots(after))
            group.put(out, mixed, 2)
        if D is not None:
            out = out + hidden_states * D[:, None]
        if z is not None:
            out = out * nn.functional.silu(z)
        return out, UNREAD


def _stage_whole(group: Group, key: Key, after: torch.Tensor) -> None:
    (states,) = group.states
    states.staged[key] = Whole(after[0], group.mask.shape[1])
