"""Hook that computes the mixers (convolutions, recurrences) of a packed batch, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_slospec.families.recurrences import (
    Inputs,
    Snapshots,
    Updates,
    Whole,
    convolution,
    linear_recurrence,
    parents,
    selective_chain,
    selective_tree,
    windows,
)
from hf_slospec.families.states import (
    CONVOLUTION,
    DELTA_RULES,
    SELECTIVE_SCAN,
    STATE_SPACE,
    Key,
    Mixer,
    RecurrentStates,
    StateHook,
)
from hf_slospec.forks import cached_property
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.batch import Span
from hf_slospec.model.transfer import to_device

# Tokens. Longer chains (prefill chunks) are computed by transformers' mixers, whose work grows
# linearly with the length; the work of the recurrences over trees is quadratic.
MAX_AT_ONCE = 32


@dataclass(eq=False)
class Group:
    """Sequences that a mixer handles in one call: trees of the same size, or one long chain."""

    states: list[RecurrentStates]
    # [batch, N, S] bool, True = an ancestor of the token, or itself; see recurrences.py
    mask: torch.Tensor
    rows: torch.Tensor  # [batch * N] int64, indices of the tokens in the packed batch
    is_long_chain: bool
    _windows: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def parents(self) -> list[list[int]]:
        """Parent of each new node, per sequence; see :func:`parents`."""
        return [parents(mask) for mask in self.mask]

    def windows(self, kernel_size: int) -> torch.Tensor:
        """Return which inputs a convolution reads at each node; see :func:`windows`."""
        if kernel_size not in self._windows:
            self._windows[kernel_size] = windows(self.mask, kernel_size)
        return self._windows[kernel_size]

    def select(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the group's tokens, [batch, N, ...], of a packed tensor [1, num_tokens, ...]."""
        part = packed[0].index_select(0, self.rows)
        return part.view(*self.mask.shape[:2], *part.shape[1:])

    def write(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Write the group's tokens, [batch, N, ...], into a packed tensor [1, num_tokens, ...]."""
        out[0].index_copy_(0, self.rows, part.flatten(0, 1).to(out.dtype))

    def state(self, key: Key, zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the state ``key`` of each sequence, ``zeros()`` for a new one.  -> [batch, ...]"""
        for sequence in self.states:
            if key not in sequence.states:
                sequence.states[key] = zeros()
        return torch.stack([sequence.states[key] for sequence in self.states])

    def stage(self, key: Key, staged: Updates | Inputs | Snapshots) -> None:
        """Keep what all staged tokens add to the state ``key``; tensors are [batch, ...]."""
        for sequence, *tensors in zip(self.states, *staged, strict=True):
            sequence.staged[key] = type(staged)(*tensors)

    def stage_whole(self, key: Key, state: torch.Tensor) -> None:
        """Keep the state ``key`` [1, ...] after the group's long chain."""
        (sequence,) = self.states
        sequence.staged[key] = Whole(state[0], self.mask.shape[1])

    def earlier(self, key: Key) -> tuple[torch.Tensor, ...] | None:
        """Return what earlier forwards of this step staged, [batch, ...] each; None if nothing."""
        if self.mask.shape[1] == self.mask.shape[2]:
            return None
        return tuple(
            map(torch.stack, zip(*(states.staged[key] for states in self.states), strict=True))
        )


def grouped(spans: Sequence[Span], device: torch.device) -> list[Group]:
    """Return the groups of a packed batch, whose sequences must have states."""
    by_size = dict[tuple[int | None, int, int], list[Span]]()
    for index, span in enumerate(spans):
        is_long_chain = span.is_chain and span.num_tokens > MAX_AT_ONCE
        by_size.setdefault(
            (index if is_long_chain else None, span.num_tokens, span.num_staged), []
        ).append(span)
    return [_group(members, index is not None, device) for (index, *_), members in by_size.items()]


def _group(spans: Sequence[Span], is_long_chain: bool, device: torch.device) -> Group:
    states: list[Any] = [span.sequence.states for span in spans]
    mask, rows = to_device(
        (
            torch.stack([span.staged_mask for span in spans]),
            torch.cat([torch.arange(span.begin, span.end, device="cpu") for span in spans]),
        ),
        device,
    )
    return Group(states, mask, rows, is_long_chain)


# Placeholder for a mixer's final state, which layers only pass to update_recurrent_state().
UNREAD = torch.empty(0, device="cpu")


class RecurrentForward(StateHook, PackedForward):
    """Hook of a packed forward in which each token continues the states after its parent in the
    tree, or after its sequence's last committed token.
    """

    def __init__(self, *arguments: Any):
        """Begin a forward; first advance the sequences' states over newly committed tokens.

        ``arguments`` are those of :meth:`ModelFamily.new_hook`."""
        *hook_arguments, spans = arguments
        super().__init__(*hook_arguments)
        self._spans: Sequence[Span] = spans
        self._groups: dict[torch.device, list[Group]] = {}
        for span in self._spans:
            states = span.sequence.states = span.sequence.states or RecurrentStates()
            states.take_in(span.sequence.length, span.num_staged - span.num_tokens)

    def _groups_on(self, device: torch.device) -> list[Group]:
        if device not in self._groups:
            self._groups[device] = grouped(self._spans, device)
        return self._groups[device]

    @cached_property
    def _is_prompt(self) -> torch.Tensor:
        """True for the tokens that stock ``generate`` prefills.  [num_tokens] bool"""
        return torch.cat(
            [
                span.staged_positions[-span.num_tokens :] < span.sequence.prompt_len
                for span in self._spans
            ]
        )

    def mix_with(self, key: Key, plain: Mixer, *args: Any, **kwargs: Any) -> Any:
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
        """Compute the convolution of ``hidden_states`` [1, channels, num_tokens], with ``weight``
        [channels, kernel_size].  -> [1, channels, num_tokens]"""
        inputs = hidden_states.transpose(1, 2)
        out = torch.empty_like(inputs)
        num_earlier = weight.shape[-1] - 1
        for group in self._groups_on(hidden_states.device):
            new = group.select(inputs)
            earlier = group.earlier(key)
            state = group.state(key, lambda: new.new_zeros(num_earlier, new.shape[-1]))  # noqa: B023 - called at once
            staged = new if earlier is None else torch.cat((*earlier, new), 1)
            rows = torch.cat((state, staged), 1)
            if group.is_long_chain:
                mixed = plain(rows.transpose(1, 2), weight, bias, activation=activation)[
                    ..., num_earlier:
                ].transpose(1, 2)
            else:
                mixed = convolution(rows, group.windows(num_earlier + 1), weight, bias)
                mixed = mixed if activation is None else ACT2FN[activation](mixed)
            group.stage(key, Inputs(staged))
            group.write(out, mixed)
        return out.transpose(1, 2)

    def _delta_rule(
        self,
        state_key: Key,
        plain: Mixer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gated delta rule, with ``plain`` for long chains only.

        Returns [1, num_tokens, heads, value_dim] and a placeholder for the final state.

        Args:
            query, key: [1, num_tokens, key_heads, key_dim].
            value: [1, num_tokens, heads, value_dim].
            g: log decays, [1, num_tokens, heads], or [1, num_tokens, heads, key_dim] (Kimi).
            beta: [1, num_tokens, heads].
        """
        out = torch.empty_like(value)
        shape = value.shape[2], key.shape[3], value.shape[3]
        for group in self._groups_on(value.device):
            inputs = [group.select(tensor) for tensor in (query, key, value, g, beta)]
            state = group.state(state_key, lambda: value.new_zeros(shape, dtype=torch.float32))
            if group.is_long_chain:
                q, k, v, decay, rate = inputs
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
                group.stage_whole(state_key, after)
                group.write(out, mixed)
                continue
            q, k, v, decay, rate = (tensor.float().movedim(1, 2) for tensor in inputs)
            if use_qk_l2norm_in_kernel:
                q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            q, k = (x.repeat_interleave(shape[0] // x.shape[1], dim=1) for x in (q, k))
            decay = decay if decay.ndim == 4 else decay[..., None]
            scaled = q * q.shape[-1] ** -0.5
            self._recur(group, state_key, out, state, (scaled, k, v, decay), rate[..., None])
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
        """Compute Mamba 2's scan (Dao and Gu, arXiv 2405.21060).

        Returns [1, num_tokens, heads, head_dim] and a placeholder for the final state.

        Args:
            hidden_states: [1, num_tokens, heads, head_dim].
            dt: [1, num_tokens, heads].
            A, D, dt_bias: [heads].
            B, C: [1, num_tokens, groups, state_size].
        """
        assert z is None, "layers gate the output themselves"
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        if tuple(dt_limit) != (0.0, torch.inf):  # transformers clamps dt in prefill only
            dt = torch.where(self._is_prompt.to(dt.device)[:, None], dt.clamp(*dt_limit), dt)
        out = torch.empty_like(hidden_states)
        num_heads = hidden_states.shape[2]
        for group in self._groups_on(hidden_states.device):
            x, step, keys, queries = (group.select(tensor) for tensor in (hidden_states, dt, B, C))
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
                group.stage_whole(key, after.transpose(-1, -2))
                group.write(out, mixed)
                continue
            step = step.float()
            k, q = (
                x.float().repeat_interleave(num_heads // x.shape[2], dim=2) for x in (keys, queries)
            )
            tensors = q, k, x.float() * step[..., None], (A.float() * step)[..., None]
            skipped = None if D is None else x.float() * D[:, None]
            self._recur(
                group,
                key,
                out,
                state,
                [tensor.movedim(1, 2) for tensor in tensors],
                skipped=skipped,
            )
        return out, UNREAD

    @staticmethod
    def _recur(
        group: Group,
        key: Key,
        out: torch.Tensor,
        state: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        beta: torch.Tensor | None = None,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Run :func:`linear_recurrence` on ``inputs`` (query, key, value, decay), write its outputs
        plus ``skipped`` [batch, N, heads, value_dim] into ``out``, and stage its updates."""
        earlier = group.earlier(key)
        earlier_updates = None if earlier is None else Updates(*earlier)
        q, k, v, decay = inputs
        mixed, updates = linear_recurrence(q, k, v, decay, beta, state, group.mask, earlier_updates)
        group.stage(key, updates)
        mixed = mixed.movedim(1, 2)
        group.write(out, mixed if skipped is None else mixed + skipped)

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
        """Compute Mamba's selective scan (Gu and Dao, arXiv 2312.00752) node by node.

        Returns [1, channels, num_tokens] and a placeholder for the final state.

        Args:
            hidden_states, dt, z: [1, channels, num_tokens].
            A: [channels, state_size].
            B, C: [1, state_size, num_tokens].
            D, delta_bias: [channels].
        """
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = nn.functional.softplus(step) if delta_softplus else step
        by_token = [x.transpose(1, 2) for x in (step, (step * hidden_states.float()), B.float(), C)]
        out = torch.empty_like(by_token[1])
        for group in self._groups_on(hidden_states.device):
            steps, inputs, keys, read = map(group.select, by_token)
            decays = torch.exp(A * steps[..., None])
            added = inputs[..., None] * keys[..., None, :]
            state = group.state(key, lambda: A.new_zeros(A.shape, dtype=torch.float32))
            if group.is_long_chain:
                mixed, after = selective_chain(state[0], decays[0], added[0], read[0])
                group.stage_whole(key, after[None])
                group.write(out, mixed[None])
                continue
            earlier = group.earlier(key)
            earlier_states = (
                state.new_empty(len(state), 0, *A.shape) if earlier is None else earlier[0]
            )
            parts = zip(state, earlier_states, decays, added, read, group.parents, strict=True)
            mixed, after = map(
                torch.stack, zip(*(selective_tree(*part) for part in parts), strict=True)
            )
            group.stage(key, Snapshots(after))
            group.write(out, mixed)
        out = out.transpose(1, 2)
        if D is not None:
            out = out + hidden_states * D[:, None]
        if z is not None:
            out = out * nn.functional.silu(z)
        return out, UNREAD
