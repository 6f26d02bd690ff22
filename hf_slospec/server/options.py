"""Options of a server, whether it decodes in this process or in replicas. Imports no torch, as the
help text of ``serve`` is made from the options.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InputModel, InvalidInputError
from hf_slospec.request.metrics import METRICS_PREFIX
from hf_slospec.request.slo import LEAST_SLO_S
from hf_slospec.server.limits import RequestLimits
from hf_slospec.server.model_options import ModelOptions


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address, which only this machine reaches."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


class SLOLimits(InputModel):
    """Default and strictest allowed SLOs of requests, in seconds, and the lowest allowed number of
    their priority; None: no default or no limit.
    """

    default_tpot: float | None = Field(
        None, gt=0, description="SLO of requests without one, in seconds."
    )
    strictest_tpot: float | None = Field(
        None, gt=0, description="Stricter SLOs are refused, in seconds per token."
    )
    default_ttft: float | None = Field(None, gt=0)
    strictest_ttft: float | None = Field(None, gt=0)
    default_e2e: float | None = Field(None, gt=0)
    strictest_e2e: float | None = Field(None, gt=0)
    lowest_priority: int | None = Field(
        None,
        le=0,
        description="Lower numbers, which are served earlier, are refused. Default: none.",
    )

    def apply(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Return the requested SLOs, with the defaults for those that are None; raises
        InvalidInputError if one is stricter than allowed.
        """
        slos = dict[str, Any]()
        stages = requested["slo_tpot"] if isinstance(requested["slo_tpot"], list) else []
        for name in ("tpot", "ttft", "e2e"):
            value = requested[f"slo_{name}"]
            strictest = getattr(self, f"strictest_{name}")
            for asked in [getattr(each, f"slo_{name}", None) for each in stages] + [value]:
                if strictest is not None and isinstance(asked, (int, float)) and asked < strictest:
                    raise InvalidInputError(
                        f"slo_{name} must be at least {strictest:g} s here, got {asked:g}"
                    )
            slos[f"slo_{name}"] = getattr(self, f"default_{name}") if value is None else value
        return slos

    def check_priority(self, priority: int) -> None:
        """Raise InvalidInputError if a priority is lower, so that it is served earlier, than allowed."""
        if self.lowest_priority is not None and priority < self.lowest_priority:
            raise InvalidInputError(
                f"priority must be at least {self.lowest_priority} here, got {priority}"
            )


class Objective(InputModel):
    """Values for the fields that a request leaves out, if its header names this objective."""

    slo_tpot: float | None = Field(None, ge=LEAST_SLO_S, allow_inf_nan=False)
    slo_ttft: float | None = Field(None, ge=LEAST_SLO_S, allow_inf_nan=False)
    slo_e2e: float | None = Field(None, ge=LEAST_SLO_S, allow_inf_nan=False)
    priority: int = 0
    best_effort: bool = False


class AccessOptions(InputModel):
    """Options of the HTTP application: API keys, limits, access by web pages, and objectives."""

    api_keys: dict[str, SLOLimits] = Field(
        default_factory=dict, description="Limits by API key; empty: no key is required."
    )
    limits: SLOLimits = Field(SLOLimits(), description="Limits where there are no keys.")
    allowed_origins: tuple[str, ...] = Field(
        (), description="Origin of web pages that may call the server (CORS); repeatable."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Name by which clients without a key may call, beside localhost and addresses; repeatable.",
    )
    share_prefixes: bool = Field(
        False,
        description="Share K/V and texts between keys; clients can then find out others' texts.",
    )
    special_tokens: Literal["allow", "refuse", "escape"] = Field(
        "allow",
        description="Control tokens written in chats: allow, refuse, or escape as plain text.",
    )
    tokenizer_info: bool = Field(
        False, description="Serve /tokenizer_info, which shows the chat template."
    )
    bounds: RequestLimits = Field(
        RequestLimits(),
        description='Limits of a single request, as JSON: {"prompts": 8, "stop_strings": 4}.',
    )
    metrics_prefix: str = Field(
        METRICS_PREFIX,
        pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$",
        description="Prefix of the names at /metrics; tools for vLLM look for vllm:.",
    )

    objectives: dict[str, Objective] = Field(
        default_factory=dict,
        description="What requests get by the name in their header x-gateway-inference-objective, as JSON: "
        '{"interactive": {"slo_tpot": 0.05, "priority": -1}, "batch": {"best_effort": true}}.',
    )
    trust_gateway: bool = Field(
        False,
        description="Clients take turns by x-gateway-inference-fairness-id, too, which a gateway in front must set.",
    )

    @field_validator("api_keys")
    @classmethod
    def _have_keys(cls, keys: dict[str, SLOLimits]) -> dict[str, SLOLimits]:
        if "" in keys:
            raise ValueError("a key is empty; leave it out, or give one")
        return keys


class ServerOptions(AccessOptions, ModelOptions):
    """Options that servers with and without replicas have in common."""

    allow_pickle: bool = Field(
        False, description="Load weights that are not safetensors; such files may run code."
    )
    model_name: str | None = Field(None, description="Default: the name of the target.")
    chat_template: str | None = Field(
        None,
        description="A chat template (Jinja) in place of the tokenizer's; for the command, a file.",
    )
    response_template: dict[str, Any] | None = Field(
        None,
        description="JSON that tells reasoning and tool calls from content; for the command, a file. Default: the "
        "model's own.",
    )
    config: SLOSpecConfig = SLOSpecConfig()

    @field_validator("response_template")
    @classmethod
    def _is_response_template(cls, template: dict[str, Any] | None) -> dict[str, Any] | None:
        if template is not None:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            try:
                load_response_template(template)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise ValueError(str(error)) from error
        return template

    @property
    def name(self) -> str:
        """Name of the model in the API."""
        return self.model_name or super().name

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names by which clients may call a server that has no API keys."""
        return self.allowed_hosts


class ServeOptions(ServerOptions):
    """Options of ``hf_slospec serve``."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all machines.")
    port: int = Field(8000, ge=1, le=65535)
    root_path: str = Field(
        "",
        description="Path under which a proxy shows the server; the proxy strips it: with /llm, /llm/v1/models arrives "
        "as /v1/models.",
    )
    no_api_key: bool = Field(False, description="Serve other machines without a key.")

    @model_validator(mode="after")
    def _is_open_on_purpose(self) -> ServeOptions:
        if not is_loopback(self.host) and not self.api_keys and not self.no_api_key:
            raise InvalidInputError(
                f"--host {self.host} lets other machines in; give --api-key, or --no-api-key to serve all of them"
            )
        return self

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.allowed_hosts)
