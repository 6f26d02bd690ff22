"""Properties of a model that packed forwards depend on (cache argument, positions, vocabulary,
masks, autocast), the errors that refuse a model, and comparison of logits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.forks import undone
from hf_slospec.model.linear_overrides import all_modules, container_kind, items_of
from hf_slospec.model.memory import DEVICE_ERRORS, is_out_of_memory

# Names that models give the argument that takes the cache.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The name that the installed version of transformers uses in its own layers and outputs.
CACHE_NAME: str = next(
    name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__
)


def cache_option(cache: Any, model: Any = None) -> dict[str, Any]:
    """Return a cache as keyword argument of a forward.

    Args:
        cache: the cache.
        model: the model that is called; None: a layer is called.
    """
    names = () if model is None else argument_names(model)
    return {next((name for name in CACHE_NAMES if name in names), CACHE_NAME): cache}


def given_cache(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and value of the cache argument in a call; the value is None if no cache is
    passed.
    """
    pairs = [(name, arguments[name]) for name in CACHE_NAMES if arguments.get(name) is not None]
    return pairs[0] if pairs else (CACHE_NAME, None)


# Config settings that do not identify a model: attention and expert implementations, which packed
# forwards replace, `use_cache`, which trainers switch off, and settings that transformers does not
# save.
UNREAD = {
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_auto_class",
    "_commit_hash",
    "_is_quantized",
    "_post_init_done",
    "base_model_fsdp_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "distributed_config",
    "ignore_keys_at_rope_validation",
}
# Errors that a model's forward may raise if it cannot process a packed batch.
FORWARD_ERRORS = (
    TypeError,
    AttributeError,
    RuntimeError,
    ValueError,
    LookupError,
    AssertionError,
)


def config_values(config: Any) -> dict[str, Any]:
    """Return the settings of a config that identify the model: all but those in UNREAD, such as its
    path.

    The values can be compared and written as JSON. Objects that are neither plain values nor of a
    class of transformers are described by their id.
    """
    values: dict[str, Any] = _described(config)
    return values


def _described(value: Any, holders: tuple[int, ...] = ()) -> Any:
    """Convert a config, or a value in it, to JSON data.

    Args:
        value: the config or value.
        holders: ids of the containers around the value; a value that is one of them is described by
            its id.
    """
    kind = type(value)
    container = container_kind(value)
    if kind in (bool, int, float, str, type(None)):
        return value
    if kind is torch.dtype:
        return str(value)
    is_config = issubclass(kind, PreTrainedConfig) or kind.__module__.startswith("transformers.")
    if id(value) in holders or not (is_config or container):
        return f"{kind.__module__}.{kind.__qualname__} at {id(value)}"
    holders = *holders, id(value)
    if container in (list, tuple):
        return [_described(part, holders) for part in items_of(value)]
    items = items_of(value if container else vars(value))
    names = [str(_described(name, holders)) for name in items[::2]]
    values = {
        name: part for name, part in zip(names, items[1::2], strict=True) if name not in UNREAD
    }
    described = {name: _described(part, holders) for name, part in values.items()}
    return described if container else {"class": kind.__qualname__, **described}


def vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def num_embeddings(model: Any) -> int:
    """Return the number of rows of the decoder's embedding table, which may exceed the config's
    vocabulary size.
    """
    decoder = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else None
    table = getattr(decoder, "embed_tokens", None)
    return len((model.get_input_embeddings() if table is None else table).weight)


def trained_len(model: Any) -> int | None:
    """Return the model's ``max_position_embeddings``; None if its config has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_embeds_tokens(model: Any) -> None:
    """Raise UnsupportedModelError unless the model embeds all input tokens by one embedding
    table.
    """
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        embeddings = None
    if not isinstance(getattr(embeddings, "weight", None), torch.Tensor):
        kind = "none" if embeddings is None else f"a {type(embeddings).__name__}"
        raise cannot_be_packed(
            model, f"its input embeddings must be one table of all tokens, and are {kind}"
        )


def input_device(model: Any) -> torch.device:
    """Return the device that input tokens must be on: the input embeddings' device or, if they are
    offloaded, the device on which they are executed.
    """
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    executed_on = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device("meta" if executed_on is None else executed_on)


def given_position_ids(model: Any, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the positions as keyword argument of the model's forward; {} if its forward takes no
    positions.
    """
    names = [
        name for name in ("decoder_position_ids", "position_ids") if name in argument_names(model)
    ]
    return dict.fromkeys(names[:1], position_ids)


def takes_position_ids(model: Any) -> bool:
    """Return whether the model's forward takes position ids, so that stock ``generate`` passes
    them.
    """
    return bool(given_position_ids(model, torch.empty(0, device="cpu")))


def attends_to_encoder(model: Any) -> bool:
    """Return whether the model attends to an encoder: an encoder-decoder, or a decoder that takes
    the outputs of a separate encoder.
    """
    return "encoder_outputs" in argument_names(model)


def argument_names(model: Any) -> frozenset[str]:
    return _arguments_of(type(model).forward)


@functools.cache
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(forward).parameters)


