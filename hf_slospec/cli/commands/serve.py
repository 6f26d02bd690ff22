"""``hf_slospec serve``: a server with OpenAI's interface."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_slospec.cli.options import (
    AllowMissing,
    Assistant,
    ConfigJSON,
    Device,
    Drafter,
    DType,
    Size,
    TargetModel,
    settings_of,
    usage_errors,
)
from hf_slospec.errors import InvalidInputError
from hf_slospec.extras import need


def serve(
    target: TargetModel = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    share_texts: Annotated[
        bool,
        typer.Option(
            "--share-texts",
            help="With suffix: draft from other requests' outputs, too, those of the same key and cache_salt. Response "
            "times may then tell users of one key about each other's texts.",
        ),
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Take images in messages, as data URLs; the target must take them.")
    ] = False,
    size: Size = "tiny",
    dtype: DType = "fast",
    device: Device = "auto",
    allow_missing: AllowMissing = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Default: the name of the target.")] = None,
    api_key: Annotated[
        list[str], typer.Option(envvar="HF_SLOSPEC_API_KEY", help="Key that clients must send; repeatable.")
    ] = [],  # noqa: B006  read only
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help='JSON with limits by key: {"KEY": {"default_tpot": 0.1, "strictest_tpot": 0.02, "lowest_priority": 0}}'
        ),
    ] = None,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Serve other machines without a key.")] = False,
    allowed_origin: Annotated[
        list[str], typer.Option(help="Origin of web pages that may call the server (CORS); repeatable.")
    ] = [],  # noqa: B006
    allowed_hosts: Annotated[
        list[str],
        typer.Option(help="Name by which clients without a key may call, beside localhost and addresses; repeatable."),
    ] = [],  # noqa: B006
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes", help="Share K/V and texts between keys; clients can then find out others' texts."
        ),
    ] = False,
    special_tokens: Annotated[
        str, typer.Option(help="Control tokens written in chats: allow, refuse, or escape as plain text.")
    ] = "allow",
    chat_template: Annotated[Path | None, typer.Option(help="File with a chat template (Jinja).")] = None,
    response_template: Annotated[
        Path | None,
        typer.Option(help="JSON that tells reasoning and tool calls from content; default: the model's own."),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors; such files may run code.")
    ] = False,
    metrics_prefix: Annotated[
        str, typer.Option(help="Prefix of the names at /metrics; tools for vLLM look for vllm:.")
    ] = "hf_slospec:",
    root_path: Annotated[
        str,
        typer.Option(
            help="Path under which a proxy shows the server; the proxy strips it: with /llm, /llm/v1/models arrives as "
            "/v1/models."
        ),
    ] = "",
    default_slo_tpot: Annotated[float | None, typer.Option(help="SLO of requests without one, in seconds.")] = None,
    strictest_slo_tpot: Annotated[
        float | None, typer.Option(help="Stricter SLOs are refused, in seconds per token.")
    ] = None,
    lowest_priority: Annotated[
        int | None, typer.Option(max=0, help="Lower numbers, which are served earlier, are refused. Default: none.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Serve with so many replicas on Ray; RAY_ADDRESS names a cluster.")
    ] = None,
    request_limits: Annotated[
        str, typer.Option(help='Limits of a single request, as JSON: {"prompts": 8, "stop_strings": 4}.')
    ] = "{}",
    config: ConfigJSON = "{}",
) -> None:
    """Serve a model with OpenAI's interface, with speed targets per request. Stop with Ctrl-C.

    Requests in progress are finished first; a second signal ends them.

    Example:  hf_slospec serve --size 0.1B --port 8000
    """
    console = Console(stderr=True, soft_wrap=True)
    with usage_errors(OSError):
        need("serve" if replicas is None else "ray", "the server")
        from hf_slospec.serving.loading import ModelOptions
        from hf_slospec.serving.openai.access import AccessOptions
        from hf_slospec.serving.openai.limits import RequestLimits
        from hf_slospec.serving.openai.orders import SLOLimits
        from hf_slospec.serving.openai.serve import ServeOptions
        from hf_slospec.serving.openai.serve import serve as run

        if images and replicas is not None:
            raise InvalidInputError("--images cannot be combined with --replicas, which take no images")
        limits = SLOLimits(
            default_tpot=default_slo_tpot, strictest_tpot=strictest_slo_tpot, lowest_priority=lowest_priority
        )
        access = AccessOptions(
            limits=limits, bounds=RequestLimits.of_option("--request-limits", request_limits),
            share_prefixes=share_prefixes, special_tokens=special_tokens, metrics_prefix=metrics_prefix,
            allowed_origins=tuple(allowed_origin), allowed_hosts=tuple(allowed_hosts),
        )  # fmt: skip
        options = ServeOptions(
            ModelOptions(
                target, assistant, drafter, size, dtype, device, allow_pickle, share_texts, images, allow_missing
            ),
            host, port, served_model_name, tuple(api_key), api_key_file, no_api_key,
            chat_template, response_template, root_path, access, settings_of(config),
        )  # fmt: skip
        say = partial(console.print, markup=False, highlight=False)
        if replicas is None:
            run(options, say)
            return
        from hf_slospec.replicas.start import serve_replicas

        serve_replicas(options, replicas, say)
