"""Checks of the code that computes tokens: refuses hooks and modules from outside known libraries
unless their bytecode shows that they compute each token independently.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils.parametrize import ParametrizationList
from transformers import GenerationMixin, PreTrainedModel

from hf_slospec.model.linear_overrides import all_modules
from hf_slospec.model.properties import cannot_be_packed

# Module of transformers whose hooks collect hidden states and attentions. The hooks stay on a model
# after the first forward that returns them, and never change a result.
COLLECTING = "transformers.utils.output_capturing"
COMPILED = "get_compiler_config"  # attribute of functions that torch.compile returns
# Names of hooks for gradient checkpointing in transformers, peft and trl; they change no value.
REQUIRING_GRAD = ("make_inputs_require_grad", "make_inputs_require_grads")


def is_compiled(model: nn.Module, parts: Sequence[Any] | None = None) -> bool:
    """Return whether the model or a submodule was compiled by torch.compile.

    Packed forwards replace attributes of modules while they run, for which the compiler would
    compile the model again.

    Args:
        model: the model.
        parts: the model and all its submodules, if the caller has listed them.
    """
    return any(
        part._compiled_call_impl is not None
        or type(part).__name__ == "OptimizedModule"
        or hasattr(part.__dict__.get("forward", type(part).forward), COMPILED)
        for part in parts or all_modules(model)
    )


def changing_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the module's forward hooks and pre-hooks that may change what it computes."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if not is_unchanging(hook)]


def is_unchanging(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is known to change no value (see COLLECTING and REQUIRING_GRAD)."""
    return type(hook) is FunctionType and (
        hook.__module__ == COLLECTING or hook.__name__ in REQUIRING_GRAD
    )


# Libraries whose decorators only call what they wrap.
WRAPPERS = {"transformers", "torch", "hf_slospec", "contextlib"}
# Libraries whose layers and hooks compute each token from its own inputs, or attend through
# transformers' interface. Those after trl have layers with quantised weights, which transformers'
# quantizers put into models.
LIBRARIES = WRAPPERS | set(
    "accelerate peft trl torchao bitsandbytes awq compressed_tensors gptqmodel hqq optimum".split()
)
# Variable in which trl's forward of a model holds the forward that it calls.
CALLED_FORWARD = "original_forward"
# Attribute that users set on hooks and modules to declare that they compute each token alone.
DECLARED = "per_token"
# Names of attributes and functions that code may use on tensors: none depends on the number of
# tokens.
TOKEN_WISE = frozenset(
    "Tensor abs add addcmul bfloat16 clamp clone contiguous detach device div double dtype exp float functional gelu "
    "half hidden_states last_hidden_state linear logits matmul mul neg nn relu sigmoid silu softplus sub tanh to "
    "type_as unsqueeze where".split()
)
# Methods of torch.nn.Module that run in each call of a module.
CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__")
# Global objects that token-wise code may use.
CALLED = (isinstance, tuple, torch, nn, nn.functional, torch.Tensor)
# Bytecode instructions that make no loops, and change nothing but local variables.
WITHOUT_STATE = re.compile(
    "RESUME|NOP|CACHE|PRECALL|PUSH_NULL|COPY_FREE_VARS|LOAD_(FAST.*|CONST|SMALL_INT|DEREF|GLOBAL|ATTR|METHOD)"
    "|STORE_FAST.*|BINARY_.*|UNARY_.*|COMPARE_OP|IS_OP|TO_BOOL|NOT_TAKEN|POP_JUMP.*|JUMP_FORWARD"
    "|BUILD_(TUPLE|LIST|SLICE)|LIST_(EXTEND|TO_TUPLE)|CALL.*|KW_NAMES|RETURN_.*|POP_TOP|COPY|SWAP|UNPACK_.*"
)
IN_PLACE = {"out", "inplace"}  # names of arguments that make torch's functions write into tensors
MAX_INDEX = 1  # largest index of a tuple; a larger number in a subscript may count tokens


def library_of(code: Any) -> str:
    """Return the top-level package that defines a function or class.

    For functions it is read from their globals, as decorators copy ``__module__`` from what they
    wrap.
    """
    names = getattr(code, "__globals__", None)
    # A class may have an attribute __globals__ that is no dict, as the class of functions does.
    module = names.get("__name__") if isinstance(names, dict) else code.__module__
    return (module or "").partition(".")[0]


def check_code(model: nn.Module) -> None:
    """Raise UnsupportedModelError if tokens are computed by code that may depend on the shape of a
    forward or on other tokens.
    """
    if (title := next(_other_code(model), None)) is not None:
        raise cannot_be_packed(
            model,
            f"{title} is called with drafted tokens, and those of several requests, in one row, and no trial can show "
            f"that this changes nothing; if it computes each token alone, without counting tokens or calls, set "
            f"{DECLARED} = True on it, or on the model for all of them; otherwise pass fallback=True, or call generate "
            "without slo_tpot",
        )


