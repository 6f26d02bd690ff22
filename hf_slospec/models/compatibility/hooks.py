"""What others hang on a model's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Collects hidden states and attentions. Once asked for any, a model keeps these hooks; they never change a result.
COLLECTING = "transformers.utils.output_capturing"


def is_compiled(model: nn.Module) -> bool:
    """By the user, whole or in part: the compiler takes what is changed for a forward for a change of the model."""
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules())


def changing_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks before and after the module's forward that may change what it computes."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) != COLLECTING]
