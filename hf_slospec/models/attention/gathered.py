"""Packed forwards of models whose layers compute attention in their own code, where it cannot be replaced.

The layers get the K and V of all visible slots of all sequences, and a mask of the whole batch. A layer therefore
computes num_tokens * num_keys scores, of which those for keys of other sequences are masked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_slospec.models.attention.positions import Positions
from hf_slospec.models.batch.packed_batch import PackedBatch, Plan, Plans, plan_own
from hf_slospec.models.inspection.replaced_attributes import Attribute, ReplacedAttributes
from hf_slospec.models.kv_cache.pool import KVPool

MASKING = ("eager", "sdpa")  # attention implementations that read a mask

MaskFunction = Callable[..., torch.Tensor]  # (batch, head, query and key indices) -> True = may attend


class MaskSource:
    """Base of a model's cache during a packed forward in which layers compute attention in their own code."""

    positions: Positions

    # transformers reads these to build masks, and so do models.
    is_compileable = False
    is_initialized = True

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return the forward's mask for layers with this mask function, which also applies their window.

        Returns:
            [num_tokens, num_keys] bool, True = may attend.
        """
        raise NotImplementedError

    @property
    def _num_keys(self) -> int:
        assert self.positions.of_keys is not None
        return len(self.positions.of_keys)

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Return the number of keys before the batch's, of all sequences; to a layer, :attr:`Positions.offsets`."""
        return self.num_earlier if layer_idx is None else self.positions.offsets

    @property
    def num_earlier(self) -> int:
        """Number of keys before the batch's."""
        return self._num_keys - self.positions.of_tokens.shape[1]

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Return the number of keys before the batch's."""
        return self.num_earlier

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys, and the index of the first one."""
        return self._num_keys, 0


@dataclass(frozen=True, eq=False)
class GatheredPlan(Plan):
    """Keys of a packed batch: those of earlier tokens, sequence after sequence, then those of the batch in its order.

    A single sequence has them in the same order, so a causal mask by index that a layer adds hides no visible key.
    """

    slots: torch.Tensor  # [num_keys] int64
    earlier_positions: torch.Tensor  # [num_earlier] int64
    seen: torch.Tensor  # [num_tokens, num_keys] bool: keys that each token sees without a window


def plan_gathered(batch: PackedBatch) -> GatheredPlan:
    """Return the keys of a batch, made where its masks are."""
    device = batch.spans[0].staged_mask.device
    slots, positions = list[torch.Tensor](), list[torch.Tensor]()
    num_tokens, num_earlier = batch.spans[-1].end, sum(span.num_visible - span.num_tokens for span in batch.spans)
    seen = torch.zeros(num_tokens, num_earlier + num_tokens, dtype=torch.bool, device=device)
    begin = 0  # first column with earlier keys of the sequence
    for span, visible in zip(batch.spans, batch.visible, strict=True):
        num_staged = span.num_staged - span.num_tokens  # by earlier forwards
        committed_end = begin + span.sequence.length
        end, rows = committed_end + num_staged, seen[span.begin : span.end]
        rows[:, begin:committed_end] = True
        rows[:, committed_end:end] = span.staged_mask[:, :num_staged]
        rows[:, num_earlier + span.begin : num_earlier + span.end] = span.staged_mask[:, num_staged:]
        slots.append(torch.arange(visible.start, visible.stop - span.num_tokens, device="cpu"))
        positions += torch.arange(span.sequence.length, device=device), span.staged_positions[:num_staged]
        begin = end
    is_seen = seen[:, :num_earlier].any(0)  # NaN in other slots would not be kept out by the mask
    kept = F.pad(is_seen, (0, num_tokens), value=True)
    slots.append(plan_own(batch).slots)
    return GatheredPlan(torch.cat(slots)[kept.cpu()], torch.cat(positions)[is_seen], seen[:, kept])


class GatheredForward(MaskSource):
    """One forward of a packed batch: the cache of a model whose layers compute attention in their own code."""

    def __init__(self, pool: KVPool, batch: Plans, position_ids: torch.Tensor):
        """Begin a forward.

        Args:
            pool: storage of the batch's sequences.
            batch: its plans.
            position_ids: [1, num_tokens] int64.
        """
        self.pool, self.batch = pool, batch
        plan: GatheredPlan = batch.plan(plan_gathered, position_ids.device)
        self._seen = plan.seen
        self.positions = Positions(position_ids, torch.cat((plan.earlier_positions, position_ids[0])))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's K and V of the batch, and return those of all keys, each [1, num_kv_heads, num_keys, dim]."""
        keys, values = self.pool.keys[layer_idx], self.pool.values[layer_idx]
        return self._staged(keys, key[0].transpose(0, 1)), self._staged(values, value[0].transpose(0, 1))

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stage keys [1, num_tokens, dim] of a layer's indexer, and return those of all keys.  -> [1, num_keys, dim]"""
        stored = self.pool.index_keys[layer_idx]
        assert stored is not None, "the probe saw no indexer in this layer"
        return self._staged(stored, index_keys[0].unsqueeze(1))[:, 0]

    def _staged(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` [num_tokens, num_heads, dim] and return all visible slots.  -> [1, num_heads, num_keys, dim]"""
        stored.index_copy_(0, self.batch.plan(plan_own, stored.device).slots, new)
        return stored[self.batch.plan(plan_gathered, stored.device).slots].transpose(0, 1)[None]

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return the keys that each token sees and the mask function allows at their positions."""
        assert self.positions.of_keys is not None
        zero = self.positions.of_keys.new_zeros(())
        rule = mask_function(zero, zero, self.positions.of_tokens[0][:, None], self.positions.of_keys[None])
        return self._seen & rule


_source: ContextVar[MaskSource | None] = ContextVar("hf_slospec_mask_source", default=None)


@contextlib.contextmanager
def own_attention(source: MaskSource) -> Iterator[None]:
    """Make transformers' mask builders return masks of ``source`` inside this context, in this thread only."""
    _replaced.replace([MASK_BUILDERS], _packed_builders)
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)
        _replaced.restore([MASK_BUILDERS])


MASK_BUILDERS: Attribute = (ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping")  # goes before what is registered
_replaced = ReplacedAttributes()


def _packed_builders(builders: dict[str, Any], attribute: Attribute) -> dict[str, Any]:
    """Return mask builders of the active source, under the same names, as layers compare these with names they know."""
    plain = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping | builders
    return builders | {name: _packed_or(plain[name], name == "sdpa") for name in MASKING}


@functools.cache
def _packed_or(plain: Callable[..., Any], is_bool: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def mask(*arguments: Any, **options: Any) -> Any:
        if (source := _source.get()) is None:
            return plain(*arguments, **options)
        allowed = source.allowed(options["mask_function"], options.get("local_size"))[None, None]
        if is_bool:
            return allowed
        dtype = options["dtype"]
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    return mask
