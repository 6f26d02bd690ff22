"""Forward hooks and compilation of a model's modules."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from hf_slospec.models.inspection.traversal import all_modules

# Module of transformers' hooks that collect hidden states and attentions. They stay on a model after its first such
# output, and never change a result.
COLLECTING = "transformers.utils.output_capturing"
COMPILED = "get_compiler_config"  # attribute of functions that torch.compile returns
# Hooks for gradient checkpointing, as transformers, peft and trl call them; they change no value.
REQUIRING_GRAD = ("make_inputs_require_grad", "make_inputs_require_grads")


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it was compiled.

    Packed forwards change modules while they run, for which the compiler would compile the model again.
    """
    modules = all_modules(model)
    forwards = [module.__dict__["forward"] for module in modules if "forward" in module.__dict__]
    classes: set[Any] = {*map(type, modules)}
    return (
        any(module._compiled_call_impl is not None for module in modules)
        or any(hasattr(forward, COMPILED) for forward in (*forwards, *(each.forward for each in classes)))
        or any(each.__name__ == "OptimizedModule" for each in classes)
    )


def changing_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the module's forward hooks and pre-hooks that may change what it computes."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if not is_unchanging(hook)]


def is_unchanging(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is known to change no value."""
    return type(hook) is FunctionType and (hook.__module__ == COLLECTING or hook.__name__ in REQUIRING_GRAD)
