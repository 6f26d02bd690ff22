"""Packed models with some settings, computed eagerly unless compilation is asked for, and what they
have cached.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_slospec import SLOSpecConfig
from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.kv_cache import KVCache
from hf_slospec.model.overrides import LinearOverride, Overrides
from hf_slospec.model.packed_model import PackedModel


def packed_model(model: Any, attention: str = "auto", **settings: Any) -> PackedModel:
    return PackedModel(
        model, SLOSpecConfig(**{"attention": attention, "compile": False} | settings)
    )


CHANGED = SimpleNamespace(weights=1, modules=1, structure=1)


def overridden(model: nn.Module, *kinds: LinearOverride | None) -> Overrides:
    overrides = Overrides(model, filter(None, kinds))
    overrides.renew(CHANGED)
    return overrides


def cached(cache: KVCache, sequence: CachedSequence) -> list[tuple[torch.Tensor, ...]]:
    """Return views of a sequence's K, V and index keys, [num_heads, length, dim] each, for each
    layer.
    """
    slots = slice(sequence.start, sequence.start + sequence.length)
    return [tuple(stored[slots].transpose(0, 1) for stored in layer) for layer in cache.pool.layers]
