"""Checks that a model runs transformers' code (methods, attention, masks, caches), since packed
forwards replace that code and would skip anything else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partialmethod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional
from transformers import masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.linear_overrides import all_modules
from hf_slospec.model.properties import cannot_be_packed
from hf_slospec.model.whose_code import WRAPPERS, library_of

LIBRARY = "transformers"
# Libraries that modules of transformers import functions from.
IMPORTED = {"torch", *sys.stdlib_module_names}
# Methods that stock `generate` calls while it decodes, and speculation does not. Methods that it
# calls before decoding also run with speculation.
DECODING_METHODS = (
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "create_masks_for_generate",
)
# Special methods that _foreign_of_class checks in addition to ordinary members.
CALLED = ("__call__", "__getattribute__", "__getattr__", "__setattr__")
# Names of attention functions that compute softmax attention over all keys that a mask allows, as
# packed forwards do.
ATTENTION = (
    "eager_attention_forward",
    "sdpa_attention_forward",
    "flash_attention_forward",
    "flex_attention_forward",
)


def is_of_transformers(function: Any) -> bool:
    """Return whether a function, and all functions that it wraps, were defined in transformers.

    Decorators of torch and hf_slospec around it are allowed. ``functools.wraps`` copies
    ``__module__``, so the module is read from a function's globals.
    """
    function = getattr(function, "__func__", function)
    while isinstance(function, FunctionType):
        library = library_of(function)
        if library not in WRAPPERS or library not in function.__code__.co_filename:
            return False
        if "__wrapped__" not in vars(function):
            return library == LIBRARY
        function = vars(function)["__wrapped__"]
    return False


def foreign_members(owners: Iterable[Any]) -> list[str]:
    """Return the names of members of objects that run code from outside transformers.

    These are methods and class attributes that are overridden, patched or set on an instance, and
    the names of classes without a base class in transformers.

    Args:
        owners: classes, or instances such as models and caches.
    """
    owners = list(owners)
    classes = dict.fromkeys(owner if isinstance(owner, type) else type(owner) for owner in owners)
    on_classes = [name for each in classes for name in _foreign_of_class(each)]
    on_instances = [
        name for owner in owners if not isinstance(owner, type) for name in _set_on(owner)
    ]
    return list(dict.fromkeys(on_classes + on_instances))


def check_own_code(model: Any, parts: Sequence[Any] | None = None) -> None:
    """Raise UnsupportedModelError if the model decodes or attends by code from outside
    transformers, which speculation would not run.

    Args:
        model: the model.
        parts: the model and all its submodules, if the caller has listed them.
    """
    name = type(model).__name__
    methods = [*_foreign_of_class(type(model), DECODING_METHODS), *_set_on(model, DECODING_METHODS)]
    if methods:
        raise UnsupportedModelError(
            f"{name} decodes by methods that are not transformers' own ({', '.join(methods)}), which speculation does "
            "not call; remove them from the class or the instance, pass fallback=True, or call generate without "
            "slo_tpot"
        )
    if (foreign := next(_foreign_attention(parts or all_modules(model)), None)) is not None:
        raise UnsupportedModelError(
            f"{name} attends by {foreign}, where packed forwards run only what replaces transformers' own functions; "
            "restore it, load the model with attn_implementation='sdpa', pass fallback=True, or call generate without "
            "slo_tpot"
        )


def check_mask_function(mask_function: Any) -> None:
    """Raise UnsupportedModelError if a mask function, or a mask function that it combines, was
    defined outside transformers.
    """
    parts = [mask_function]
    for part in parts:
        if isinstance(part, (tuple, list)):
            parts += part
        elif isinstance(part, FunctionType):
            parts += [cell.cell_contents for cell in part.__closure__ or ()]
            if not is_of_transformers(part):
                raise UnsupportedModelError(
                    f"the model builds masks with {_title('a function', part)} that is not transformers' own, and may "
                    "count padding or cached tokens; leave it out, or use stock generate (fallback=True)"
                )


def _foreign_of_class(kind: type, among: Collection[str] = ()) -> Iterator[str]:
    """Yield the names of a class's members that are defined outside transformers.

    Args:
        kind: the class.
        among: names to check; empty: all members of its base classes in transformers.
    """
    library = [base for base in kind.__mro__ if library_of(base) == LIBRARY]
    if not library:
        yield kind.__name__
    members = (
        name for base in library for name in vars(base) if not name.startswith(("__", "_abc"))
    )
    for name in among or dict.fromkeys((*CALLED, *members, *_stored(kind))):
        base = next((base for base in kind.__mro__ if name in vars(base)), object)
        member = vars(base).get(name)
        functions = _functions(member)
        is_own = library_of(base) == LIBRARY
        # A partial method may bind other arguments, so its class must be transformers', too.
        if functions and (is_own or not isinstance(member, partialmethod)):
            is_own = all(map(is_of_transformers, functions))
        if not is_own and base.__module__ != "builtins":
            yield name


def _stored(kind: type) -> Iterator[str]:
    """Yield the names of a class's properties that have a setter, such as ``keys``."""
    for base in kind.__mro__:
        yield from (
            name for name, value in vars(base).items() if isinstance(value, property) and value.fset
        )


