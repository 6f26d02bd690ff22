"""Start of the demo: its models, simulated users and page."""

from __future__ import annotations

import hmac
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_slospec.demo import SIZE
from hf_slospec.demo.generator import DemoGenerator
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, MAX_TPOT_SLO_MS, PERSONAS
from hf_slospec.demo.sessions import CONFIG, DemoSessions
from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.speculator import clock
from hf_slospec.server.loading import load_generator, size_and_place
from hf_slospec.server.model_options import ModelOptions, only_errors_logged
from hf_slospec.server.options import is_loopback

if TYPE_CHECKING:
    import gradio as gr

# Of the measurement of plain decoding: simultaneous streams, tokens of each, and repeats
NUM_STREAMS = 4
NUM_TOKENS = 16
NUM_REPEATS = 3
MAX_SLO_FACTOR = 6.0  # slowest speed target on the sliders, as a multiple of plain decoding's TPOT
NO_TELEMETRY = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
# Makes the browser refuse requests to other hosts.
CONTENT_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'"


@dataclass(frozen=True)
class Options:
    """Models, address and password of the demo."""

    models: ModelOptions = field(default_factory=lambda: ModelOptions(size=SIZE))
    host: str | None = None  # None: GRADIO_SERVER_NAME, or else this machine only
    port: int | None = None
    password: str | None = None
    allows_no_password: bool = False

    def check_open(self) -> None:
        """Raise InvalidInputError if other machines could connect without a password, unless that
        is allowed.
        """
        host = self.host or os.environ.get("GRADIO_SERVER_NAME") or "localhost"
        if self.password == "":
            raise InvalidInputError("--password is empty; leave it out, or give one")
        if not is_loopback(host) and self.password is None and not self.allows_no_password:
            raise InvalidInputError(
                f"--host {host} lets other machines in; give --password (better by the variable "
                "HF_SLOSPEC_DEMO_PASSWORD), or --no-password to let all of them in"
            )


def serve(options: Options, report: Callable[[str], None] = print) -> None:
    """Serve the page of the demo until interrupted.

    Args:
        report: called with messages about the progress.
    """
    with only_errors_logged():
        sessions, page = prepare(options, report)
        try:
            report(f"open {launch(page, options)} (stop with Ctrl-C)")
            page.block_thread()
        finally:
            sessions.generator.stop()


def prepare(
    options: Options, report: Callable[[str], None] = lambda message: None
) -> tuple[DemoSessions, gr.Blocks]:
    """Load the models, start the engine and the simulated users, and build the page.

    Raises:
        ImportError: gradio is not installed.
        InvalidInputError: an option is invalid, or the page would be open to other machines without
            a password.
    """
    options.check_open()
    os.environ.update(NO_TELEMETRY)  # before gradio is imported
    from hf_slospec.demo.layout import EMBEDDED, Page

    report("loading models")
    generator = demo_generator(options.models)
    report(
        f"{options.models.name}: {size_and_place(generator.generator.model)}; drafts: {generator.drafter}"
    )
    try:
        generator.start()
        report("measuring the speed of the models")
        plain_s = plain_tpot_s(generator)
        personas = {
            persona.name: (persona, persona.request(plain_s, generator.is_chat))
            for persona in PERSONAS
        }
        sessions = DemoSessions(generator, clock)
        for persona, user_request in personas.values():
            sessions.add(persona, user_request)
    except BaseException:
        generator.stop()
        raise
    note = EMBEDDED if options.models.target is None else ""
    max_slo_ms = min(max(round(1e3 * MAX_SLO_FACTOR * plain_s), 10), MAX_TPOT_SLO_MS)
    return sessions, Page(sessions, personas, max_slo_ms, note).build()


def demo_generator(models: ModelOptions) -> DemoGenerator:
    """Load the models, and return a generator with K/V slots for requests of all users."""
    kv_tokens = CONFIG.max_batch * (
        MAX_PROMPT_TOKENS + MAX_NEW_TOKENS + CONFIG.max_depth * CONFIG.max_width
    )
    return DemoGenerator(load_generator(models, CONFIG.model_copy(update={"kv_tokens": kv_tokens})))


def plain_tpot_s(generator: DemoGenerator) -> float:
    """Measure the TPOT of plain decoding of a few simultaneous streams.

    The personas' TPOT SLOs are multiples of it. Speculation is off during the measurement.
    """
    policy = generator.policy
    generator.set_policy("none")
    measured = []
    for _ in range(NUM_REPEATS):
        handles = [
            generator.submit(
                persona.code_prompt, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS
            )
            for persona in PERSONAS[:NUM_STREAMS]
        ]
        tpots_s = [handle.result().metrics.tpot_s for handle in handles]
        measured.append(statistics.median(tpot_s for tpot_s in tpots_s if tpot_s is not None))
    generator.set_policy(policy)
    return min(measured)  # the repeat that other processes disturbed least


def launch(page: gr.Blocks, options: Options) -> str:
    """Serve the page in background threads, and return its address."""
    import gradio as gr
    from starlette.middleware import Middleware

    _, url, _ = page.launch(
        server_name=options.host,
        server_port=options.port,
        auth=None if options.password is None else password_check(options.password),
        auth_message="The demo asks for a password; any name will do.",
        # System fonts need no download.
        theme=gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
        css_paths=Path(__file__).with_name("style.css"),
        app_kwargs={"middleware": [Middleware(ContentSecurityPolicy)]},
        share=False,
        ssr_mode=False,
        footer_links=[],
        prevent_thread_lock=True,
        quiet=True,
    )
    return str(url)


def password_check(password: str) -> Callable[[str, str], bool]:
    """Return a check that accepts any user name with this password."""
    return lambda name, entered: hmac.compare_digest(entered.encode(), password.encode())


class ContentSecurityPolicy:
    """ASGI middleware that adds :data:`CONTENT_POLICY` to every response."""

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
