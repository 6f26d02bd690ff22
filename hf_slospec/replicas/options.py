"""Options of a server with replicas: a server's options, and number and routing of replicas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, field_validator, model_validator

from hf_slospec.errors import InvalidInputError
from hf_slospec.server.model_options import AUTO
from hf_slospec.server.options import ServerOptions

HEAD = "node:__internal_head__"  # a resource that Ray defines on a cluster's head node
OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)\b")  # a command-line option in an error message


class ReplicaOptions(ServerOptions):
    """Options of :func:`~hf_slospec.replicas.app`: the model and server options of
    ``hf_slospec serve``, and options of replicas.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    replicas: int = Field(
        1, ge=1, description="Replicas at the start, and without autoscaling always."
    )
    max_replicas: int | None = Field(
        None, ge=1, description="Scale between min_replicas and this many. None: do not."
    )
    min_replicas: int = Field(1, ge=1)
    fronts: int = Field(1, ge=1, description="Processes that take HTTP requests and tokenize.")
    front_resource: str = Field(
        HEAD, min_length=1, description="Ray's resource of the machines where fronts run."
    )
    routing: Literal["guarantees", "sequential"] = Field(
        "guarantees",
        description="Order in which replicas are asked for a guarantee: by load, or in turn (SLOs-Serve).",
    )
    max_hops: int | None = Field(
        None,
        ge=0,
        description="How often a request that a replica declined moves on. None: to all of them.",
    )
    backup: Literal["best_effort", "decline"] = Field(
        "best_effort",
        description="What happens to requests that no replica guaranteed: best effort, or status 429.",
    )
    silent_s: float = Field(
        5.0, ge=1, description="Requests go elsewhere when a replica has sent nothing for so long."
    )
    cpus: float = Field(
        1.0, ge=0, description="CPUs that Ray reserves for a replica; may be a fraction."
    )
    gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray reserves for a replica; 1 with device cuda."
    )
    threads: int | None = Field(
        None, ge=1, description="Torch's threads in a replica. None: as torch decides."
    )
    hang_s: float = Field(
        300.0, gt=0, description="A replica is replaced when one of its steps takes longer."
    )
    drain_s: float = Field(
        600.0, gt=0, description="Seconds that requests of a replica that is to end have to finish."
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="Seconds of missed SLOs before replicas are added."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="Seconds of little load before a replica is removed."
    )

    def __init__(self, **fields: Any) -> None:
        with names_of_fields():
            super().__init__(**fields)

    @field_validator("images")
    @classmethod
    def _takes_no_images(cls, images: bool) -> bool:
        if images:
            raise ValueError("replicas take no images; leave it out")
        return images

    @field_validator("tensor_parallel_size")
    @classmethod
    def _is_one_process(cls, number: int) -> int:
        if number > 1:
            raise ValueError(
                "a replica is one process; leave it out, or run one server per group of GPUs without replicas, each "
                f"started by torchrun with {number} processes, behind a load balancer (docs/gpus.md)"
            )
        return number

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

    @model_validator(mode="after")
    def _fit_together(self) -> ReplicaOptions:
        if self.max_replicas is None and self.min_replicas != 1:
            raise ValueError(
                "min_replicas has no effect without max_replicas; give both, or replicas alone"
            )
        if (
            self.max_replicas is not None
            and not self.min_replicas <= self.replicas <= self.max_replicas
        ):
            raise ValueError(
                f"replicas must be within min_replicas..max_replicas, got {self.replicas} and "
                f"{self.min_replicas}..{self.max_replicas}"
            )
        return self

    @classmethod
    def of(cls, options: ReplicaOptions | dict[str, Any]) -> ReplicaOptions:
        """Return ``options``; if it is a dict of fields, validate and convert it.

        Raises:
            InvalidInputError: an option is invalid, or the argument has another type.
        """
        if isinstance(options, ReplicaOptions):
            return options
        if not isinstance(options, dict):
            raise InvalidInputError(
                f"options must be ReplicaOptions or a dict, got {type(options).__name__}"
            )
        return cls(**options)


@contextmanager
def names_of_fields() -> Iterator[None]:
    """Replace command-line options by field names in messages of InvalidInputError:
    ``--share-texts`` becomes ``share_texts``.
    """
    try:
        yield
    except InvalidInputError as error:
        message = OPTION.sub(lambda option: option[1].replace("-", "_"), str(error))
        raise InvalidInputError(message) from error.__cause__