def _functions(member: Any) -> list[Any]:
    """Return the functions behind a method or property; [] for other attributes."""
    if isinstance(member, property):
        return [member.fget]
    member = getattr(member, "__func__", member)  # unwraps static methods and class methods
    if callable(member):
        return [] if isinstance(member, type) else [member]
    is_descriptor = hasattr(type(member), "__get__") and type(member).__module__ != "builtins"
    # Partial methods and cached properties hold their function in ``func``.
    return [getattr(member, "func", member)] if is_descriptor else []


def _set_on(owner: Any, among: Collection[str] = ()) -> Iterator[str]:
    """Yield the names of methods that were replaced on an instance. A method of the same instance
    that transformers defines does not count as replaced.

    Args:
        owner: the instance.
        among: names to check; empty: all.
    """
    attributes = getattr(owner, "__dict__", {})
    for name in attributes.keys() & among if among else list(attributes):
        value = attributes[name]
        is_method = callable(value) and not isinstance(value, type) and hasattr(type(owner), name)
        is_own = (
            isinstance(value, MethodType) and value.__self__ is owner and is_of_transformers(value)
        )
        if is_method and not is_own:
            yield name


def _foreign_attention(parts: Sequence[Any]) -> Iterator[str]:
    """Yield descriptions of attention and mask functions that packed forwards replace and that are
    not transformers' own.
    """
    if not isinstance(functional.scaled_dot_product_attention, BuiltinFunctionType):
        yield _title(
            "torch.nn.functional.scaled_dot_product_attention",
            functional.scaled_dot_product_attention,
        )
    configs = {id(part.config): part.config for part in parts if "config" in vars(part)}.values()
    names = {str(getattr(config, "_attn_implementation", None) or "eager") for config in configs}
    # While a packed forward runs, names of attention implementations have this prefix.
    implementations = {name.removeprefix("hf_slospec:") for name in names}
    for module in map(sys.modules.get, {type(part).__module__ for part in parts}):
        names_of_module = vars(module) if module is not None else {}
        interface = names_of_module.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        if not is_of_transformers(getattr(type(interface), "get_interface", None)):
            yield _title("ALL_ATTENTION_FUNCTIONS", type(interface))
        for name in implementations:
            function = interface.get(name, names_of_module.get("eager_attention_forward"))
            if function is not None and not (
                is_of_transformers(function) and function.__name__ in ATTENTION
            ):
                yield _title(repr(name), function)
        if names_of_module.get("__name__", "").startswith(f"{LIBRARY}."):
            yield from _replaced(module, ("create_", "repeat_kv"))
    for name in implementations:
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
        if not is_of_transformers(mask):
            yield (
                _title(f"masks for {name!r}", mask)
                if mask
                else f"{name!r}, for which no mask function is registered"
            )
    for module in (masking_utils, sdpa_attention):
        yield from _replaced(module, ("",))


def _replaced(module: Any, prefixes: tuple[str, ...]) -> Iterator[str]:
    """Yield descriptions of functions in a module of transformers that were replaced by functions
    from elsewhere.

    Args:
        module: the module.
        prefixes: check only functions whose name starts with one of these.
    """
    for name, value in list(vars(module).items()):
        if not (
            isinstance(value, FunctionType) and name.startswith(prefixes)
        ) or is_of_transformers(value):
            continue
        if library_of(value) not in IMPORTED:
            yield _title(f"{module.__name__}.{name}", value)


def _title(what: str, function: Any) -> str:
    if not isinstance(function, FunctionType):
        return f"{what} ({function!r})"
    return f"{what} ({function.__globals__.get('__name__')}.{function.__code__.co_name})"


# Names of attributes that tell that a layer quantises its inputs, in weights of torchao and in
# layers of transformers and compressed-tensors.
QUANTISING = re.compile(
    "act(ivation)?_quant.*|input_quant_func|activation_scheme|input_activations"
)
# Modules whose classes always quantise inputs (torch's dynamic quantisation), and the class of
# bitsandbytes' LLM.int8.
QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
LLM_INT8 = "Linear8bitLt"


def check_activations(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a layer quantises activations.

    The scales may be computed from all tokens of a forward. Even with a scale per token, an error
    in the last bit, as a different number of tokens causes, rounds some activations to another
    integer, which is an error of about a percent.
    """
    for name, module in model.named_modules():
        holders = [
            module,
            getattr(module, "quantization_scheme", None),
            *module._parameters.values(),
        ]
        kind = next((type(holder).__name__ for holder in holders if _quantises(holder)), None)
        if kind is not None:
            raise cannot_be_packed(
                model,
                f"{name} quantises activations ({kind}), so that logits depend on which tokens a forward has; "
                "quantise weights only, or use stock generate (fallback=True)",
            )


def _quantises(holder: Any) -> bool:
    kind = type(holder)
    if kind.__module__.startswith(QUANTISED_MODULES) or kind.__name__ == LLM_INT8:
        return True
    return any(
        QUANTISING.fullmatch(name)
        for name, value in getattr(holder, "__dict__", {}).items()
        if value is not None
    )
