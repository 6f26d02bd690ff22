"""Puts the demo together and serves it."""

from __future__ import annotations

import hmac
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_slospec.config import SLOSpecConfig
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, MAX_TPOT_SLO_MS, PERSONAS
from hf_slospec.demo.sessions import CONFIG, POLICIES, Crowd
from hf_slospec.generate.speculator import clock
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.tiny.load import load_pair

if TYPE_CHECKING:
    import gradio as gr

NUM_MEASURED, MEASURED_TOKENS, MEASURED_TIMES = 4, 16, 3  # streams, and what each writes, to time plain decoding
SLOWEST = 6.0  # target on the sliders, as a multiple of plain decoding
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
# The browser itself refuses to ask anybody else for anything.
CONTENT_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'"


@dataclass(frozen=True)
class Options:
    """What is served, and to whom."""

    target: str | None = None  # with its assistant; None: the embedded pair
    assistant: str | None = None
    size: str = "0.1B"  # of the embedded target: some ten tokens per second and user on two CPU cores
    dtype: str = "bfloat16"
    device: str = "cpu"
    host: str | None = None  # None: this machine only, unless GRADIO_SERVER_NAME says otherwise
    port: int | None = None
    password: str | None = None


def serve(options: Options, say: Callable[[str], None] = print) -> None:
    """Serve until interrupted."""
    with only_errors_logged():
        say("loading models")
        crowd, page = prepare(options, say)
        try:
            say(f"open {launch(page, options)} (Ctrl-C ends it)")
            page.block_thread()
        finally:
            crowd.generator.stop(drain=False)


def prepare(options: Options, say: Callable[[str], None] = lambda words: None) -> tuple[Crowd, gr.Blocks]:
    """Models, engine, simulated users and the page.

    Raises:
        ImportError: gradio is not installed.
        InvalidInputError: an option makes no sense.
    """
    os.environ.update(QUIET)  # before gradio is imported
    from hf_slospec.demo.layout import EMBEDDED, Page

    pair = load_pair(options.target, options.assistant, options.size, options.dtype, options.device)
    room = CONFIG.max_batch * (MAX_PROMPT_TOKENS + MAX_NEW_TOKENS + CONFIG.max_depth * CONFIG.max_width)
    generator = SLOSpecGenerator(*pair, SLOSpecConfig(**CONFIG.model_dump(exclude={"kv_tokens"}), kv_tokens=room))
    say("measuring how fast the models are here")
    generator.start()
    plain_s = plain_pace(generator)
    is_embedded = options.target is None
    people = {person.name: (person, person.wish(plain_s, is_embedded)) for person in PERSONAS}
    crowd = Crowd(generator, clock)
    for person, wish in people.values():
        crowd.add(person, wish)
    most_ms = min(max(round(1e3 * SLOWEST * plain_s), 10), MAX_TPOT_SLO_MS)
    return crowd, Page(crowd, people, most_ms, EMBEDDED if is_embedded else "").build()


def plain_pace(generator: SLOSpecGenerator) -> float:
    """Seconds per token of a few streams together without speculation: what targets are chosen by."""
    generator.set_policy(POLICIES["none"])
    tokens = dict(min_new_tokens=MEASURED_TOKENS, max_new_tokens=MEASURED_TOKENS)
    measured = []
    for _ in range(MEASURED_TIMES):
        handles = [generator.submit(person.code, **tokens) for person in PERSONAS[:NUM_MEASURED]]
        own = [handle.result().metrics.tpot_s for handle in handles]
        measured.append(statistics.median(tpot_s for tpot_s in own if tpot_s is not None))
    generator.set_policy(POLICIES["auto"])
    return min(measured)  # others may use the machine for a moment


def launch(page: gr.Blocks, options: Options) -> str:
    """Serve in threads of its own.  -> the page's address"""
    import gradio as gr
    from starlette.middleware import Middleware

    fonts = dict(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])  # nothing is fetched
    _, url, _ = page.launch(
        server_name=options.host,
        server_port=options.port,
        auth=None if options.password is None else only_with(options.password),
        auth_message="The demo asks for a password; any name will do.",
        theme=gr.themes.Default(**fonts),
        css_paths=Path(__file__).with_name("style.css"),
        app_kwargs={"middleware": [Middleware(StaysHere)]},
        share=False,
        ssr_mode=False,
        footer_links=[],
        prevent_thread_lock=True,
        quiet=True,
    )
    return str(url)


def only_with(password: str) -> Callable[[str, str], bool]:
    """Whoever knows the password may come in, under any name."""
    return lambda name, given: hmac.compare_digest(given.encode(), password.encode())


class StaysHere:
    """Adds :data:`CONTENT_POLICY` to every answer."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"content-security-policy", CONTENT_POLICY.encode()),
                ]
            await send(message)

        await self.app(scope, receive, with_policy)
