"""``hf_slospec serve``: a server with OpenAI's interface."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_slospec.cli.options import (
    ConfigJSON,
    ExactName,
    config_of,
    option,
    settings_of,
    usage_errors,
    with_options,
)
from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need
from hf_slospec.server.limits import RequestLimits
from hf_slospec.server.options import Objective, ServeOptions, SLOLimits

FILES = ("chat_template", "response_template")
# Fields of ServeOptions that are not options of the same name and type
COMPOSED = (*FILES, "api_keys", "limits", "bounds", "objectives", "config")
LIMITS = ("default_tpot", "strictest_tpot", "lowest_priority")


@with_options(
    *(option(ServeOptions, name) for name in ServeOptions.model_fields if name not in COMPOSED),
    *(option(ServeOptions, name, kind=Path | None) for name in FILES),
    *(option(SLOLimits, name) for name in LIMITS),
    option(ServeOptions, "bounds", kind=str, default="{}"),
    option(ServeOptions, "objectives", kind=str, default="{}"),
    option(SLOSpecConfig, "guarantee"),
)
def serve(
    fields: dict[str, Any],
    api_key: Annotated[
        list[str],
        typer.Option(envvar="HF_SLOSPEC_API_KEY", help="Key that clients must send; repeatable."),
    ] = [],  # noqa: B006  read only
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help='JSON with limits by key: {"KEY": {"default_tpot": 0.1, "strictest_tpot": 0.02, "lowest_priority": 0}}'
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Serve with so many replicas on Ray; RAY_ADDRESS names a cluster."
        ),
    ] = None,
    exact: ExactName = None,
    config: ConfigJSON = "{}",
) -> None:
    """Serve a model with OpenAI's interface, with SLOs per request. Stop with Ctrl-C.

    Requests in progress are finished first; a second signal ends them.

    Example:  hf_slospec serve --size 0.1B --port 8000
    """
    say = partial(Console(stderr=True, soft_wrap=True).print, markup=False, highlight=False)
    with usage_errors(OSError):
        need("serve" if replicas is None else "ray", "the server")
        limits = SLOLimits(**{name: fields.pop(name) for name in LIMITS})
        fields["bounds"] = settings_of(fields["bounds"], RequestLimits, "--request-limits")
        objectives = settings_of(fields["objectives"], dict[str, Objective], "--objectives")
        fields["objectives"] = objectives
        if (path := fields["chat_template"]) is not None:
            fields["chat_template"] = _read("--chat-template", path)
        if (path := fields["response_template"]) is not None:
            text = _read("--response-template", path)
            fields["response_template"] = settings_of(text, Any, f"--response-template {path}")
        keys = dict.fromkeys(api_key, limits)
        if api_key_file is not None:
            text = _read("--api-key-file", api_key_file)
            keys |= settings_of(text, dict[str, SLOLimits], f"--api-key-file {api_key_file}")
            if not keys:
                raise InvalidInputError(
                    f"--api-key-file {api_key_file} has no key; leave it out to serve all"
                )
        settings = config_of(config, guarantee=fields.pop("guarantee"), exact=exact)
        options = ServeOptions(**fields, limits=limits, api_keys=keys, config=settings)
        if replicas is None:
            from hf_slospec.server.serve import serve as run

            run(options, say)
        else:
            from hf_slospec.replicas.start import serve_replicas

            serve_replicas(options, replicas, say)


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{name} {path}: {error}") from error
