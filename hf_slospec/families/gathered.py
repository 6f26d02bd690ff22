"""Packed forwards of models whose layers compute attention in their own code, where it cannot be
replaced.

The layers get the K and V of all visible slots of all sequences, and a mask of the whole batch. A
layer therefore computes num_tokens * num_keys scores, of which those for keys of other sequences
are masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hf_slospec.families.recurrent import STATE_KINDS
from hf_slospec.model.attention.hook import AttentionHook, Positions, run_model
from hf_slospec.model.batch import (
    AttentionLayer,
    LayerShape,
    PackedBatch,
    Plan,
    Plans,
    Stored,
    plan_own,
)
from hf_slospec.model.family import DECODER, ModelFamily
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.ownership import check_mask_function
from hf_slospec.model.properties import (
    attends_to_encoder,
    cannot_be_packed,
    is_reached,
    layer_types,
    refused_if_it_fails,
)

MaskFunction = Callable[
    ..., torch.Tensor
]  # (batch, head, query and key indices) -> True = may attend


class GatheredHook(AttentionHook):
    """Hook of layers that attend by their own code, with transformers' masks."""

    only_masks = True
    positions: Positions

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> torch.Tensor:
        allowed = self.allowed(options["mask_function"], options.get("local_size"))[None, None]
        if name == "sdpa":
            return allowed
        dtype = options["dtype"]
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return the forward's mask for layers with this mask function, which also applies their
        window.

        Returns:
            [num_tokens, num_keys] bool, True = may attend.
        """
        raise NotImplementedError

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        if any(name.endswith("token_type_ids") for name, _ in model.named_buffers()):
            # The buffer may be shorter than a packed batch.
            options["token_type_ids"] = torch.zeros_like(self.positions.of_tokens)
        return options

    @property
    def _num_keys(self) -> int:
        assert self.positions.of_keys is not None
        return len(self.positions.of_keys)

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        return self.num_earlier if layer_idx is None else super().get_seq_length(layer_idx)

    @property
    def num_earlier(self) -> int:
        """Number of keys before the batch's."""
        return self._num_keys - self.positions.of_tokens.shape[1]

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return self.num_earlier

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys, and the index of the first one."""
        return self._num_keys, 0


@dataclass(frozen=True, eq=False)
class GatheredPlan(Plan):
    """Keys of a packed batch: those of earlier tokens, sequence after sequence, then those of the
    batch in its order.

    A single sequence has them in the same order, so a causal mask by index that a layer adds hides
    no visible key."""

    slots: torch.Tensor  # [num_keys] int64
    earlier_positions: torch.Tensor  # [num_earlier] int64
    seen: torch.Tensor  # [num_tokens, num_keys] bool: keys that each token sees without a window


def plan_gathered(batch: PackedBatch) -> GatheredPlan:
    """Return the keys of a batch, made where its masks are."""
    device = batch.spans[0].staged_mask.device
    slots = list[torch.Tensor]()
    positions = list[torch.Tensor]()
    num_tokens, num_earlier = (
        batch.spans[-1].end,
        sum(span.num_visible - span.num_tokens for span in batch.spans),
    )
    visible_keys = torch.zeros(
        num_tokens, num_earlier + num_tokens, dtype=torch.bool, device=device
    )
    begin = 0  # first column with earlier keys of the sequence
    for span, visible in zip(batch.spans, batch.visible, strict=True):
        num_staged = span.num_staged - span.num_tokens  # by earlier forwards
        committed_end = begin + span.sequence.length
        end = committed_end + num_staged
        rows = visible_keys[span.begin : span.end]
        rows[:, begin:committed_end] = True
        rows[:, committed_end:end] = span.staged_mask[:, :num_staged]
        rows[:, num_earlier + span.begin : num_earlier + span.end] = span.staged_mask[
            :, num_staged:
        ]
        slots.append(torch.arange(visible.start, visible.stop - span.num_tokens, device="cpu"))
        positions += (
            torch.arange(span.sequence.length, device=device),
            span.staged_positions[:num_staged],
        )
        begin = end
    is_seen = visible_keys[:, :num_earlier].any(0)  # a mask would not keep out NaN in other slots
    is_gathered = F.pad(is_seen, (0, num_tokens), value=True)
    slots.append(plan_own(batch).slots)
    return GatheredPlan(
        torch.cat(slots)[is_gathered.cpu()],
        torch.cat(positions)[is_seen],
        visible_keys[:, is_gathered],
    )


class GatheredForward(GatheredHook):
    """One forward of a packed batch: the cache of a model whose layers compute attention in their
    own code.
    """

    def __init__(self, pool: KVPool, batch: Plans, position_ids: torch.Tensor):
        """Begin a forward.

        Args:
            pool: storage of the batch's sequences.
            batch: its plans.
            position_ids: [1, num_tokens] int64.
        """
        self.pool = pool
        self.batch = batch
        plan: GatheredPlan = batch.plan(plan_gathered, position_ids.device)
        self._seen = plan.seen
        self.positions = Positions(
            position_ids, torch.cat((plan.earlier_positions, position_ids[0]))
        )

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's K and V of the batch, and return those of all keys, each [1,
        num_kv_heads, num_keys, dim].
        """
        keys = self.pool.keys[layer_idx]
        values = self.pool.values[layer_idx]
        return self._staged(keys, key[0].transpose(0, 1)), self._staged(
            values, value[0].transpose(0, 1)
        )

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stage keys [1, num_tokens, dim] of a layer's indexer, and return those of all keys.  ->
        [1, num_keys, dim]
        """
        stored = self.pool.index_keys[layer_idx]
        assert stored is not None, "the probe saw no indexer in this layer"
        return self._staged(stored, index_keys[0].unsqueeze(1))[:, 0]

    def _staged(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` [num_tokens, num_heads, dim] and return all visible slots.  -> [1,
        num_heads, num_keys, dim]
        """
        stored.index_copy_(0, self.batch.plan(plan_own, stored.device).slots, new)
        return stored[self.batch.plan(plan_gathered, stored.device).slots].transpose(0, 1)[None]

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return the keys that each token sees and the mask function allows at their positions."""
        assert self.positions.of_keys is not None
        zero = self.positions.of_keys.new_zeros(())
        rule = mask_function(
            zero, zero, self.positions.of_tokens[0][:, None], self.positions.of_keys[None]
        )
        return self._seen & rule


class GatheredProbe(GatheredHook):
    """Cache and masks for one forward of one token with the model's own attention."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.positions = Positions(position_ids, position_ids[0])
        self._shapes: dict[int, LayerShape] = {}
        self._windows: set[int | None] = set()  # windows of the masks that were built
        self._counting: set[int] = set()  # layers that ask for the number of cached tokens

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Record the layer that asks; see :meth:`GatheredHook.get_seq_length`."""
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return super().get_seq_length(layer_idx)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes of a layer's K and V, each [1, num_kv_heads, 1, dim], and return them."""
        index_key = self._shapes[layer_idx].index_key if layer_idx in self._shapes else None
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value), index_key)
        return key, value

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Record the shape of a layer's index keys, [1, 1, dim], and return them."""
        self._shapes[layer_idx] = self._shapes[layer_idx]._replace(
            index_key=Stored.like(index_keys[:, None])
        )
        return index_keys

    def allowed(self, mask_function: Any, window: int | None) -> torch.Tensor:
        """Record the window of a mask; see :meth:`GatheredHook.allowed`."""
        check_mask_function(mask_function)
        self._windows.add(window)
        return torch.ones(1, 1, dtype=torch.bool, device=self.positions.of_tokens.device)

    def layers(self, model: Any) -> list[AttentionLayer]:
        """Return the layers by index, or raise UnsupportedModelError if they cannot attend to
        gathered keys.
        """
        indices = sorted(self._shapes)
        if not indices or indices != list(range(len(indices))):
            raise cannot_be_packed(
                model, f"{len(indices)} of its layers keep K and V in a cache of transformers'"
            )
        if not self._windows:
            raise cannot_be_packed(
                model, "it builds masks of its own, not by transformers.masking_utils"
            )
        config = model.config.get_text_config()
        kinds = set(layer_types(model))
        windows = [
            getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
        ]
        expects = kinds & {"sliding_attention", "chunked_attention"} if kinds else True
        if (
            self._windows == {None}
            and expects
            and any(is_reached(window, model) for window in windows)
        ):
            raise cannot_be_packed(model, "it may have a sliding window, which is not in its masks")
        if mask := next(
            (name for name, buffer in model.named_buffers() if _is_mask_by_slot(buffer)), None
        ):
            raise cannot_be_packed(
                model, f"its buffer {mask} masks keys by their place, not by their position"
            )
        window = min(filter(None, self._windows), default=None)
        return [
            AttentionLayer(
                self._shapes[i], window, layer_idx=i, is_own=True, counts_tokens=i in self._counting
            )
            for i in indices
        ]


def _is_mask_by_slot(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a square mask, as layers that index masks by slots have."""
    is_mask = buffer.dtype in (torch.bool, torch.uint8) and buffer.dim() > 1
    return is_mask and buffer.shape[-2] == buffer.shape[-1] > 1


class Gathered(ModelFamily):
    """Models whose layers attend by their own code, over K and V gathered for them."""

    kinds = (*DECODER.kinds, *STATE_KINDS, "indexed_attention")

    def claims(self, model: Any) -> bool:
        # States can be restored, and encoders attended to, through the interface only.
        needs_interface = getattr(model, "_is_stateful", False) and set(layer_types(model)) <= {
            *DECODER.kinds,
            *STATE_KINDS,
        }
        return not (needs_interface or attends_to_encoder(model))

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        with refused_if_it_fails(model):
            probe = GatheredProbe(ids)
            run_model(model, probe, input_ids=ids, position_ids=ids)
            return self, probe.layers(model)

    def new_hook(self, *arguments: Any) -> GatheredForward:
        pool, batch, _, _, position_ids, _ = arguments
        return GatheredForward(pool, batch, position_ids)