def num_global_hooks() -> int:
    """Return the number of global forward hooks, which torch calls for all modules."""
    return sum(map(len, _global_hooks()))


def _global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    return global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks


def _other_code(model: nn.Module) -> Iterator[str]:
    """Yield a description of each hook, forward or method that may not compute each token alone: it
    is not from a known library, not declared ``per_token``, and not token-wise by its bytecode.
    """
    for hook in (hook for hooks in _global_hooks() for hook in hooks.values()):
        if not _is_accepted(hook, None):
            yield f"a global forward hook, {_name_of(hook)},"
    for name, module in _modules_of_tokens(model):
        title = name or "the model"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_accepted(hook, module):
                yield f"the forward hook {_name_of(hook)} on {title}"
        for hook in _accelerate_hooks(module):
            if not all(map(_is_known, (type(hook).pre_forward, type(hook).post_forward))):
                yield f"accelerate's hook {type(hook).__qualname__} on {title}"
        kind = type(module)
        forward = vars(module).get("forward", kind.forward)
        if not _is_accepted(forward, module):
            yield f"{_name_of(forward)}, the forward of {title},"
        if overridden := [
            method for method in _overridden(kind) if not _is_known(getattr(kind, method))
        ]:
            yield f"{kind.__qualname__}.{overridden[0]}, a method of {title},"