def hidden_states(outputs: Any, layers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Concatenate the hidden states after these layers.  -> [num_tokens, num_layers * hidden]"""
    return torch.cat([outputs.hidden_states[layer][0].to(device) for layer in layers], dim=-1)


@contextlib.contextmanager
def refused_if_it_fails(model: Any) -> Iterator[None]:
    """Context manager that raises UnsupportedModelError if the model's forward fails in it. Errors
    of the device, such as out of memory, pass through.
    """
    try:
        yield
    except DEVICE_ERRORS:
        raise
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise cannot_be_packed(
            model, f"its forward failed on a packed batch with {error!r}"
        ) from error


def cannot_be_packed(model: Any, why: str) -> UnsupportedModelError:
    """Return the error that refuses a model, with the name of its class."""
    return UnsupportedModelError(f"{type(model).__name__} cannot be packed: {why}")


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which all modules are in evaluation mode: dropout would also draw from the
    global generator.
    """
    training: list[Any] = [module for module in all_modules(model) if module.training]

    def train() -> None:
        for module in training:
            module.training = True

    with undone(train):
        for module in training:
            module.training = False
        yield


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast in the current thread; None if autocast is off."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def converts_weights(model: Any, dtype: torch.dtype | None) -> bool:
    """Return whether autocast in ``dtype`` converts weights, or other operands on a device whose
    autocast computes norms and softmax in fp32.
    """
    if input_device(model).type != "cpu":
        return True
    return any(one.is_floating_point() and one.dtype != dtype for one in model.parameters())


@contextlib.contextmanager
def watching_autocast(model: Any) -> Iterator[Callable[[], torch.dtype | None]]:
    """Context manager that yields a function, which returns the autocast dtype of the model's last
    forward in this context.

    ``Accelerator.prepare`` replaces a model's forward by one that turns autocast on.
    """
    dtypes: list[torch.dtype | None] = [None]
    device = input_device(model).type

    def watch(*_: Any) -> None:
        dtypes[0] = autocast_dtype(device)

    hook = model.get_input_embeddings().register_forward_pre_hook(watch)
    try:
        yield lambda: dtypes[0]
    finally:
        hook.remove()


def layer_types(model: Any) -> list[str]:
    """Return the config's type of each layer (``layer_types``); empty if the config has none."""
    return list(getattr(model.config.get_text_config(), "layer_types", None) or ())


def is_reached(window: int | None, model: Any) -> bool:
    """Return whether sequences of the model may be longer than ``window`` tokens."""
    max_len = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return bool(window and (max_len is None or window < max_len))


FAR = 1 << 20  # positions; takes the place of the size for masks without window or chunk


class Reach(NamedTuple):
    """Limits of causal attention, in positions; None: unlimited."""

    window: int | None = None
    chunk: int | None = None


class _OnHost(TorchDispatchMode):
    """Mode in which all operators compute on the CPU: on a GPU, an index beyond a tensor's end
    would end the process's CUDA context.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs or {}))
        cpu_args, cpu_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), on_host)
        return func(*cpu_args, **cpu_kwargs)


def reach_of(mask_function: Callable[..., torch.Tensor], local_size: int | None) -> Reach | None:
    """Return the window or chunk size of a mask.

    It is found from the mask's values at positions where full causal attention, a sliding window
    and chunks of ``local_size`` differ.

    Args:
        mask_function: mask function of transformers.masking_utils; takes broadcasting indices of
            rows, heads, queries and keys.
        local_size: size of the window or chunk in positions; None if the mask has none.

    Returns:
        None if the mask is neither causal, nor a sliding window, nor chunked.
    """
    size = local_size or FAR
    near = sorted({0, 1, 2, *(n * size + step for n in (1, 2, 3) for step in (-1, 0, 1))})
    positions = torch.tensor(near, device="cpu")
    queries = positions[:, None]
    keys = positions[None, :]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    try:
        with _OnHost():  # type: ignore[no-untyped-call]  # torch's has no annotations
            allowed = mask_function(first, first, queries[None, None], keys[None, None]).reshape(
                queries.shape[0], -1
            )
    except IndexError:  # the function reads the tokens of a batch, which there are none of here
        return None
    causal = keys <= queries
    candidates = {Reach(): causal}
    if local_size is not None:
        candidates[Reach(window=size)] = causal & (queries - keys < size)
        candidates[Reach(chunk=size)] = causal & (queries // size == keys // size)
    return next((reach for reach, mask in candidates.items() if torch.equal(mask, allowed)), None)


# Largest accepted relative error of a node's logits, in fp32 and in lower precisions: more than
# rounding causes, and far less than attending to a wrong token causes.
TOLERANCE = 5e-3
REDUCED_TOLERANCE = 0.1


def relative_error(ours: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each token's logits, after their mean is subtracted.  ->
    [num_tokens] f64
    """
    ours, plain = (
        logits.double() - logits.double().mean(-1, keepdim=True) for logits in (ours, plain)
    )
    # Avoids a division by 0: a token whose embedding is zero may have equal logits for all tokens.
    smallest = torch.finfo(plain.dtype).tiny
    errors: torch.Tensor = (ours - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=smallest)
    return errors


def tolerance_in(dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest relative error of logits that is accepted for layers of these dtypes."""
    return (
        TOLERANCE if all(torch.finfo(dtype).bits >= 32 for dtype in dtypes) else REDUCED_TOLERANCE
    )
