"""Loading of models: checks of a model's name before transformers loads it, checks of the loaded
model, and messages for loading errors.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedModelError
from hf_slospec.extras import need
from hf_slospec.forks import Lock

# Seconds to wait for the Hub. huggingface_hub itself would try an unreachable Hub for most of a
# minute, for every file.
TIMEOUT_S = 5.0


def hub_options(name: str | os.PathLike[str], cache_dir: Any = None) -> dict[str, Any]:
    """Return options of ``from_pretrained`` for loading a model: ``local_files_only`` if the Hub
    cannot be reached.

    Args:
        name: a folder, or a repository of the Hub.
        cache_dir: as in ``from_pretrained``.

    Raises:
        InvalidInputError: there is no such folder, or the Hub cannot be reached and the model is
            not in the local cache.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return {}
    if os.path.isfile(name):
        raise InvalidInputError(f"{name} is a file; give the folder that holds it and config.json")
    if name.startswith((".", "~", os.sep)) or os.path.isabs(name):
        raise InvalidInputError(
            f"there is no folder {name}; give one that exists, or a repository as org/name"
        )
    try:
        cached_path = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir)
    except HFValidationError as error:
        raise InvalidInputError(
            f"{name} is neither a folder nor a repository; their names are as org/name"
        ) from error
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable()
    if why is None:
        return {}
    if not isinstance(cached_path, str):
        raise InvalidInputError(
            f"{name} is neither a folder nor a repository that was downloaded before, and {why}; download it while the "
            "Hub can be reached, or give a folder"
        )
    return {"local_files_only": True}


def located(name: str) -> tuple[str, dict[str, Any]]:
    """Return what to pass to ``from_pretrained`` for a model that may be a GGUF file: a folder or
    repository, and options.

    Args:
        name: a folder, a GGUF file, or a repository of the Hub.

    Raises:
        MissingExtraError: the model is a GGUF file, and the package that reads it is not installed.
        InvalidInputError: see :func:`hub_options`.
    """
    if not (name.endswith(".gguf") and os.path.isfile(name)):
        return name, hub_options(name)
    need("gguf", f"reading {name}")
    folder, file = os.path.split(os.path.abspath(name))
    return folder, {"gguf_file": file}


def _unreachable() -> str | None:
    """Return why the Hub does not answer; None if it does."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT_S
        ):
            return None
    except urllib.error.HTTPError:  # the Hub has answered, if with an error
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # huggingface_hub may trust other certificates
            return None
        return f"{constants.ENDPOINT} cannot be reached: {reason}"


def loading_hint(error: Exception, allows_pickle: bool = True) -> str:
    """Return a message for an error of ``from_pretrained`` that says how to solve it here.

    Args:
        error: raised by transformers or huggingface_hub.
        allows_pickle: weights that are not safetensors may be read.
    """
    message = str(error)
    if "trust_remote_code" in message:
        return (
            "its repository has model code of its own, which is run only where you ask for it in Python: load the "
            "model with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True), and give it to hf_slospec"
        )
    if not allows_pickle and "safetensors" in message:
        return f"{message}; weights in other files, which may run code when they are read, need --allow-pickle"
    return message


GGUF_FILE = "_hf_slospec_gguf_file"  # attribute of a model: path of the file it was loaded from
MAX_NAMES = 4  # maximum number of tensor names in an error message
_patching = Lock()


def load_model(
    auto: Any, source: str, allow_missing: bool = False, **options: Any
) -> PreTrainedModel:
    """Load a model by ``auto.from_pretrained``, check that no weight is missing, left over or not
    finite, and switch off gradients.

    Args:
        auto: a model class or auto class of transformers.
        source: a folder or a Hub repository.
        allow_missing: accept a checkpoint that lacks tensors of the model, which stay random, or
            has further ones, which are ignored.
        options: options of ``from_pretrained``.

    Raises:
        UnsupportedModelError: tensors are missing or left over, other than tied tensors and tensors
            that the class declares ignorable, or weights are not finite; the message names them.
    """
    with assistants_can_be_built():
        model, info = auto.from_pretrained(source, output_loading_info=True, **options)
    if not allow_missing:
        refuse_unfinished(
            source,
            type(model).__name__,
            [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])],
            info["unexpected_keys"],
        )
    if names := not_finite(model.named_parameters()):
        raise UnsupportedModelError(
            f"{source} holds NaN or infinite weights, in {listed(names)}; load another copy"
        )
    loaded: PreTrainedModel = model.requires_grad_(False)
    if "gguf_file" in options:  # of which transformers may keep no trace
        setattr(loaded, GGUF_FILE, os.path.join(source, options["gguf_file"]))
    return loaded


def refuse_unfinished(
    source: str, kind: str, missing: Iterable[str], unexpected: Iterable[str]
) -> None:
    """Raise UnsupportedModelError if tensors of a checkpoint are missing or left over.

    Args:
        source: folder or repository of the checkpoint.
        kind: name of the model class.
        missing: names of tensors that the checkpoint lacks.
        unexpected: names of tensors that the model does not have.
    """
    parts = (
        ("it lacks", "which would be random", missing),
        ("it has", "which this class leaves out", unexpected),
    )
    faults = [f"{what} {listed(names)}, {why}" for what, why, names in parts if names]
    if faults:
        raise UnsupportedModelError(
            f"{source} is not a whole {kind}: {'; '.join(faults)}; load a whole checkpoint of this class, or insist "
            "with allow_missing=True (--allow-missing)"
        )


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinite values. Tensors of integers and of
    8-bit floats are not checked.
    """
    return [name for name, tensor in named if not _is_finite(tensor.detach())]


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.is_floating_point() or local.dtype.itemsize < 2 or local.device.type == "meta":
        return True
    # A finite sum proves that all values are finite, without a second tensor of the same size.
    return bool(local.sum(dtype=torch.float32).isfinite() or local.isfinite().all())