def _modules_of_tokens(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and modules of a model that process output tokens. Encoders of prompts,
    parametrizations and modules declared ``per_token`` are left out.
    """
    is_whole = getattr(model.config, "is_encoder_decoder", False)
    ids = {id(model.get_encoder())} if is_whole else set[int]()
    named: list[tuple[str, Any]] = [("", model)]
    for name, module in named:
        if id(module) in ids or getattr(module, DECLARED, False):
            continue
        ids.add(id(module))
        if not isinstance(module, ParametrizationList):
            yield name, module
            parts = list(module._modules.items())
            named += [
                (f"{name}.{part_name}".lstrip("."), part)
                for part_name, part in parts
                if part is not None
            ]


def _accelerate_hooks(module: Any) -> Iterator[Any]:
    hooks = [vars(module)["_hf_hook"]] if "_hf_hook" in vars(module) else []
    for hook in hooks:
        hooks += getattr(hook, "hooks", ())  # accelerate's SequentialHook contains several
        yield hook


def _overridden(kind: type) -> Iterator[str]:
    """Yield the names of library methods that a class from outside the libraries overrides and that
    a forward may call.
    """
    foreign = [base for base in kind.__mro__ if not _is_of_library(base)]
    for name in dict.fromkeys(name for base in foreign for name in vars(base)):
        is_method = isinstance(getattr(kind, name), FunctionType) and not name.startswith("__init")
        is_used = any(name in vars(base) for base in kind.__mro__ if base not in foreign)
        is_beside = any(hasattr(base, name) for base in (PreTrainedModel, GenerationMixin))
        if is_method and is_used and name != "forward" and (name in CALLS or not is_beside):
            yield name


def _is_accepted(code: Any, owner: nn.Module | None) -> bool:
    """Return whether a hook or forward is a known library's, is declared ``per_token``, or is
    token-wise by its bytecode.
    """
    if any(getattr(each, DECLARED, False) for each in (code, *_functions(code))):
        return True
    foreign = [function for function in _functions(code) if not _is_of_library(function)]
    bound = [value for value in _bound(code) if value is not owner]
    return all(is_token_wise(function, owner, bound) for function in foreign)


def _bound(code: Any) -> Iterator[Any]:
    """Yield the objects that a callable is bound to, and its bound arguments."""
    if isinstance(code, functools.partial):
        yield from (*code.args, *code.keywords.values(), *_bound(code.func))
    elif isinstance(code, MethodType):
        yield code.__self__
    elif not isinstance(code, FunctionType):
        yield code


def _is_known(code: Any) -> bool:
    return all(map(_is_of_library, _functions(code)))


def _is_of_library(code: Any) -> bool:
    return library_of(code) in LIBRARIES


def _functions(code: Any) -> Iterator[Any]:
    """Yield the functions that run when a callable is called, including the functions that it
    wraps.
    """
    wrapped = getattr(code, "__dict__", {}).get("__wrapped__")
    if wrapped is not None:
        yield from _functions(wrapped)
    if isinstance(code, functools.partial):
        yield from _functions(code.func)
    elif isinstance(code, MethodType):
        yield from _functions(code.__func__)
    elif isinstance(code, (FunctionType, BuiltinFunctionType)):
        yield code
        if isinstance(code, FunctionType) and CALLED_FORWARD in code.__code__.co_freevars:
            cells = code.__closure__ or ()
            called = cells[code.__code__.co_freevars.index(CALLED_FORWARD)]
            yield from _functions(called.cell_contents)
    elif isinstance(code, nn.Module):
        yield from _functions(code.forward)
        yield type(code).__call__
    else:
        call = getattr(type(code), "__call__")  # noqa: B004, B009  its function, not whether there is one
        yield call if isinstance(call, FunctionType) else type(code)


def is_token_wise(
    function: Any, owner: nn.Module | None = None, values: Iterable[Any] = ()
) -> bool:
    """Return whether a function's bytecode shows that it computes each token alone, and all in the
    same way.

    Such a function may only add, multiply and convert tensors, with constants or attributes of
    ``owner``, without loops, shapes or state. It computes the same for every shape, so a trial with
    one shape is enough.

    Args:
        function: the function.
        owner: module that it is called for.
        values: arguments that are bound to the function.
    """
    if not isinstance(function, FunctionType):
        return False
    instructions = list(dis.get_instructions(function))
    if _writes(function, instructions):
        return False
    has_subscript = any("SUBSCR" in each.opname or "SLICE" in each.opname for each in instructions)
    has_subscript |= any(each.argrepr == "[]" for each in instructions)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [
        *values,
        *cells,
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    is_plain: Callable[[Any], bool] = functools.partial(_is_plain, has_subscript=has_subscript)
    return all(map(is_plain, values)) and all(
        WITHOUT_STATE.fullmatch(each.opname) and _reads_plainly(each, function, owner, is_plain)
        for each in instructions
    )


def _writes(function: FunctionType, instructions: Sequence[dis.Instruction]) -> bool:
    """Return whether code may write into tensors that outlive the call, by which it could count its
    calls.

    ``hidden += v`` is allowed, as it writes into the call's own tensor, unless ``hidden`` is
    another name for an attribute, a global or a default value.
    """
    tuples = (const for const in function.__code__.co_consts if isinstance(const, tuple))
    if not IN_PLACE.isdisjoint(itertools.chain.from_iterable(tuples)):
        return True
    if not any(each.opname == "BINARY_OP" and each.argrepr.endswith("=") for each in instructions):
        return False
    has_alias = any(
        each.opname.startswith(("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR"))
        and after.opname.startswith(("STORE_FAST", "JUMP", "COPY", "SWAP", "BUILD"))
        for each, after in itertools.pairwise(instructions)
    )
    return has_alias or bool(function.__defaults__ or function.__kwdefaults__)


def _reads_plainly(
    instruction: dis.Instruction,
    function: FunctionType,
    owner: nn.Module | None,
    is_plain: Callable[[Any], bool],
) -> bool:
    """Return whether an instruction reads only constants, numbers, tensors, or submodules, which
    are checked separately.
    """
    kind = instruction.opname
    name = instruction.argval
    if kind in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"):
        return is_plain(name)
    if kind == "LOAD_GLOBAL":
        builtins = function.__globals__.get("__builtins__", {})
        builtin_values = builtins if isinstance(builtins, dict) else vars(builtins)
        value = function.__globals__.get(name, builtin_values.get(name))
        return any(value is each for each in CALLED) or is_plain(value)
    if kind in ("LOAD_ATTR", "LOAD_METHOD") and name not in TOKEN_WISE:
        value = getattr(owner, name, None)
        return not hasattr(torch.Tensor, name) and (
            isinstance(value, nn.Module) or (value is not None and is_plain(value))
        )
    return True


def _is_plain(value: Any, has_subscript: bool) -> bool:
    """Return whether a value is a constant that token-wise code may read: a number, string, dtype,
    device, tensor or slice of numbers. If the code has subscripts, larger integers are not allowed,
    as they may be indices of tokens.
    """
    if isinstance(value, slice):
        return all(_is_plain(part, has_subscript) for part in (value.start, value.stop, value.step))
    if isinstance(value, int) and not isinstance(value, bool):
        return not has_subscript or abs(value) <= MAX_INDEX
    return isinstance(
        value, (type(None), type(...), bool, float, str, torch.Tensor, torch.dtype, torch.device)
    )


def _name_of(code: Any) -> str:
    function = next((each for each in _functions(code) if not _is_of_library(each)), type(code))
    module = getattr(function, "__globals__", {}).get("__name__", function.__module__)
    return f"{module}.{function.__qualname__}"
