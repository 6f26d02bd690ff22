"""A server on the embedded pair, listening on a free port for the whole session."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
import torch
import uvicorn

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.options import SLOLimits

CHAT_TEMPLATE = (
    "{% if tools %}# tools\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
KEY = "one-key"
STRICT_KEY = "another-key"


@dataclass
class Served:
    generator: SLOSpecGenerator
    url: str
    client: httpx.Client

    @property
    def openai(self):
        """A client of OpenAI's, which retries nothing."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def generator():
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    tokenizer.chat_template = CHAT_TEMPLATE
    with SLOSpecGenerator(
        target, draft, tokenizer, SLOSpecConfig(kv_tokens=20_000, check_invariants=True)
    ) as made:
        yield made


@pytest.fixture(scope="session")
def served(generator):
    with serving(generator) as made:
        yield made


@pytest.fixture(scope="session")
def guarded(generator):
    keys = {KEY: SLOLimits(default_tpot=5.0), STRICT_KEY: SLOLimits(strictest_tpot=1.0)}
    with serving(generator, api_keys=keys) as made:
        yield made


@contextmanager
def serving(engine, http="auto", root_path="", **settings):
    """Serve a generator or an engine with these settings."""
    if isinstance(engine, SLOSpecGenerator):
        engine = LocalEngine(engine)
    app = make_app(engine, ServerSettings(model_name="tiny", **settings))
    with (
        listening(app, http=http, root_path=root_path) as url,
        httpx.Client(base_url=url, timeout=120.0) as client,
    ):
        yield Served(engine.generator, url, client)


class listening:  # noqa: N801  used like a function
    """Serves an application inside of the context, on a free port by default."""

    def __init__(self, app, port=0, **options):
        # With the protocol named, asyncio turns Nagle's algorithm off, as for sockets of its own.
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # for another server on the same port
        self.socket.bind(("127.0.0.1", port))
        self.socket.listen()  # connections wait until the server takes them
        config = uvicorn.Config(
            app, log_level="error", lifespan="off", timeout_graceful_shutdown=5, **options
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    def __enter__(self):
        self.thread.start()
        host, port = self.socket.getsockname()
        return f"http://{host}:{port}"

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()
