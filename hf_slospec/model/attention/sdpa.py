"""Attention of packed batches by torch's ``scaled_dot_product_attention``, one call per sequence,
and two slower references: one masked call for the whole batch, and one call per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_slospec.forks import Lock
from hf_slospec.model.batch import (
    AttentionPlan,
    AttentionRules,
    PackedBatch,
    Plans,
    plan_visible,
)
from hf_slospec.model.transfer import aligned


def dense_attention(
    query: torch.Tensor,  # [num_heads, num_queries, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,  # [num_kv_heads, num_keys, value_dim]
    mask: torch.Tensor | None,  # [num_queries, num_keys], added to scores
    rules: AttentionRules,  # window and chunk are ignored, as the mask contains them
) -> torch.Tensor:
    """Compute attention by matrix products, with softmax in fp32.  -> [num_heads, num_queries,
    value_dim]
    """
    groups = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(groups, 0)
    value = value.repeat_interleave(groups, 0)
    scores = rules.capped(query @ key.transpose(1, 2) * rules.scaling)
    if mask is not None:
        scores = scores + mask
    if (sinks := rules.sinks) is not None:
        scores = torch.cat(
            (scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1
        )
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[1]] @ value


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
    plain: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute attention of the whole batch under one 4D mask (``attention="4d_mask"``).

    Args:
        query, keys, values, batch, rules: see ``Backend``.
        plain: the model's own attention (``PlainAttention``), which is given the mask; None: dense
            attention, the reference that all other backends are tested against.

    Returns:
        [num_tokens, num_heads, value_dim].
    """
    plan: MaskPlan = batch.plan(plan_mask, query.device, rules.window, rules.chunk, query.dtype)
    key = keys[plan.slots].transpose(0, 1)
    value = values[plan.slots].transpose(0, 1)
    if plain is None:
        return dense_attention(query, key, value, plan.mask[0, 0], rules).transpose(0, 1)
    with _without_cudnn() if query.is_cuda else contextlib.nullcontext():
        return plain(query[None], key[None], value[None], plan.mask)[0]


