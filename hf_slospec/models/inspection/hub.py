"""Checks of a model's name before transformers loads it, and messages for the errors of loading."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need

TIMEOUT_S = 5.0  # huggingface_hub tries an unreachable Hub for most of a minute, for every file


def hub_options(name: str | os.PathLike[str], cache_dir: Any = None, revision: str | None = None) -> dict[str, Any]:
    """Return options of ``from_pretrained`` for a model by name: none, or those that use downloaded files only.

    Raises:
        InvalidInputError: there is no such folder, or the Hub cannot be reached and the model was not downloaded.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return {}
    if os.path.isfile(name):
        raise InvalidInputError(f"{name} is a file; give the folder that holds it and config.json")
    if name.startswith((".", "~", os.sep)) or os.path.isabs(name):
        raise InvalidInputError(f"there is no folder {name}; give one that exists, or a repository as org/name")
    try:
        cached_path = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError as error:
        raise InvalidInputError(f"{name} is neither a folder nor a repository; their names are as org/name") from error
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
    """Return the folder or repository of a model, or of its GGUF file, and options of ``from_pretrained``.

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
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError:  # an answer
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # huggingface_hub may have other certificates
            return None
        return f"{constants.ENDPOINT} cannot be reached: {reason}"


def loading_hint(error: Exception, allows_pickle: bool = True) -> str:
    """Return the message of an error of ``from_pretrained``, with a remedy where transformers names another one.

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