def listed(names: Iterable[str]) -> str:
    """Join the first names by commas, and add how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - MAX_NAMES
    return ", ".join(ordered[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def assistants_can_be_built() -> Iterator[None]:
    """Context manager in which transformers 5.23 can build Gemma 4 assistants.

    transformers refuses a config in which all layers take K/V from other layers. An assistant's
    layers do, as they take K/V from the target.
    """
    with _patching, contextlib.ExitStack() as patches:
        for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            patches.enter_context(
                mock.patch.object(config, "kv_sharing_modes", _sharing_modes(config))
            )
        yield


def _sharing_modes(kind: type[PreTrainedConfig]) -> property:
    stock: Any = kind.__dict__["kv_sharing_modes"]

    def modes(config: Any) -> Any:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return stock.fget(config)

    return property(modes)


def check_causal_lm(name: str, model: Any) -> PreTrainedModel:
    """Check that an argument is a causal LM, and return it without its PEFT wrapper.

    Args:
        name: name of the argument, for messages.
        model: the argument.

    Raises:
        InvalidTypeError: the argument is no loaded causal LM of transformers.
        UnsupportedModelError: the model has a PEFT adapter that cannot be speculated.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(
            getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()
        ):
            raise UnsupportedModelError(
                f"{name} has a PEFT adapter that puts virtual tokens before the prompt, which cannot be "
                "speculated; use an adapter of its layers, such as LoRA, or use stock generate (fallback=True)"
            )
        model = model.get_base_model()
    if hasattr(model, "_orig_mod"):
        raise InvalidTypeError(
            f"{name} is a compiled model, whose layers cannot use tree attention; pass the model as it was before "
            "torch.compile"
        )
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidTypeError(
            f"{name} must be a loaded transformers model with a language-modelling head, such as "
            f"AutoModelForCausalLM.from_pretrained(...) returns; got {type(model).__name__}"
        )
    return model


def check_tokenizer(tokenizer: Any, name: str = "tokenizer") -> None:
    """Raise InvalidTypeError unless ``tokenizer`` is None or an object that encodes and decodes."""
    if tokenizer is not None and not (
        callable(tokenizer) and callable(getattr(tokenizer, "decode", None))
    ):
        raise _no_tokenizer(name, tokenizer)


def check_vocabulary_of(name: str, tokenizer: Any) -> None:
    """Raise InvalidTypeError unless ``tokenizer`` is a tokenizer of transformers, whose vocabulary
    can be translated to another tokenizer's.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _no_tokenizer(name, tokenizer)


def _no_tokenizer(name: str, value: Any) -> InvalidTypeError:
    return InvalidTypeError(
        f"{name} must be a loaded tokenizer, such as AutoTokenizer.from_pretrained(...) returns; got "
        f"{type(value).__name__}"
    )