def isolated_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Compute attention for one token at a time, over exactly the keys that it may attend to.

    This keeps NaN of other tokens out. A mask does not: it is added to scores, and 0 times NaN is
    NaN.
    """
    out = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
    plan: SequencePlan = batch.plan(
        plan_sequences, query.device, rules.window, rules.chunk, 1, query.dtype
    )
    for sequence in plan.sequences:
        key = keys[sequence.slots].transpose(0, 1)
        value = values[sequence.slots].transpose(0, 1)
        bias = None if rules.bias is None else sequence.biased(rules.bias)
        for row, seen in enumerate(sequence.seen(rules.window, rules.chunk)):
            token = slice(sequence.tokens.start + row, sequence.tokens.start + row + 1)
            row_bias = None if bias is None else bias[:, row : row + 1, seen]
            attended = dense_attention(
                query[:, token], key[:, seen], value[:, seen], row_bias, rules
            )
            out[token] = attended.transpose(0, 1)
    return out


# torch's choice of SDPA kernels is global, so only one thread at a time may change it.
_KERNELS_LOCK = Lock()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Exclude cuDNN's kernels in this context: cuDNN makes a plan for every new shape (0.4 s)."""
    with _KERNELS_LOCK, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def sdpa_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Compute attention of each sequence over its slots, which are a slice of the pool: nothing is
    padded or gathered.
    """
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    is_plain = rules.softcap is None and rules.sinks is None and rules.bias is None
    # Grouped-query attention: the query heads that share a KV head are concatenated along the query
    # dimension, which is faster on CPUs than enable_gqa.
    groups = num_heads // num_kv_heads if is_plain else 1
    plan: SequencePlan = batch.plan(
        plan_sequences, query.device, rules.window, rules.chunk, groups, query.dtype
    )
    keys = aligned(keys)
    values = aligned(values)
    out = query.new_empty(num_tokens, num_heads, values.shape[-1])
    with _without_cudnn() if query.is_cuda else contextlib.nullcontext():
        for sequence in plan.sequences:
            own_query = query[:, sequence.tokens]
            key, value = (
                keys[sequence.slots].transpose(0, 1),
                values[sequence.slots].transpose(0, 1),
            )
            if is_plain:
                grouped = own_query.reshape(1, num_kv_heads, -1, head_dim)
                attended = F.scaled_dot_product_attention(
                    grouped, key[None], value[None], attn_mask=sequence.mask, scale=rules.scaling
                )
                # reshape, not view: on CUDA the head dimension may not be the outermost in memory.
                attended = attended.reshape(num_heads, -1, values.shape[-1])
            else:
                mask = sequence.mask if rules.bias is None else sequence.biased(rules.bias)
                attended = dense_attention(own_query, key, value, mask, rules)
            out[sequence.tokens] = attended.transpose(0, 1)
    return out


@dataclass(frozen=True, eq=False)
class SequenceKeys:
    """Tokens of one sequence in a packed batch, and the slots that they may attend to: first
    committed tokens, then staged tokens.
    """

    tokens: slice  # indices of the tokens in the batch
    slots: slice  # indices of the slots in the layer's K and V
    staged_mask: torch.Tensor  # [num_tokens, num_staged] bool, see Span
    staged_positions: torch.Tensor  # [num_staged] int64, see Span
    # [repeats * num_tokens, num_slots], added to scores. None: all tokens attend to all slots, or
    # the plan is not completed yet.
    mask: torch.Tensor | None = None

    def seen(self, window: int | None, chunk: int | None) -> torch.Tensor:
        """Return which slots each token may attend to.  -> [num_tokens, num_slots] bool

        Windows and chunks count positions, not slots: a node's position is its root's plus its
        depth.
        """
        (num_tokens, num_staged) = self.staged_mask.shape
        device = self.staged_mask.device
        length = self.slots.stop - self.slots.start - num_staged
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, self.staged_mask), dim=1)
        if window is not None or chunk is not None:
            queries, keys = self._positions
            if window is not None:
                allowed = allowed & (queries - keys < window)
            if chunk is not None:
                allowed = allowed & (queries // chunk == keys // chunk)
        return allowed

    @property
    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions of the tokens, [num_tokens, 1] int64, and of the slots, [num_slots]
        int64.
        """
        length = self.slots.stop - self.slots.start - len(self.staged_positions)
        committed = torch.arange(length, device=self.staged_positions.device)
        return self.staged_positions[-len(self.staged_mask) :, None], torch.cat(
            (committed, self.staged_positions)
        )

    def biased(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the mask plus the relative position bias.

        Args:
            bias: see :class:`AttentionRules`.

        Returns:
            [num_heads, num_tokens, num_slots].
        """
        queries, keys = self._positions
        by_head = bias[:, (queries - keys).clamp(0, bias.shape[1] - 1)]
        return by_head if self.mask is None else by_head + self.mask


@dataclass(frozen=True, eq=False)
class SequencePlan(AttentionPlan):
    """Tokens, slots and masks of each sequence of a packed batch, for layers with one window and
    chunk size.
    """

    sequences: list[SequenceKeys]
    window: int | None
    chunk: int | None
    repeats: int  # number of times that masks repeat each token, see plan_sequences
    dtype: torch.dtype  # dtype of the masks

    def completed(self, seen: torch.Tensor | None = None) -> SequencePlan:
        """Return a copy with masks. These are made on the layers' device, as their size grows with
        sequence lengths.
        """
        assert seen is None, "a plan that depends on sequence lengths is not captured"
        return replace(
            self, sequences=[replace(keys, mask=self._mask(keys)) for keys in self.sequences]
        )

    def _mask(self, sequence: SequenceKeys) -> torch.Tensor | None:
        num_tokens, num_staged = sequence.staged_mask.shape
        if not num_staged:  # all keys are committed tokens; the caller has cut them to the window
            return None
        allowed = sequence.seen(self.window, self.chunk)
        # On other devices than CPUs, reading the mask would make the host wait.
        if num_tokens == 1 and allowed.is_cpu and bool(allowed.all()):
            return None
        mask = torch.zeros_like(allowed, dtype=self.dtype).masked_fill_(~allowed, float("-inf"))
        return mask.repeat(self.repeats, 1)


def plan_sequences(
    batch: PackedBatch, window: int | None, chunk: int | None, repeats: int, dtype: torch.dtype
) -> SequencePlan:
    """Return the plan of a packed batch.

    Args:
        batch: the packed batch.
        window: sliding window of the layers, in positions.
        chunk: chunk size of chunked attention, in positions.
        repeats: number of times that masks repeat each token: the number of query heads that share
            a KV head and are concatenated along the query dimension.
        dtype: dtype of the masks.
    """
    sequences = [
        SequenceKeys(
            slice(span.begin, span.end), slots, span.staged_mask_for(window), span.staged_positions
        )
        for span, slots in zip(batch.spans, batch.visible, strict=True)
    ]
    return SequencePlan(sequences, window, chunk, repeats, dtype)


@dataclass(frozen=True, eq=False)
class MaskPlan(AttentionPlan):
    """One 4D mask for all tokens of a packed batch, and the slots that its columns stand for."""

    slots: torch.Tensor  # [num_keys] int64
    sequences: SequencePlan
    # [1, 1, num_tokens, num_keys], added to scores; empty until the plan is completed
    mask: torch.Tensor

    def completed(self, seen: torch.Tensor | None = None) -> MaskPlan:
        """Return a copy with the mask, made on the layers' device, and with the slots it shows."""
        assert seen is None, "a plan that depends on sequence lengths is not captured"
        plan = self.sequences
        allowed = torch.block_diag(*(keys.seen(plan.window, plan.chunk) for keys in plan.sequences))
        # Slots that no token attends to may hold NaN, which a mask does not keep out.
        is_seen = allowed.any(0)
        hidden = ~allowed[:, is_seen]
        mask = self.mask.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return replace(self, slots=self.slots[is_seen], mask=mask[None, None])


def plan_mask(
    batch: PackedBatch, window: int | None, chunk: int | None, dtype: torch.dtype
) -> MaskPlan:
    """Return the 4D mask of a packed batch; see :func:`plan_sequences` for the arguments."""
    sequences = plan_sequences(batch, window, chunk, 1, dtype)
    return MaskPlan(plan_visible(batch).slots, sequences, torch.empty(0, dtype=dtype, device="cpu"))
