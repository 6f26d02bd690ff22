"""Options that name the models of commands and servers. Imports no torch, as the help texts of
commands are made from the options.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hf_slospec.errors import InputModel, InvalidInputError
from hf_slospec.tiny.shapes import SIZES

ASSISTANT = "assistant"  # name of the pair's draft model among the parts of a drafter
WITHOUT_DRAFT = "lookup"  # drafter if --target is given without --assistant and --drafter
EMBEDDED = "tiny"  # model name of the embedded pair
AUTO = "auto"  # default value of --device

# Allowed values by option
CHOICES = {"size": SIZES, "dtype": ("auto", "fast", "bfloat16", "float16", "float32")}


class ModelOptions(InputModel):
    """Options that name the target, what drafts for it, and how they are loaded.

    Raises:
        InvalidInputError: an option is invalid, or they do not fit together; the message has the
            command-line options.
    """

    target: str | None = Field(
        None, description="A model from the Hub or a folder. Default: the embedded target."
    )
    assistant: str | None = Field(
        None, description="Its draft model. Default, where a target is named: prompt lookup drafts."
    )
    drafter: str | None = Field(
        None,
        description="What drafts in place of such a model: lookup, suffix, mtp, a trained head (EAGLE-3, MTP, DFlash, "
        "DSpark) or a draft model by name or folder (safetensors only), or a sum such as lookup+mtp. For the "
        "embedded target: also eagle3, and assistant, its draft model, as in suffix+assistant.",
    )
    share_texts: bool = Field(
        False,
        description="With suffix: draft from other requests, too, those of the same key and cache_salt. "
        "Response times may then tell users of one key about each other's texts.",
    )
    images: bool = Field(
        False, description="Take images in messages, as data URLs; the target must take them."
    )
    size: str = Field("tiny", description=f"Size of the embedded target: {', '.join(SIZES)}.")
    dtype: str = Field(
        "fast",
        description="bfloat16, float16, float32 (output identical to generate), auto: that of the checkpoint, or fast: "
        "bfloat16 if fast here, else float32.",
    )
    device: str = Field(
        AUTO,
        description="cpu, cuda, cuda:1, ..., or auto: CUDA, or MPS if a trial gives the right tokens, or cpu.",
    )
    allow_missing: bool = Field(
        False,
        description="Load checkpoints that lack tensors, which stay random, or have unknown ones.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Processes, started by torchrun, that hold a part of every layer of the target each.",
    )
    # Load weights of target and assistant that are not safetensors; such files may run code
    allow_pickle: bool = True

    @field_validator(*CHOICES)
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        choices = CHOICES[str(info.field_name)]
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {value!r}")
        return value

    @model_validator(mode="after")
    def _models_fit_together(self) -> ModelOptions:
        if self.assistant is not None and self.drafter is not None:
            raise InvalidInputError(
                "--assistant and --drafter are two ways to draft; name the draft model in --drafter alone: "
                f"--drafter {self.assistant}, or in a sum such as --drafter suffix+{self.assistant}"
            )
        if self.target is None and self.assistant is not None:
            raise InvalidInputError(
                "--assistant drafts for a target of its own; give --target, too"
            )
        if self.target is not None and self.assistant is None and ASSISTANT in self.parts:
            raise InvalidInputError(
                f"--drafter {self.drafter}: {ASSISTANT!r} is the embedded draft; with --target write the draft model's "
                "name or folder in its place"
            )
        if self.tensor_parallel_size > 1 and (
            self.target is None or self.device != AUTO or self.images
        ):
            raise InvalidInputError(
                "--tensor-parallel-size goes with --target, and without --images and --device: each process uses the "
                "GPU of its number, or the CPU where there is none"
            )
        if self.images and self.target is None:
            raise InvalidInputError("--images needs a model that takes images; give --target, too")
        if self.share_texts and "suffix" not in self.parts:
            raise InvalidInputError(
                "--share-texts needs a drafter with memory; give --drafter suffix, too"
            )
        return self

    @property
    def parts(self) -> Sequence[Any]:
        """The drafters that ``--drafter`` joins by ``+``, or the default one."""
        if self.drafter is not None:
            from hf_slospec.drafters.load_drafter import parts_of  # imports torch

            return parts_of(self.drafter)
        return [WITHOUT_DRAFT if self.target is not None and self.assistant is None else ASSISTANT]

    @property
    def drafting(self) -> str:
        """The command-line option that names the drafter, for messages of errors."""
        return (
            f"--assistant {self.assistant}" if self.drafter is None else f"--drafter {self.drafter}"
        )

    @property
    def name(self) -> str:
        """Name of the target; the last part of the path of a folder or GGUF file."""
        if self.target is None:
            return EMBEDDED
        return (
            os.path.basename(os.path.abspath(self.target))
            if os.path.exists(self.target)
            else self.target
        )


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Log only errors of the package inside the context: no warnings about the SLOs of single
    requests.
    """
    logger = logging.getLogger("hf_slospec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def logged_afterwards() -> Iterator[None]:
    """Keep log records of the package inside the context, and write them to standard error at the
    end.
    """
    logger = logging.getLogger("hf_slospec")
    output = logging.StreamHandler()
    output.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    buffer = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, target=output)
    logger.addHandler(buffer)
    try:
        yield
    finally:
        logger.removeHandler(buffer)
        buffer.close()  # writes the records
