"""The call of a model for a packed batch."""

from __future__ import annotations

from typing import Any

import torch

from hf_slospec.model.attention.hook import AttentionHook, active_hook
from hf_slospec.model.inputs import Outputs
from hf_slospec.model.properties import cache_option, given_position_ids, hidden_states


def packed_outputs(
    model: Any,
    hook: AttentionHook,
    tokens: dict[str, torch.Tensor],
    position_ids: torch.Tensor,  # [1, num_tokens] int64
    logit_rows: torch.Tensor,  # [num_logits] int64
    feature_layers: tuple[int, ...],
    keeps_logits: bool,
) -> Outputs:
    """Run the model for a packed batch; return the logits of some tokens, and hidden states of all.

    ``tokens`` are ``input_ids`` or ``inputs_embeds``; ``keeps_logits``: the model's forward takes
    ``logits_to_keep``."""
    options: dict[str, Any] = {"logits_to_keep": logit_rows} if keeps_logits else {}
    if feature_layers:
        options["output_hidden_states"] = list(feature_layers)
    output = run_model(model, hook, **tokens, position_ids=position_ids, **options)
    logits = output.logits[0]
    if not keeps_logits:
        logits = logits[logit_rows.to(logits.device)]
    features = (
        hidden_states(output, feature_layers, position_ids.device) if feature_layers else None
    )
    return Outputs(logits, features)


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
