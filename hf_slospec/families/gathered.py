"""Model family whose layers compute attention in their own code, where it cannot be replaced.

In a packed forward, each layer gets K and V of all visible slots of all sequences, and one mask for
the whole batch. It therefore computes num_tokens * num_keys scores, of which the scores between
different sequences are masked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import causal_mask_function

from hf_slospec.families.recurrent import STATE_KINDS
from hf_slospec.model.attention.hook import AttentionHook, Positions, run_model
from hf_slospec.model.batch import (
    AttentionLayer,
    AttentionPlan,
    LayerShape,
    PackedBatch,
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

# transformers' mask function: (batch, head, query, key indices) -> bool, True = may attend
MaskFunction = Callable[..., torch.Tensor]


class GatheredHook(AttentionHook):
    """Base of hooks for layers that attend in their own code: it replaces only their cache, and the
    masks that transformers builds.
    """

    only_masks = True
    positions: Positions
    # The model builds no mask by transformers, and takes one as its argument ``attention_mask``.
    passes_mask = False

    def build_mask(self, name: str, plain: Callable[..., Any], **options: Any) -> torch.Tensor:
        allowed = self.allowed(options["mask_function"], options.get("local_size"))[None, None]
        return allowed if name == "sdpa" else _added(allowed, options["dtype"])

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return the mask of the forward for layers with this mask function.

        Args:
            mask_function: applies to positions, and already includes the layers' window.
            window: the layers' sliding window or chunk; None: unlimited.

        Returns:
            [num_tokens, num_keys] bool, True = may attend.
        """
        raise NotImplementedError

    def arguments(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        if any(name.endswith("token_type_ids") for name, _ in model.named_buffers()):
            # Models otherwise slice this buffer to the forward's length, and it may be shorter.
            options["token_type_ids"] = torch.zeros_like(self.positions.of_tokens)
        if self.passes_mask:
            rule: Any = causal_mask_function
            allowed = self.allowed(rule, None)[None, None]
            dtype = model.get_input_embeddings().weight.dtype
            options["attention_mask"] = _added(allowed, dtype)
        return options

    @property
    def _num_keys(self) -> int:
        assert self.positions.of_keys is not None
        return len(self.positions.of_keys)

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        return self.num_earlier if layer_idx is None else super().get_seq_length(layer_idx)

    @property
    def num_earlier(self) -> int:
        """Number of gathered keys of earlier tokens, which precede the keys of the forward."""
        return self._num_keys - self.positions.of_tokens.shape[1]

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return self.num_earlier

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys, and 0 as the index of the first one."""
        return self._num_keys, 0


def _added(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a boolean mask as one that is added to scores, as transformers makes it."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


@dataclass(frozen=True, eq=False)
class GatheredPlan(AttentionPlan):
    """K/V slots that a packed batch attends to: slots of earlier tokens, sequence by sequence, then
    slots of the new tokens in the order of the batch.

    With a single sequence, this is the order of its tokens. Some layers also apply a causal mask by
    index; in this order, it hides no key that a token should see."""

    slots: torch.Tensor  # [num_keys] int64
    earlier_positions: torch.Tensor  # [num_earlier] int64, positions of the earlier tokens
    # [num_tokens, num_keys] bool, True where the key is visible to the token, windows aside
    seen: torch.Tensor


def plan_gathered(batch: PackedBatch) -> GatheredPlan:
    """Return the slots and the visibility mask of a batch, on the device of its masks."""
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
    begin = 0  # first column of visible_keys for the sequence's earlier tokens
    for span, visible in zip(batch.spans, batch.visible, strict=True):
        num_staged = span.num_staged - span.num_tokens  # by earlier forwards of this step
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
    # Slots that no token sees are left out: they may hold NaN, which masks do not keep out.
    is_seen = visible_keys[:, :num_earlier].any(0)
    is_gathered = F.pad(is_seen, (0, num_tokens), value=True)
    slots.append(plan_own(batch).slots)
    return GatheredPlan(
        torch.cat(slots)[is_gathered.cpu()],
        torch.cat(positions)[is_seen],
        visible_keys[:, is_gathered],
    )


class GatheredForward(GatheredHook):
    """Hook of one packed forward, which the model receives as its cache."""

    def __init__(
        self, pool: KVPool, batch: Plans, position_ids: torch.Tensor, passes_mask: bool = False
    ):
        """Begin a forward.

        Args:
            pool: K/V pool of the batch's sequences.
            batch: plans of the batch, which are made on first use.
            position_ids: [1, num_tokens] int64.
            passes_mask: see :class:`GatheredHook`.
        """
        self.passes_mask = passes_mask
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
        """Write a layer's K and V of the new tokens to the pool, and return K and V of all visible
        slots, each [1, num_kv_heads, num_keys, dim].
        """
        keys = self.pool.keys[layer_idx]
        values = self.pool.values[layer_idx]
        return self._staged(keys, key[0].transpose(0, 1)), self._staged(
            values, value[0].transpose(0, 1)
        )

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the new tokens' keys of a layer's indexer to the pool, and return the indexer keys
        of all visible slots.  [1, num_tokens, dim] -> [1, num_keys, dim]
        """
        stored = self.pool.index_keys[layer_idx]
        assert stored is not None, "the probe saw no indexer in this layer"
        return self._staged(stored, index_keys[0].unsqueeze(1))[:, 0]

    def _staged(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` to the new tokens' slots, and return the content of all visible slots.

        [num_tokens, num_heads, dim] -> [1, num_heads, num_keys, dim]
        """
        stored.index_copy_(0, self.batch.plan(plan_own, stored.device).slots, new)
        return stored[self.batch.plan(plan_gathered, stored.device).slots].transpose(0, 1)[None]

    def allowed(self, mask_function: MaskFunction, window: int | None) -> torch.Tensor:
        """Return which keys are visible to each token and allowed by the mask function."""
        assert self.positions.of_keys is not None
        zero = self.positions.of_keys.new_zeros(())
        rule = mask_function(
            zero, zero, self.positions.of_tokens[0][:, None], self.positions.of_keys[None]
        )
        return self._seen & rule


class GatheredProbe(GatheredHook):
    """Probe that records, in a forward of one token, what layers store and which masks they use."""

    def __init__(self, position_ids: torch.Tensor, passes_mask: bool = False) -> None:
        self.positions = Positions(position_ids, position_ids[0])
        self.passes_mask = passes_mask
        self._shapes: dict[int, LayerShape] = {}
        self._num_cached = set[int]()  # numbers of tokens that layers cached
        self._windows: set[int | None] = set()  # windows of the masks that were built; None: full
        self._counting: set[int] = set()  # indices of layers that ask for the cache's length

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Record that the layer asks for the cache's length, and return it."""
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return super().get_seq_length(layer_idx)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes of a layer's K and V, [1, num_kv_heads, 1, dim], and return both."""
        self._num_cached.add(key.shape[2])
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
        """Record the window of a mask, and return a mask [1, 1] for the probe's only token."""
        check_mask_function(mask_function)
        self._windows.add(window)
        return torch.ones(1, 1, dtype=torch.bool, device=self.positions.of_tokens.device)

    @property
    def lacks_masks(self) -> bool:
        """Return whether layers kept K and V of the token, and transformers was asked for no
        mask.
        """
        return self._num_cached == {1} and not self._windows

    def layers(self, model: Any) -> list[AttentionLayer]:
        """Return the model's layers in order of their indices.

        Raises:
            UnsupportedModelError: the layers cannot attend to gathered keys.
        """
        indices = sorted(self._shapes)
        if not indices or indices != list(range(len(indices))):
            raise cannot_be_packed(
                model, f"{len(indices)} of its layers keep K and V in a cache of transformers'"
            )
        if not self._windows and not self.passes_mask:
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
            self._windows <= {None}
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
    """Return whether a buffer is a square mask, which a layer would index by slot, not position."""
    is_mask = buffer.dtype in (torch.bool, torch.uint8) and buffer.dim() > 1
    return is_mask and buffer.shape[-2] == buffer.shape[-1] > 1


class Gathered(ModelFamily):
    """Models whose layers attend in their own code, over K and V gathered from the pool."""

    kinds = (*DECODER.kinds, *STATE_KINDS, "indexed_attention")

    def __init__(self, passes_mask: bool = False):
        """Make the family; ``passes_mask``: see :class:`GatheredHook`."""
        self.passes_mask = passes_mask

    def claims(self, model: Any) -> bool:
        # Recurrent states and cross-attention work only through transformers' attention interface,
        # so stateful models of known layer types and encoder-decoders are left to other families.
        needs_interface = getattr(model, "_is_stateful", False) and set(layer_types(model)) <= {
            *DECODER.kinds,
            *STATE_KINDS,
        }
        return not (needs_interface or attends_to_encoder(model))

    def probe(self, model: Any, ids: torch.Tensor) -> tuple[ModelFamily, list[AttentionLayer]]:
        with refused_if_it_fails(model):
            probe = GatheredProbe(ids, self.passes_mask)
            run_model(model, probe, input_ids=ids, position_ids=ids)
            takes_mask = "attention_mask" in inspect.signature(type(model).forward).parameters
            if probe.lacks_masks and takes_mask:
                # A trial follows, which refuses models that do not read the mask as it is.
                return UNDER_MASK.probe(model, ids)
            return self, probe.layers(model)

    def new_hook(self, *arguments: Any) -> GatheredForward:
        pool, batch, _, _, position_ids, _ = arguments
        return GatheredForward(pool, batch, position_ids, self.passes_mask)


UNDER_MASK = Gathered(passes_mask=True)  # models that build masks of their own
