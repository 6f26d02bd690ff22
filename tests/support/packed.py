"""Packed models with some settings, computed eagerly unless compilation is asked for, and what they
have cached.
"""

from __future__ import annotations

from types import SimpleNamespace

from hf_slospec import SLOSpecConfig
from hf_slospec.model.linear_overrides import Overrides
from hf_slospec.model.packed_model import PackedModel


def packed_model(model, attention="auto", **settings):
    return PackedModel(
        model, SLOSpecConfig(**{"attention": attention, "compile": False} | settings)
    )


CHANGED = SimpleNamespace(weights=1, modules=1, structure=1)


def overridden(model, *kinds):
    overrides = Overrides(model, filter(None, kinds))
    overrides.renew(CHANGED)
    return overrides


def cached(cache, sequence):
    """Return views of a sequence's K, V and index keys, [num_heads, length, dim] each, for each
    layer.
    """
    slots = slice(sequence.start, sequence.start + sequence.length)
    return [tuple(stored[slots].transpose(0, 1) for stored in layer) for layer in cache.pool.layers]
