"""Connections at their worst: readers that read nothing, uploads that end, two lengths of a body, signals."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from hf_slospec import SLOSpecGenerator
from hf_slospec.serving.openai.app import ServerSettings, make_app
from hf_slospec.serving.openai.connections import ImpatientProtocol
from hf_slospec.serving.openai.engine import LocalEngine
from hf_slospec.serving.openai.limits import RequestLimits
from tests.serving.openai.conftest import Served, listening
from tests.serving.openai.hostile.clients import (
    LONG_MINUTES,
    SMALL,
    WAIT_S,
    connected,
    metrics_of,
    sent,
    wait_until,
    wait_until_idle,
)
from tests.serving.openai.test_serve import free_port

LARGE = {"prompt": "def main():\n" * 80, "echo": True, "logprobs": 20, "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_readers_that_read_nothing_are_cut(generator: SLOSpecGenerator, stream: bool) -> None:
    settings = ServerSettings(model_name="tiny", bounds=RequestLimits(reader_s=0.5))
    server = listening(make_app(LocalEngine(generator), settings), http=ImpatientProtocol)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by its connections
    with server as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        reader = sent(url, "/v1/completions", LARGE | {"stream": stream}, receive_bytes=4096)
        wait_until(lambda: metrics_of(client)["readers_cut_total"] == 1)
        wait_until_idle(client)
        reader.close()
        assert client.post("/v1/completions", json=SMALL).status_code == 200
        assert metrics_of(client)["readers_cut_total"] == 1


def test_leaving_while_uploading_is_no_fault(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    before = metrics_of(served.client)["clients_left_total"]
    with caplog.at_level(logging.WARNING):
        connection = connected(served.url)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        connection.close()
        wait_until(lambda: metrics_of(served.client)["clients_left_total"] == before + 1)
    assert not caplog.records


def test_a_body_with_two_lengths_is_refused(served: Served) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with connected(served.url) as connection:
        connection.sendall(head + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1  # and closed


def test_health_answers_head(served: Served) -> None:
    answer = served.client.head("/health")
    assert answer.status_code == 200 and not answer.content


ENDLESS = """
import asyncio, sys, uvicorn
from hf_slospec.serving.openai.connections import SignalledServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await asyncio.sleep(1e6)

config = uvicorn.Config(app, port=int(sys.argv[1]), lifespan="off", timeout_graceful_shutdown=1e6)
SignalledServer(config).run()
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT] if LONG_MINUTES else [signal.SIGTERM])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(port))
        with connected(url) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"begun" not in answer:
                answer += connection.recv(1024)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_listening(port))
            assert process.poll() is None  # it lets the request finish
            process.send_signal(second)
            assert process.wait(WAIT_S) == -second
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    try:
        connected(f"http://127.0.0.1:{port}").close()
    except ConnectionRefusedError:
        return False
    return True
