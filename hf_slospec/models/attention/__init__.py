"""Tree attention for packed batches, plugged into transformers' attention interface."""

from hf_slospec.models.attention.alone import AloneForward
from hf_slospec.models.attention.backends import backend_for
from hf_slospec.models.attention.cross import DecoderForward, EncodedCache
from hf_slospec.models.attention.dense import isolated_attention, masked_attention
from hf_slospec.models.attention.flash import FlashAttention
from hf_slospec.models.attention.forward import PackedForward
from hf_slospec.models.attention.gathered import GatheredForward, MaskSource, own_attention
from hf_slospec.models.attention.hook import active_forward, forget_attributes
from hf_slospec.models.attention.packing import MAX_DENSE, pack
from hf_slospec.models.attention.positions import Positions, given_positions
from hf_slospec.models.attention.sdpa import sdpa_attention
from hf_slospec.models.attention.tree_attention import TreeAttention
from hf_slospec.models.attention.tree_plan import plan_tree
from hf_slospec.models.batch.packed_batch import (
    FIRST_SEEN,
    AttentionLayer,
    NewTokens,
    PackedBatch,
    PlannedBatch,
    Plans,
    Span,
)

__all__ = [
    "FIRST_SEEN",
    "MAX_DENSE",
    "AloneForward",
    "AttentionLayer",
    "DecoderForward",
    "EncodedCache",
    "FlashAttention",
    "GatheredForward",
    "MaskSource",
    "NewTokens",
    "PackedBatch",
    "PackedForward",
    "PlannedBatch",
    "Plans",
    "Positions",
    "Span",
    "TreeAttention",
    "active_forward",
    "backend_for",
    "forget_attributes",
    "given_positions",
    "isolated_attention",
    "masked_attention",
    "own_attention",
    "pack",
    "plan_tree",
    "sdpa_attention",
]
