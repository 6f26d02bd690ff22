"""The pair a command works on: the embedded one at any size, or models by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.errors import InvalidInputError
from hf_slospec.models.cpu.threads import available_cores
from hf_slospec.tiny.embedded import load_tiny_pair
from hf_slospec.tiny.inflate import SHAPES, inflate

DTYPES = ("bfloat16", "float16", "float32")
SIZES = ("tiny", *SHAPES)


class Pair(NamedTuple):
    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_pair(target: str | None, assistant: str | None, size: str, dtype: str, device: str) -> Pair:
    """Models from the Hub or folders, or with neither named the embedded pair, its target inflated to ``size``.

    Torch's threads become no more than there are cores for this process.

    Raises:
        InvalidInputError: what is asked for makes no sense, in the words of the command line.
    """
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    if (target is None) != (assistant is None):
        raise InvalidInputError("--target and --assistant go together")
    if dtype not in DTYPES:
        raise InvalidInputError("--dtype must be bfloat16, float16 or float32")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise InvalidInputError(f"--device {device}: {error}") from error
    if target is not None and assistant is not None:
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            tokenizer = AutoTokenizer.from_pretrained(target)
            models = load(target, dtype=dtype), load(assistant, dtype=dtype)
        except OSError as error:  # no such model, or no way to the Hub
            raise InvalidInputError(f"--target {target} --assistant {assistant}: {error}") from error
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return Pair(models[0].to(device), models[1].to(device), tokenizer)
    if size not in SIZES:
        raise InvalidInputError(f"--size must be tiny or one of {', '.join(SHAPES)}")
    model, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    model, draft = model.to(device), draft.to(device)
    return Pair(model if size == "tiny" else inflate(model, SHAPES[size]), draft, tokenizer)
