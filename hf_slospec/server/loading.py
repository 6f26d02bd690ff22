"""Loads what options name: the target and its drafter, and a generator with both. The loading of
single checkpoints is in ``model/loading.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jinja2
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu.kernels import works
from hf_slospec.drafters.checkpoint import LOADING_ERRORS
from hf_slospec.drafters.load_drafter import check_source, load_drafter
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError, MissingExtraError, SLOSpecError
from hf_slospec.model.loading import load_model, loading_hint, located
from hf_slospec.model.machine import available_cores, native_dtypes
from hf_slospec.model.machine import size_and_place as size_and_place
from hf_slospec.model.properties import input_device
from hf_slospec.server.model_options import ASSISTANT, AUTO, ModelOptions
from hf_slospec.tiny.embedded import HEADS, load_tiny_drafter, load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import DRAFT_SHAPES, SHAPES

logger = logging.getLogger(__name__)

# Arguments of generate for the trial decoding on a GPU
TRIAL: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8}


def chosen_device(name: str) -> torch.device:
    """Return the device that ``--device`` names; auto: CUDA, else MPS if it passes a trial
    (:func:`decodes_as_stock`), else the CPU.

    Raises:
        InvalidInputError: torch has no such device here.
    """
    if name == AUTO:
        return _best_device()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch without CUDA, or without that device's module
        raise InvalidInputError(
            f"--device {name}: {error}; choose another device, or auto"
        ) from error
    if torch.device(name).type == "meta":
        raise InvalidInputError("--device meta: its tensors have no data; choose another device")
    return torch.device(name)


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        device = torch.device("mps")
        if decodes_as_stock(device):
            return device
        logger.warning(
            "the GPU (mps) is not used: a trial on it failed, or gave other tokens than generate"
        )
    return torch.device("cpu")


def decodes_as_stock(device: torch.device) -> bool:
    """Return whether the embedded pair decodes the same tokens on a device with speculation as with
    stock ``generate``.
    """
    target, draft, tokenizer = load_tiny_pair()
    config = SLOSpecConfig(policy="fixed", max_depth=2, max_width=2)
    try:
        model = target.to(device)  # type: ignore[arg-type]  # decorated method
        generator = SLOSpecGenerator(model, draft.to(device), config=config)  # type: ignore[arg-type]
        inputs = tokenizer(tiny_prompts()[0], return_tensors="pt").to(device)
        for do_sample in (False, True):
            outputs = []
            for generate in (model.generate, generator.generate):
                torch.manual_seed(0)
                outputs.append(generate(inputs["input_ids"], do_sample=do_sample, **TRIAL))
            if not torch.equal(*outputs):
                return False
    except (SLOSpecError, RuntimeError, TypeError) as error:
        # operations or dtypes that the device lacks
        logger.info("a trial on %s failed: %s", device, error)
        return False
    return True


class Pair(NamedTuple):
    """Target model, draft model and tokenizer."""

    target: PreTrainedModel
    draft: Any  # PreTrainedModel; None if the options name only a target
    tokenizer: PreTrainedTokenizerBase


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bf16, or fp32 on CPUs that have neither bf16 instructions nor FBGEMM's kernels for
    packed weights.
    """
    is_fast = (
        device.type != "cpu" or native_dtypes()[torch.bfloat16] or works("FBGEMM", torch.bfloat16)
    )
    return torch.bfloat16 if is_fast else torch.float32


def load_pair(
    target: str | None, assistant: str | None, size: str, dtype: str, device: str
) -> Pair:
    """Return the models that these options of ModelOptions name; see :func:`load_models`."""
    return load_models(
        ModelOptions(target=target, assistant=assistant, size=size, dtype=dtype, device=device)
    )


def load_models(options: ModelOptions) -> Pair:
    """Load models from the Hub or from folders, or else the embedded pair with its target inflated
    to ``size``.

    The embedded pair: size 8B has the shape of Llama-3.1-8B, and its draft model, if it drafts, the
    shape of Llama-3.2-1B; targets of all other sizes have the embedded draft model.

    Named models: a name may also be a GGUF file, whose weights are dequantized, with the tokenizer
    of its folder if there is one. Without ``allow_pickle``, weights are read only from safetensors
    and GGUF files, as pickled files may run code. With ``tensor_parallel_size`` N, this is one of N
    processes, which split the target among their GPUs (or use the CPU where there is none); each
    process has the whole draft model.

    The dtype ``fast`` means :func:`fast_dtype`, and ``auto`` the dtype of the checkpoint. No weight
    requires a gradient. As a side effect, torch's threads are limited to the cores that this
    process may use.

    Raises:
        InvalidInputError: a model or the drafter cannot be found or loaded, or the number of
            processes is not ``tensor_parallel_size``; the message has the command-line options.
        MissingExtraError: the drafter needs an extra that is not installed.
    """
    num_parts = options.tensor_parallel_size
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if num_parts > 1 and num_parts != world_size:
        raise InvalidInputError(
            f"--tensor-parallel-size {num_parts} needs as many processes, and the number of them here is {world_size}; "
            f"start them by torchrun --nproc-per-node {num_parts} -m hf_slospec ..."
        )
    try:
        check_drafter(options)
    except MissingExtraError:
        raise
    except SLOSpecError as error:
        raise InvalidInputError(f"{options.drafting}: {error}") from error
    device = chosen_device(options.device)
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    dtype = options.dtype
    if dtype == "fast":
        dtype = str(fast_dtype(device)).removeprefix("torch.")
    if options.target is not None:
        return _load_named(options, options.target, dtype, device)
    pair: Any = load_tiny_pair(dtype)
    model = pair[0].to(device)
    draft = pair[1].to(device)
    if options.size in DRAFT_SHAPES and ASSISTANT in options.parts:
        draft = inflate(draft, DRAFT_SHAPES[options.size])
    if options.size != "tiny":
        model = inflate(model, SHAPES[options.size])
    return Pair(model.requires_grad_(False), draft.requires_grad_(False), pair[2])


