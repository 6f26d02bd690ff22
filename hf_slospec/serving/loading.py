"""Models of a command: the target, its drafter and a generator with both, by the options of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jinja2
from transformers import AutoProcessor, LlamaForCausalLM, PreTrainedModel

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.load_drafter import check_source, load_drafter, parts_of
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError, MissingExtraError, SLOSpecError
from hf_slospec.models.inspection.properties import input_device
from hf_slospec.serving.devices import AUTO, chosen_device, device_name
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.tiny.embedded import HEADS, load_tiny_drafter
from hf_slospec.tiny.load import Pair, load_pair

ASSISTANT = "assistant"  # name of the pair's draft in --drafter
WITHOUT_DRAFT = "lookup"  # default drafter with --target
EMBEDDED = "tiny"  # model name of the embedded pair


@dataclass(frozen=True)
class ModelOptions:
    """Options of the models of a command.

    Raises:
        InvalidInputError: they do not fit together; the message has the names of the command line.
    """

    target: str | None = None  # None: the embedded pair
    assistant: str | None = None
    drafter: str | None = None  # source for load_drafter; None: the draft of the pair, or without one prompt lookup
    size: str = "tiny"  # size of the embedded target
    dtype: str = "fast"
    device: str = AUTO
    allow_pickle: bool = True  # load weights that are not safetensors, which may run code; never a drafter's
    share_texts: bool = False  # suffix trees hold the outputs of other requests with the same cache_salt, too
    images: bool = False  # load the target with its image encoder and processor
    allow_missing: bool = False  # load checkpoints whose tensors are not those of their class

    def __post_init__(self) -> None:
        if self.assistant is not None and self.drafter is not None:
            raise InvalidInputError(
                "--assistant and --drafter are two ways to draft; name the draft model in --drafter alone: "
                f"--drafter {self.assistant}, or in a sum such as --drafter suffix+{self.assistant}"
            )
        if self.target is None and self.assistant is not None:
            raise InvalidInputError("--assistant drafts for a target of its own; give --target, too")
        if self.target is not None and self.assistant is None and ASSISTANT in self.parts:
            raise InvalidInputError(
                f"--drafter {self.drafter}: {ASSISTANT!r} is the embedded draft; with --target write the draft model's "
                "name or folder in its place"
            )
        if self.images and self.target is None:
            raise InvalidInputError("--images needs a model that takes images; give --target, too")
        if self.share_texts and "suffix" not in self.parts:
            raise InvalidInputError("--share-texts has no effect without suffix trees; give --drafter suffix, too")

    @property
    def parts(self) -> Sequence[Any]:
        """The parts of the drafter."""
        if self.drafter is not None:
            return parts_of(self.drafter)
        return [WITHOUT_DRAFT if self.target is not None and self.assistant is None else ASSISTANT]

    @property
    def name(self) -> str:
        """Name of the target; the last part of a folder's path."""
        return EMBEDDED if self.target is None else named(self.target)

    def load(self) -> Pair:
        """Return the models and the tokenizer; raises InvalidInputError if they or the drafter cannot be found."""
        try:
            self.check_drafter()
        except SLOSpecError as error:
            raise InvalidInputError(f"{self._drafting}: {error}") from error
        device = str(chosen_device(self.device))
        return load_pair(
            self.target, self.assistant, self.size, self.dtype, device, self.allow_pickle, self.images,
            self.allow_missing,
        )  # fmt: skip

    def method(self, pair: Pair) -> DraftMethod:
        """Return the draft method for the target of the pair; raises InvalidInputError if it cannot be loaded."""
        embedded: dict[str, Callable[[], Any]] = {ASSISTANT: lambda: pair.draft}
        if self.target is None:
            embedded |= {kind: partial(load_tiny_drafter, kind, cast(LlamaForCausalLM, pair.target)) for kind in HEADS}
        try:
            sources = [embedded[part]() if part in embedded else part for part in self.parts]
            return load_drafter(
                sources, pair.target, tokenizer=pair.tokenizer, share_texts=self.share_texts,
                allow_missing=self.allow_missing,
            )  # fmt: skip
        except MissingExtraError:
            raise
        except SLOSpecError as error:
            raise InvalidInputError(f"{self._drafting}: {error}") from error
        except ImportError as error:
            raise InvalidInputError(f"{self._drafting} needs a package, which must be installed: {error}") from error

    @property
    def _drafting(self) -> str:
        return f"--assistant {self.assistant}" if self.drafter is None else f"--drafter {self.drafter}"

    def check_drafter(self) -> None:
        """Raise SLOSpecError unless the drafter's parts fit together and their files can be found; read no tensor."""
        check_source(self.parts, (ASSISTANT, *(HEADS if self.target is None else ())))

    def generator(self, config: SLOSpecConfig, chat_template: str | None = None) -> SLOSpecGenerator:
        """Return a generator with the models; ``chat_template`` replaces that of the tokenizer, if given."""
        pair = self.load()
        processor = AutoProcessor.from_pretrained(self.target) if self.images else None
        if chat_template is not None:
            pair.tokenizer.chat_template = chat_template
            if processor is not None:
                processor.chat_template = chat_template
        _check_chat_template(self.target, pair.tokenizer if processor is None else processor, processor is not None)
        return SLOSpecGenerator(
            pair.target, None, pair.tokenizer, config, drafter=self.method(pair), processor=processor
        )


def named(target: str) -> str:
    """Return the name of a model's folder, or its repository."""
    return os.path.basename(os.path.abspath(target)) if os.path.isdir(target) else target


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
        if type(error) is jinja2.TemplateError:  # raised by raise_exception in a template, so it works
            return
        raise InvalidInputError(
            f"the chat template of {target or 'the embedded target'} is broken: {error}; give a working one in a file "
            "with --chat-template"
        ) from error
