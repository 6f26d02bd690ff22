"""Start of the HTTP server with its engine in this process. A server with replicas is started in
``replicas/start.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.server.access import ServerSettings
from hf_slospec.server.app import make_app
from hf_slospec.server.connections import ImpatientProtocol, SignalledServer
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.loading import load_generator, size_and_place
from hf_slospec.server.options import ServeOptions, ServerOptions

DRAIN_S = 30  # seconds for requests to finish after the first signal
# Seconds after which Python switches threads; its default of 5 ms would delay every chunk by 5 ms
SWITCH_S = 5e-4
CHAT_PROMPT = "Write a short poem about the sea."
BASE_PROMPT = "Once upon a time,"
EMBEDDED_PROMPT = "def main():"  # the embedded target continues Python


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Load the models, serve until SIGINT or SIGTERM, and finish the requests in progress.

    With tensor parallelism, only the first process serves; the others compute until it ends.

    Args:
        say: called with texts for the user."""
    sys.setswitchinterval(SWITCH_S)
    if options.tensor_parallel_size == 1 or os.environ.get("RANK") == "0":
        say(
            f"loading and measuring {options.name}; the first start on a machine takes some seconds longer"
        )
    with load_generator(options, options.config, options.chat_template) as generator:
        if not generator.decoder.speculator.target.ranks.is_first:
            # ignored here: the first process gets the signals, too, and stops all processes
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            return
        engine = LocalEngine(generator, options.response_template, options.bounds.new_work())
        say(welcome(options, generator))
        app = make_app(engine, ServerSettings.of(options))
        config = uvicorn.Config(
            app, host=options.host, port=options.port, http=ImpatientProtocol,
            log_level="warning", timeout_graceful_shutdown=DRAIN_S, root_path=options.root_path,
        )  # fmt: skip
        stop = partial(generator.stop, drain=False)
        refuse = partial(setattr, app.state, "is_stopping", True)
        SignalledServer(config, stop, refuse).run()


def welcome(options: ServeOptions, generator: SLOSpecGenerator) -> str:
    """Return the text for the user after the start: model, device, drafter, address, speed, and
    example requests.
    """
    speculator = generator.decoder.speculator
    step_s = float(speculator.costs.verify_s(1, 1, 0))
    method = generator.draft_method
    drafts = method.kind
    if method.model is not None:
        drafts += f", {sum(tensor.numel() for tensor in method.model.parameters()) / 1e6:.1f} M parameters"
    url = f"http://{options.host}:{options.port}/v1"
    is_chat = getattr(generator.tokenizer, "chat_template", None) is not None
    slo_s = max(round(2 * step_s, 3), 0.001)
    lines = [
        f"model    {options.name}: {size_and_place(generator.model)}",
        f"drafter  {drafts}",
        f"address  {url}" + (" (API key required)" if options.api_keys else ""),
        f"speed    about {1e3 * step_s:.3g} ms per token for one request without drafts, less where drafts fit",
        *requests_to_try(options, url, is_chat, slo_s),
    ]
    return "\n".join(lines)


def requests_to_try(
    options: ServerOptions, url: str, is_chat: bool, slo_s: float
) -> tuple[str, str]:
    """Return an example request for curl and one for OpenAI's Python client.

    Args:
        url: address of the API, including /v1.
        is_chat: make chats, not completions.
        slo_s: TPOT SLO in seconds.
    """
    body: dict[str, Any] = {"model": options.name}
    if is_chat:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": CHAT_PROMPT}]
    else:
        path = "completions"
        body["prompt"] = EMBEDDED_PROMPT if options.target is None else BASE_PROMPT
    body["max_tokens"] = 64
    auth = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    arguments = ", ".join(f"{field}={value!r}" for field, value in body.items())
    return (
        f"curl     curl {url}/{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(json.dumps(body | {'slo_tpot': slo_s}))}",
        f"Python   OpenAI(base_url={url!r}, api_key={'$KEY' if options.api_keys else 'none'!r})."
        f"{path.replace('/', '.')}.create({arguments}, extra_body={{'slo_tpot': {slo_s}}})",
    )