def _load_named(options: ModelOptions, target: str, dtype: str, device: torch.device) -> Pair:
    num_parts = options.tensor_parallel_size
    names = [target] if options.assistant is None else [target, options.assistant]

    def load(auto_class: Any, name: str, **further: Any) -> Any:
        source, hub = files[name]
        if not options.allow_pickle and "gguf_file" not in hub:
            further["use_safetensors"] = True
        return load_model(auto_class, source, options.allow_missing, dtype=dtype, **further, **hub)

    try:
        files = {name: located(name) for name in names}
        source, hub = files[target]
        if "gguf_file" in hub and os.path.isfile(os.path.join(source, "tokenizer_config.json")):
            # With gguf_file, transformers would read the tokenizer.json beside the file, but not
            # the chat template
            hub = {}
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        auto_class = AutoModelForImageTextToText if options.images else AutoModelForCausalLM
        if num_parts > 1:
            split = DistributedConfig(tp_size=num_parts)
            model = load(auto_class, target, distributed_config=split)
            device = input_device(model)
        else:
            model = load(auto_class, target).to(device)
        draft = None
        if options.assistant is not None:
            draft = load(AutoModelForCausalLM, options.assistant).to(device)
    except LOADING_ERRORS as error:
        named = " --assistant ".join(names)
        raise InvalidInputError(
            f"--target {named}: {loading_hint(error, options.allow_pickle)}"
        ) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return Pair(model, draft, tokenizer)


def check_drafter(options: ModelOptions) -> None:
    """Raise SLOSpecError if the drafter's parts do not fit together, or their files cannot be
    found. No tensors are read.
    """
    check_source(options.parts, (ASSISTANT, *(HEADS if options.target is None else ())))


def draft_method(options: ModelOptions, pair: Pair) -> DraftMethod:
    """Return the draft method that the options name for the pair's target; raises InvalidInputError
    if it cannot be loaded.
    """
    embedded: dict[str, Callable[[], Any]] = {ASSISTANT: lambda: pair.draft}
    if options.target is None:
        embedded |= {
            kind: partial(load_tiny_drafter, kind, cast(LlamaForCausalLM, pair.target))
            for kind in HEADS
        }
    try:
        sources = [embedded[part]() if part in embedded else part for part in options.parts]
        return load_drafter(
            sources, pair.target, tokenizer=pair.tokenizer, share_texts=options.share_texts,
            allow_missing=options.allow_missing,
        )  # fmt: skip
    except MissingExtraError:
        raise
    except SLOSpecError as error:
        raise InvalidInputError(f"{options.drafting}: {error}") from error
    except ImportError as error:
        raise InvalidInputError(
            f"{options.drafting} needs a package, which must be installed: {error}"
        ) from error


def load_generator(
    options: ModelOptions, config: SLOSpecConfig, chat_template: str | None = None
) -> SLOSpecGenerator:
    """Return a generator with the models that the options name; ``chat_template``, if given,
    replaces the tokenizer's.
    """
    pair = load_models(options)
    processor = AutoProcessor.from_pretrained(options.target) if options.images else None
    if chat_template is not None:
        pair.tokenizer.chat_template = chat_template
        if processor is not None:
            processor.chat_template = chat_template
    _check_chat_template(
        options.target, pair.tokenizer if processor is None else processor, processor is not None
    )
    method = draft_method(options, pair)
    return SLOSpecGenerator(
        pair.target, None, pair.tokenizer, config, drafter=method, processor=processor
    )


def _check_chat_template(target: str | None, renderer: Any, takes_parts: bool) -> None:
    """Raise InvalidInputError if a chat template cannot render a conversation of one message.

    Args:
        renderer: the tokenizer or processor.
        takes_parts: message contents are lists of parts, as for processors.
    """
    if getattr(renderer, "chat_template", None) is None:
        return
    content = [{"type": "text", "text": "Hello"}] if takes_parts else "Hello"
    try:
        renderer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        if type(error) is jinja2.TemplateError:
            # raised by raise_exception() in the template, so the template works
            return
        raise InvalidInputError(
            f"the chat template of {target or 'the embedded target'} is broken: {error}; give a working one in a file "
            "with --chat-template"
        ) from error
