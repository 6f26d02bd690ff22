"""Checks of a model's name before transformers loads it, and messages for the errors of loading."""

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

TIMEOUT_S = 5.0  # huggingface_hub tries an unreachable Hub for most of a minute, for every file


def hub_options(name: str | os.PathLike[str], cache_dir: Any = None) -> dict[str, Any]:
    """Return options of ``from_pretrained`` for a model's name: local files only if the Hub cannot
    be reached.

    Raises:
        InvalidInputError: there is no such folder, or the Hub cannot be reached and the model was
            not downloaded.
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
    """Return the folder or repository of a model, or of its GGUF file, and options of
    ``from_pretrained``.

    Raises:
        MissingExtraError: the model is a GGUF file, and the package that reads it is not installed.
        InvalidInputError: as :func:`hub_options`.
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
    except urllib.error.HTTPError:  # an answer
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # huggingface_hub may have other certificates
            return None
        return f"{constants.ENDPOINT} cannot be reached: {reason}"


def loading_hint(error: Exception, allows_pickle: bool = True) -> str:
    """Return the message for an error of ``from_pretrained``, with the remedy that applies here.

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


MAX_NAMES = 4  # names of tensors in an error
_patching = Lock()


def load_model(
    auto: Any, source: str, allow_missing: bool = False, **options: Any
) -> PreTrainedModel:
    """Load a model by ``auto.from_pretrained``, and check that it is complete; no weight requires a
    gradient.

    Args:
        auto: a model class or auto class of transformers.
        source: a folder or a Hub repository.
        allow_missing: accept tensors that the files lack, which stay random, and those that the
            model leaves out.
        options: those of ``from_pretrained``.

    Raises:
        UnsupportedModelError: tensors are missing or left over, other than tied ones and those that
            the class declares ignorable, or weights are not finite; the message names them.
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
    return loaded


def refuse_unfinished(
    source: str, kind: str, missing: Iterable[str], unexpected: Iterable[str]
) -> None:
    """Raise UnsupportedModelError if tensors of a checkpoint are missing or left over."""
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
    """Return the names of the tensors that hold NaN or infinite values; 8-bit ones are not checked."""
    return [name for name, tensor in named if not _is_finite(tensor.detach())]


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.is_floating_point() or local.dtype.itemsize < 2 or local.device.type == "meta":
        return True
    # A sum needs no second tensor.
    return bool(local.sum(dtype=torch.float32).isfinite() or local.isfinite().all())


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - MAX_NAMES
    return ", ".join(ordered[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def assistants_can_be_built() -> Iterator[None]:
    """Let transformers 5.23 build Gemma 4 assistants inside this context.

    It refuses a config whose layers all take K/V from elsewhere, as those of assistants take them
    from the target."""
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
    """Return the model, or the model inside a PEFT model.

    Raises:
        InvalidTypeError: the argument is no loaded transformers causal LM.
        UnsupportedModelError: its adapter cannot be speculated.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(
            getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()
        ):
            raise UnsupportedModelError(
                f"{name} has a PEFT adapter that puts virtual tokens before the prompt, which cannot be "
                "speculated; use an adapter of its layers, such as LoRA, or call generate without slo_tpot"
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
    """Raise InvalidTypeError unless the argument is None, or an object that encodes and decodes."""
    if tokenizer is not None and not (
        callable(tokenizer) and callable(getattr(tokenizer, "decode", None))
    ):
        raise _no_tokenizer(name, tokenizer)


def check_vocabulary_of(name: str, tokenizer: Any) -> None:
    """Raise InvalidTypeError unless the argument is a tokenizer of transformers, whose tokens can
    be translated.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _no_tokenizer(name, tokenizer)


def _no_tokenizer(name: str, value: Any) -> InvalidTypeError:
    return InvalidTypeError(
        f"{name} must be a loaded tokenizer, such as AutoTokenizer.from_pretrained(...) returns; got "
        f"{type(value).__name__}"
    )
