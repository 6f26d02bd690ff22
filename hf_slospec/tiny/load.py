"""Loading of the models of commands: the embedded pair at any size, or models by name."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from hf_slospec.drafters.heads.checkpoint import LOADING_ERRORS
from hf_slospec.errors import InvalidInputError
from hf_slospec.models.device.machine import native_dtypes
from hf_slospec.models.device.threads import available_cores
from hf_slospec.models.inspection.checkpoints import load_model
from hf_slospec.models.inspection.hub import loading_hint, located
from hf_slospec.models.inspection.properties import input_device
from hf_slospec.models.linear.cpu_kernels import works
from hf_slospec.tiny.embedded import load_tiny_pair
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import DRAFT_SHAPES, SHAPES


class Pair(NamedTuple):
    """A target and its draft with their tokenizer."""

    target: PreTrainedModel
    draft: Any  # PreTrainedModel; None if a target was named and no draft
    tokenizer: PreTrainedTokenizerBase


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bf16, or fp32 on CPUs that have neither bf16 instructions nor FBGEMM's kernels for packed weights."""
    is_fast = device.type != "cpu" or native_dtypes()[torch.bfloat16] or works("FBGEMM", torch.bfloat16)
    return torch.bfloat16 if is_fast else torch.float32


def load_pair(
    target: str | None,
    assistant: str | None,
    size: str,
    dtype: str,
    device: str,
    may_unpickle: bool = True,
    images: bool = False,
    allow_missing: bool = False,
    tensor_parallel_size: int = 1,
) -> Pair:
    """Load models from the Hub or from folders, or else the embedded pair with its target inflated to ``size``.

    The target of size 8B has the shape of Llama-3.1-8B, and its draft that of Llama-3.2-1B; other sizes have the
    embedded draft.

    The number of torch's threads is limited to the cores that this process may use. The dtype ``fast`` is that of
    :func:`fast_dtype`, ``auto`` that of the checkpoint. A name may be that of a GGUF file, whose weights are
    dequantized; the tokenizer is that of its folder, if there is one. Without ``may_unpickle``, weights are read from
    safetensors and GGUF files only, as pickled files may run code. A named target has no draft unless an assistant is
    named; with ``images`` it is loaded with its image encoder. ``allow_missing`` is that of
    :func:`~hf_slospec.models.inspection.checkpoints.load_model`. No weight requires a gradient. With
    ``tensor_parallel_size``, this is one of so many processes, which split a named target among their GPUs, or on the
    CPU where there is none, and have the whole draft each.

    Raises:
        InvalidInputError: a model cannot be loaded; the message has the names of the command line.
    """
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    dtype = str(fast_dtype(torch.device(device))).removeprefix("torch.") if dtype == "fast" else dtype
    if target is not None:
        auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
        named: list[tuple[Any, str | None]] = [(auto_class, target), (AutoModelForCausalLM, assistant)]
        options = f"--target {target}" if assistant is None else f"--target {target} --assistant {assistant}"
        try:
            files = {name: located(name) for _, name in named if name is not None}
            source, hub = files[target]
            if "gguf_file" in hub and os.path.isfile(os.path.join(source, "tokenizer_config.json")):
                hub = {}  # with it, transformers reads the tokenizer.json beside the file, but not the chat template
            tokenizer = AutoTokenizer.from_pretrained(source, **hub)
            models: list[Any] = []
            for auto, name in named:
                if name is not None:
                    source, hub = files[name]
                    if not may_unpickle and "gguf_file" not in hub:
                        hub = {"use_safetensors": True, **hub}
                    if tensor_parallel_size > 1 and not models:
                        hub = {"distributed_config": DistributedConfig(tp_size=tensor_parallel_size), **hub}
                    models.append(load_model(auto, source, allow_missing, dtype=dtype, **hub))
            if tensor_parallel_size > 1:
                device = str(input_device(models[0]))
            models = [model.to(device) for model in models]
        except LOADING_ERRORS as error:
            raise InvalidInputError(f"{options}: {loading_hint(error, may_unpickle)}") from error
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return Pair(models[0], None if assistant is None else models[1], tokenizer)
    pair: Any = load_tiny_pair(dtype)
    model, draft = pair[0].to(device), pair[1].to(device)
    if size in DRAFT_SHAPES:
        draft = inflate(draft, DRAFT_SHAPES[size])
    model = model if size == "tiny" else inflate(model, SHAPES[size])
    return Pair(model.requires_grad_(False), draft.requires_grad_(False), pair[2])
