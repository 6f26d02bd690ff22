"""Start of the demo: its models, simulated users and page."""

from __future__ import annotations

import hmac
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_slospec.cli.activity import activity
from hf_slospec.config import Compile
from hf_slospec.demo import SIZE
from hf_slospec.demo.generator import DemoGenerator
from hf_slospec.demo.personas import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_TPOT_SLO_MS,
    PERSONAS,
    UserRequest,
)
from hf_slospec.demo.sessions import CONFIG, DemoSessions
from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.speculator import clock
from hf_slospec.server.loading import load_generator, size_and_place
from hf_slospec.server.model_options import ModelOptions, only_errors_logged
from hf_slospec.server.options import is_loopback

if TYPE_CHECKING:
    import gradio as gr

# Of the measurement that SLOs are chosen by: new tokens of each persona's answer without drafts and
# with drafts, which gain more in some parts of a text than in others, and repeats
NUM_PLAIN_TOKENS = 32
NUM_DRAFTED_TOKENS = 96
NUM_REPEATS = 2
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
    compile: Compile = "wait"  # see SLOSpecConfig

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
        report: called with the models and the page's address.
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
    from hf_slospec.demo.layout import EMBEDDED, INTRO, Page

    with activity("loading models, and compiling their forwards unless that was done"):
        generator = demo_generator(options)
    model = f"{options.models.name}: {size_and_place(generator.generator.model)}"
    report(f"{model}; drafts: {generator.drafter}")
    try:
        with activity("measuring speeds"):
            generator.generator.start()
            requests = measured_requests(generator)
        sessions = DemoSessions(generator, clock)
        for persona, user_request in zip(PERSONAS, requests, strict=True):
            sessions.add(persona, user_request)
    except BaseException:
        generator.stop()
        raise
    note = EMBEDDED if options.models.target is None else ""
    intro = INTRO.format(model=escape(model), drafter=escape(generator.drafter), note=note)
    max_slo_ms = 2 * max(request.tpot_slo_ms or 5.0 for request in requests)
    return sessions, Page(sessions, requests[0], min(max_slo_ms, MAX_TPOT_SLO_MS), intro).build()


def demo_generator(options: Options) -> DemoGenerator:
    """Load the models, and return a generator with K/V slots for requests of all users."""
    kv_tokens = CONFIG.max_batch * (
        MAX_PROMPT_TOKENS + MAX_NEW_TOKENS + CONFIG.max_depth * CONFIG.max_width
    )
    changes = {"kv_tokens": kv_tokens, "compile": options.compile}
    return DemoGenerator(load_generator(options.models, CONFIG.model_copy(update=changes)))


def measured_requests(generator: DemoGenerator) -> list[UserRequest]:
    """Return the requests of all personas, with SLOs that this machine can meet: they are chosen by
    the TPOTs of the answers, decoded together, with and without drafts.
    """
    is_chat = generator.is_chat
    requests = [persona.request(1.0, 1.0, is_chat) for persona in PERSONAS]
    plain_s = statistics.median(tpots_s(generator, "none", requests, NUM_PLAIN_TOKENS))
    drafted_s = tpots_s(generator, generator.policy, requests, NUM_DRAFTED_TOKENS)
    return [
        persona.request(plain_s, tpot_s, is_chat)
        for persona, tpot_s in zip(PERSONAS, drafted_s, strict=True)
    ]


def tpots_s(
    generator: DemoGenerator, policy: str, requests: Sequence[UserRequest], num_tokens: int
) -> list[float]:
    """Measure seconds per token of requests that are decoded together with a policy. Each is the
    smallest of several, which other processes disturbed least.
    """
    generator.use(policy)
    tokens = {"min_new_tokens": 2, "max_new_tokens": num_tokens}
    repeats = []
    for _ in range(NUM_REPEATS):
        handles = [generator.submit(request.prompt, **tokens) for request in requests]
        repeats.append([handle.result().metrics.tpot_s or math.inf for handle in handles])
    generator.use(generator.policy)
    return [min(of_one) for of_one in zip(*repeats, strict=True)]


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
