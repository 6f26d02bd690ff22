"""Loading of the models that options name: the target, its drafter, and a generator with both."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jinja2
from transformers import AutoProcessor, LlamaForCausalLM, PreTrainedModel

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.load_drafter import check_source, load_drafter
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError, MissingExtraError, SLOSpecError
from hf_slospec.models.inspection.properties import input_device
from hf_slospec.serving.devices import chosen_device, device_name
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.options import ASSISTANT, ModelOptions
from hf_slospec.tiny.embedded import HEADS, load_tiny_drafter
from hf_slospec.tiny.load import Pair, load_pair


def load_models(options: ModelOptions) -> Pair:
    """Return the models and the tokenizer.

    Raises:
        InvalidInputError: they or the drafter cannot be found, or there are other processes than the options say.
    """
    size, world_size = options.tensor_parallel_size, int(os.environ.get("WORLD_SIZE", 1))
    if size > 1 and size != world_size:
        raise InvalidInputError(
            f"--tensor-parallel-size {size} needs as many processes, and the number of them here is {world_size}; "
            f"start them by torchrun --nproc-per-node {size} -m hf_slospec ..."
        )
    try:
        check_drafter(options)
    except SLOSpecError as error:
        raise InvalidInputError(f"{options.drafting}: {error}") from error
    device = str(chosen_device(options.device))
    return load_pair(
        options.target, options.assistant, options.size, options.dtype, device, options.allow_pickle, options.images,
        options.allow_missing, size,
    )  # fmt: skip


def check_drafter(options: ModelOptions) -> None:
    """Raise SLOSpecError unless the drafter's parts fit together and their files can be found; read no tensor."""
    check_source(options.parts, (ASSISTANT, *(HEADS if options.target is None else ())))


def draft_method(options: ModelOptions, pair: Pair) -> DraftMethod:
    """Return the draft method for the target of the pair; raises InvalidInputError if it cannot be loaded."""
    embedded: dict[str, Callable[[], Any]] = {ASSISTANT: lambda: pair.draft}
    if options.target is None:
        embedded |= {kind: partial(load_tiny_drafter, kind, cast(LlamaForCausalLM, pair.target)) for kind in HEADS}
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
        raise InvalidInputError(f"{options.drafting} needs a package, which must be installed: {error}") from error


def load_generator(options: ModelOptions, config: SLOSpecConfig, chat_template: str | None = None) -> SLOSpecGenerator:
    """Return a generator with the models; ``chat_template`` replaces that of the tokenizer, if given."""
    pair = load_models(options)
    processor = AutoProcessor.from_pretrained(options.target) if options.images else None
    if chat_template is not None:
        pair.tokenizer.chat_template = chat_template
        if processor is not None:
            processor.chat_template = chat_template
    _check_chat_template(options.target, pair.tokenizer if processor is None else processor, processor is not None)
    method = draft_method(options, pair)
    return SLOSpecGenerator(pair.target, None, pair.tokenizer, config, drafter=method, processor=processor)


def size_and_place(model: PreTrainedModel) -> str:
    """Return the size, dtype and device of a model, for commands to print."""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{model.num_parameters() / 1e6:.0f} M parameters, {dtype}, on {device_name(input_device(model))}"


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
        renderer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        if type(error) is jinja2.TemplateError:  # raised by the template's own raise_exception, so the template works
            return
        raise InvalidInputError(
            f"the chat template of {target or 'the embedded target'} is broken: {error}; give a working one in a file "
            "with --chat-template"
        ) from error
