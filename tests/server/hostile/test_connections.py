"""Connections at their worst: readers that read nothing, uploads that end, two lengths of a body,
signals.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from functools import partial

import httpx
import pytest
import uvicorn

from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.connections import ImpatientProtocol, SignalledServer
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.limits import RequestLimits
from tests.server.conftest import listening
from tests.server.hostile.clients import (
    SMALL,
    WAIT_S,
    connected,
    metrics_of,
    sent,
    wait_until,
    wait_until_idle,
)
from tests.server.test_serve import free_port

LARGE = {
    "prompt": "def main():\n" * 80,
    "echo": True,
    "logprobs": 20,
    "max_tokens": 40,
    "ignore_eos": True,
}


@pytest.mark.parametrize("stream", [True, False])
def test_readers_that_read_nothing_are_cut(generator, stream):
    settings = ServerSettings(model_name="tiny", bounds=RequestLimits(reader_s=0.5))
    server = listening(make_app(LocalEngine(generator), settings), http=ImpatientProtocol)
    server.socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )  # inherited by its connections
    with server as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        reader = sent(url, "/v1/completions", LARGE | {"stream": stream}, receive_bytes=4096)
        wait_until(lambda: metrics_of(client)["readers_cut_total"] == 1)
        wait_until_idle(client)
        reader.close()
        assert client.post("/v1/completions", json=SMALL).status_code == 200
        assert metrics_of(client)["readers_cut_total"] == 1


def test_leaving_while_uploading_is_no_fault(served, caplog):
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


def test_a_body_with_two_lengths_is_refused(served):
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


def test_health_answers_head(served):
    answer = served.client.head("/health")
    assert answer.status_code == 200 and not answer.content


ENDLESS = """
import asyncio, sys, uvicorn
from hf_slospec.server.connections import SignalledServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await asyncio.sleep(1e6)

config = uvicorn.Config(
    app, port=int(sys.argv[1]), lifespan="off", timeout_graceful_shutdown=1e6, log_level="warning"
)
SignalledServer(config, at_signal=lambda: print("stopping", flush=True)).run()
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", ENDLESS, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(port))
        with connected(url) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"begun" not in answer:
                answer += connection.recv(1024)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == b"stopping\n"
            assert process.poll() is None  # it lets the request finish
            process.send_signal(second)
            assert process.wait(WAIT_S) == -second
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Stopping:
    """Serves an application by a SignalledServer inside of the context, in a thread."""

    def __init__(self, app, timeout_s=120):
        self.listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=timeout_s,
            http=ImpatientProtocol,
        )
        refuse = partial(setattr, app.state, "is_stopping", True)
        self.server = SignalledServer(config, at_signal=refuse)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()


def test_a_stopping_server_ends_what_has_begun_and_answers_503(generator):
    app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
    body = LARGE | {"logprobs": None, "echo": False, "max_tokens": 300, "stream": True}
    with Stopping(app) as stopping, httpx.Client(base_url=stopping.url, timeout=WAIT_S) as client:
        assert client.get("/health").status_code == 200
        idle = connected(stopping.url)
        with httpx.stream(
            "POST", f"{stopping.url}/v1/completions", json=body, timeout=WAIT_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            with generator.decoder.speculator.lock:  # no step runs meanwhile
                stopping.server.should_exit = True
                assert not idle.recv(1)  # connections that wait for a request are closed
                idle.close()
                with httpx.Client(base_url=stopping.url, timeout=WAIT_S) as late:
                    refused = [
                        late.get("/health"), late.post("/v1/completions", json=SMALL), late.get("/v1/models"),
                        late.post("/v1/responses", json={"input": "x"}),
                    ]  # fmt: skip
                    of_anthropic = late.post("/v1/messages", json={"messages": [], "max_tokens": 1})
                    assert (
                        late.get("/metrics").status_code == late.get("/version").status_code == 200
                    )
            for each in refused:
                assert each.status_code == 503 and each.headers["connection"] == "close"
                assert (
                    int(each.headers["retry-after"]) > 0
                    and each.json()["error"]["code"] == "stopping"
                )
            assert (
                of_anthropic.status_code == 503
                and of_anthropic.json()["error"]["type"] == "overloaded_error"
            )
            *_, done = filter(None, lines)
        assert done == "data: [DONE]"
        stopping.thread.join(WAIT_S)
        assert not stopping.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def is_listening(port):
    try:
        connected(f"http://127.0.0.1:{port}").close()
    except ConnectionRefusedError:
        return False
    return True
