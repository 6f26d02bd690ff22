"""The call of a model for a packed batch."""

from __future__ import annotations

from typing import Any

import torch

from hf_slospec.model.attention.hook import AttentionHook, active_hook
from hf_slospec.model.properties import cache_option, given_position_ids


def run_model(
    model: Any,
    hook: AttentionHook,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Run the model for a packed batch, with the hook as its cache and attention, and return its
    output.

    With ``attention_mask=None``, the hook keeps models from building masks that it does not read."""
    options = dict(inputs, use_cache=True, return_dict=True)
    options |= given_position_ids(model, position_ids) | cache_option(hook, model)
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    with active_hook(model, hook):
        return model(**hook.arguments(model, options))
