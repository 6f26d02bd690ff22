"""Start of the HTTP server in this process."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
from transformers.utils.chat_parsing.response_templates import load_response_template

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError, describe_validation_error
from hf_slospec.serving.addresses import is_loopback
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.loading import ModelOptions, size_and_place
from hf_slospec.serving.openai.access import AccessOptions, ServerSettings
from hf_slospec.serving.openai.app import make_app
from hf_slospec.serving.openai.connections import ImpatientProtocol, SignalledServer
from hf_slospec.serving.openai.engine import LocalEngine
from hf_slospec.serving.openai.orders import SLOLimits

DRAIN_S = 30  # seconds for requests to finish after the first signal
KEYS = TypeAdapter(dict[str, SLOLimits])
SWITCH_S = 5e-4  # switch interval of Python's threads; the default of 5 ms delays every chunk by as much
CHAT_PROMPT, BASE_PROMPT = "Write a short poem about the sea.", "Once upon a time,"
EMBEDDED_PROMPT = "def main():"  # the embedded target continues Python


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server."""

    models: ModelOptions
    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    key_file: Path | None = None  # JSON: SLO limits by API key
    allows_no_key: bool = False
    chat_template: Path | None = None
    response_template: Path | None = None  # JSON, see transformers' response templates
    root_path: str = ""
    access: AccessOptions = field(default_factory=AccessOptions)  # its limits are those of api_keys, too
    config: SLOSpecConfig = field(default_factory=SLOSpecConfig)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model_name or self.models.name

    @property
    def settings(self) -> ServerSettings:
        """Return the settings of the HTTP application; raises InvalidInputError."""
        return ServerSettings(model_name=self.name, **self.access_fields())

    def access_fields(self) -> dict[str, Any]:
        """Return the access options with all API keys, and with the host as a name; raises InvalidInputError."""
        hosts = (self.host, *self.access.allowed_hosts)
        return dict(self.access) | {"api_keys": self.keys(), "allowed_hosts": hosts}

    def check_open(self) -> None:
        """Raise InvalidInputError if other machines could send requests without a key, unless that is allowed."""
        if not is_loopback(self.host) and not self.keys() and not self.allows_no_key:
            raise InvalidInputError(
                f"--host {self.host} lets other machines in; give --api-key, or --no-api-key to serve all of them"
            )

    def keys(self) -> dict[str, SLOLimits]:
        """Return the SLO limits of every API key; raises InvalidInputError."""
        keys = self.access.api_keys | dict.fromkeys(self.api_keys, self.access.limits)
        if self.key_file is not None:
            try:
                keys |= KEYS.validate_json(_read("--api-key-file", self.key_file))
            except ValidationError as error:
                raise InvalidInputError(f"--api-key-file {self.key_file}: {describe_validation_error(error)}") from None
        if any(not key for key in keys):
            raise InvalidInputError("an API key is empty; leave it out, or give one")
        if self.key_file is not None and not keys:
            raise InvalidInputError(f"--api-key-file {self.key_file} has no key; leave it out to serve all")
        return keys

    def read_chat_template(self) -> str | None:
        """Return the chat template that replaces the tokenizer's, if any; raises InvalidInputError."""
        return None if self.chat_template is None else _read("--chat-template", self.chat_template)

    def read_response_template(self) -> dict[str, Any] | None:
        """Return the response template that replaces the model's, if any; raises InvalidInputError."""
        if self.response_template is None:
            return None
        try:
            template: dict[str, Any] = json.loads(_read("--response-template", self.response_template))
            load_response_template(template)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidInputError(f"--response-template {self.response_template}: {error}") from error
        return template


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Load the models, serve until a signal ends it, and finish the requests that have begun.

    Raises:
        InvalidInputError: an option is invalid, or the server would be open to other machines without a key.
    """
    options.check_open()
    template, settings, name = options.read_response_template(), options.settings, options.name
    chat_template = options.read_chat_template()
    sys.setswitchinterval(SWITCH_S)
    say(f"loading and measuring {name}; the first start on a machine takes some seconds longer")
    with options.models.generator(options.config, chat_template) as generator:
        app = make_app(LocalEngine(generator, template, settings.bounds.new_work()), settings)
        say(welcome(options, name, generator, is_guarded=bool(settings.api_keys)))
        config = uvicorn.Config(
            app, host=options.host, port=options.port, http=ImpatientProtocol, log_level="warning",
            timeout_graceful_shutdown=DRAIN_S, root_path=options.root_path,
        )  # fmt: skip
        SignalledServer(config).run()


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{option} {path}: {error}") from error


def welcome(options: ServeOptions, name: str, generator: SLOSpecGenerator, is_guarded: bool) -> str:
    """Return what a user needs to know after the start: model, device, address, speed, and requests to try."""
    speculator = generator.decoder.speculator
    step_s, method = float(speculator.costs.verify_s(1, 1, 0)), speculator.method
    drafts = method.kind
    if method.model is not None:
        drafts += f", {sum(tensor.numel() for tensor in method.model.parameters()) / 1e6:.1f} M parameters"
    url = f"http://{options.host}:{options.port}/v1"
    is_chat, is_embedded = getattr(generator.tokenizer, "chat_template", None) is not None, not options.models.target
    slo_s = max(round(2 * step_s, 3), 0.001)
    lines = [
        f"model    {name}: {size_and_place(generator.model)}",
        f"drafter  {drafts}",
        f"address  {url}" + (" (API key required)" if is_guarded else ""),
        f"speed    about {1e3 * step_s:.3g} ms per token for one request without drafts, less where drafts fit",
        *requests_to_try(url, name, is_chat, is_embedded, slo_s, is_guarded),
    ]
    return "\n".join(lines)


def requests_to_try(
    url: str, name: str, is_chat: bool, is_embedded: bool, slo_s: float, is_guarded: bool
) -> tuple[str, str]:
    """Return a request for curl and for OpenAI's client: of a chat, if the model has a chat template."""
    prompt = CHAT_PROMPT if is_chat else EMBEDDED_PROMPT if is_embedded else BASE_PROMPT
    inputs: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body = {"model": name, **inputs, "max_tokens": 64}
    path = "chat/completions" if is_chat else "completions"
    auth = ' -H "Authorization: Bearer $KEY"' if is_guarded else ""
    arguments = ", ".join(f"{field}={value!r}" for field, value in body.items())
    return (
        f"curl     curl {url}/{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(json.dumps(body | {'slo_tpot': slo_s}))}",
        f"Python   OpenAI(base_url={url!r}, api_key={'$KEY' if is_guarded else 'none'!r})."
        f"{path.replace('/', '.')}.create({arguments}, extra_body={{'slo_tpot': {slo_s}}})",
    )
