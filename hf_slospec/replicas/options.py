"""Options of a replicated server: of its models, its HTTP front, and its replicas."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from transformers.utils.chat_parsing.response_templates import load_response_template

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError
from hf_slospec.serving.devices import AUTO
from hf_slospec.serving.loading import ModelOptions
from hf_slospec.serving.openai.access import AccessOptions, ServerSettings
from hf_slospec.serving.openai.orders import SLOLimits
from hf_slospec.tiny.load import DTYPES
from hf_slospec.tiny.shapes import SIZES

MODEL_OPTIONS = [field.name for field in fields(ModelOptions) if field.name != "images"]  # replicas take no images


class ReplicaOptions(AccessOptions):
    """Options of :func:`~hf_slospec.replicas.app`; those of the models are those of ``hf_slospec serve``."""

    model_config = ConfigDict(allow_inf_nan=False)

    target: str | None = Field(None, description="A model from the Hub or a folder. None: the embedded target.")
    assistant: str | None = Field(None, description="Its draft model; without one, and without drafter: prompt lookup.")
    drafter: str | None = Field(None, description="What drafts, in place of a draft model; see load_drafter.")
    share_texts: bool = Field(False, description="Suffix trees hold outputs of other requests of the same key.")
    size: str = Field("tiny", description="Of the embedded target: tiny, 0.1B, ...")
    dtype: str = "fast"
    device: str = Field(AUTO, description="auto: CUDA where the replica has a GPU, see gpus, else the CPU.")
    allow_pickle: bool = Field(False, description="Load weights that are not safetensors; such files may run code.")
    allow_missing: bool = Field(
        False, description="Load checkpoints that lack tensors or have others than their class."
    )
    chat_template: str | None = Field(None, description="A chat template (Jinja) in place of the tokenizer's.")
    response_template: dict[str, Any] | None = None
    config: SLOSpecConfig = SLOSpecConfig()

    model_name: str | None = Field(None, description="Name that clients ask for. Default: target.")

    replicas: int = Field(1, ge=1, description="Replicas at the start, and without autoscaling always.")
    max_replicas: int | None = Field(None, ge=1, description="Scale between min_replicas and this many. None: do not.")
    min_replicas: int = Field(1, ge=1)
    fronts: int = Field(1, ge=1, description="Processes that take HTTP requests and tokenize.")
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for a replica; may be a fraction.")
    gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for a replica; 1 with device cuda.")
    threads: int | None = Field(None, ge=1, description="Torch's threads in a replica. None: as torch decides.")
    hang_s: float = Field(300.0, gt=0, description="A replica is replaced when one of its steps takes longer.")
    drain_s: float = Field(600.0, gt=0, description="Seconds that requests of a replica that is to end have to finish.")
    upscale_delay_s: float = Field(10.0, ge=0, description="Seconds of missed SLOs before replicas are added.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Seconds of little load before a replica is removed.")

    @field_validator("dtype", "size")
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        known = DTYPES if info.field_name == "dtype" else SIZES
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return value

    @field_validator("cpus", "gpus")
    @classmethod
    def _is_allocatable(cls, number: float) -> float:
        if number > 1 and number != int(number):
            raise ValueError(f"Ray reserves whole numbers above 1; give {math.ceil(number)}")
        return number

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        try:
            if device != AUTO:
                torch.device(device)  # checks the syntax only; this machine may lack the device
        except RuntimeError as error:
            raise ValueError(str(error).partition("\n")[0]) from error
        return device

    @field_validator("response_template")
    @classmethod
    def _is_response_template(cls, template: dict[str, Any] | None) -> dict[str, Any] | None:
        if template is not None:
            load_response_template(template)  # raises ValueError
        return template

    @field_validator("api_keys")
    @classmethod
    def _have_keys(cls, keys: dict[str, SLOLimits]) -> dict[str, SLOLimits]:
        if "" in keys:
            raise ValueError("a key is empty; leave it out, or give one")
        return keys

    @model_validator(mode="after")
    def _fit_together(self) -> ReplicaOptions:
        _ = self.models  # raises InvalidInputError, a ValueError, if they do not fit together
        if self.max_replicas is None and self.min_replicas != 1:
            raise ValueError("min_replicas has no effect without max_replicas; give both, or replicas alone")
        if self.max_replicas is not None and not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas must be within min_replicas..max_replicas, got {self.replicas} and "
                f"{self.min_replicas}..{self.max_replicas}"
            )
        return self

    @property
    def models(self) -> ModelOptions:
        """Return the options of the models in each replica."""
        return ModelOptions(**{name: getattr(self, name) for name in MODEL_OPTIONS})

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model_name or self.models.name

    @property
    def settings(self) -> ServerSettings:
        """Return the settings of the HTTP application."""
        access = {name: getattr(self, name) for name in AccessOptions.model_fields}
        return ServerSettings(model_name=self.name, **access)

    @classmethod
    def of(cls, options: ReplicaOptions | dict[str, Any]) -> ReplicaOptions:
        """Return options, made of a dict if need be; raises InvalidInputError."""
        if isinstance(options, ReplicaOptions):
            return options
        if not isinstance(options, dict):
            raise InvalidInputError(f"options must be ReplicaOptions or a dict, got {type(options).__name__}")
        return cls(**options)
