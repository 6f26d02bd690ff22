"""Bad requests, disconnects, keys and limits: a clear answer, and nothing else is disturbed."""

from __future__ import annotations

import time

import httpx
import pytest

from hf_slospec import tiny_prompts
from hf_slospec.server import connections, reading
from hf_slospec.server.options import SLOLimits
from tests.server.conftest import KEY, STRICT_KEY, serving
from tests.server.hostile.clients import connected

PROMPT = tiny_prompts()[0][:60]


def test_keys_have_limits_of_their_own(guarded):
    client = guarded.client
    body = {"prompt": PROMPT, "max_tokens": 3}
    assert client.get("/health").status_code == client.get("/version").status_code == 200
    own, strict = ({"Authorization": f"Bearer {key}"} for key in (KEY, STRICT_KEY))
    metrics = client.post("/v1/completions", json=body, headers=own).json()["usage"]["metrics"]
    assert metrics["slo_tpot"] == 5.0
    assert (
        client.post("/v1/completions", json=body, headers=strict).json()["usage"]["metrics"][
            "slo_tpot"
        ]
        is None
    )
    answer = client.post("/v1/completions", json=body | {"slo_tpot": 0.1}, headers=strict)
    assert (
        answer.status_code == 400
        and "slo_tpot must be at least 1 s" in answer.json()["error"]["message"]
    )
    assert (
        client.post("/v1/completions", json=body | {"slo_tpot": 0.1}, headers=own).status_code
        == 200
    )


def test_silent_connections_are_closed_and_hold_up_no_request(generator, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    with serving(generator, connections.ImpatientProtocol) as served:
        silent = [connected(served.url) for _ in range(40)]
        for number, each in enumerate(silent):
            if number % 2:
                each.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                )  # and no more of the head
        body = {"prompt": "x", "max_tokens": 40, "min_tokens": 40, "temperature": 0}
        for _ in range(3):  # longer than the patience, and on one connection
            assert served.client.post("/v1/completions", json=body).status_code == 200
        for each in silent:
            assert not each.recv(1024)  # closed
            each.close()


def test_no_more_connections_are_taken_than_there_is_room_for(generator, monkeypatch):
    monkeypatch.setattr(connections, "max_connections", lambda: 3)
    with serving(generator, connections.ImpatientProtocol) as served:
        held = [connected(served.url) for _ in range(3)]
        time.sleep(0.2)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            httpx.get(f"{served.url}/health", timeout=60.0)
        for each in held:
            each.close()


def test_bodies_that_do_not_arrive_are_given_up(served, monkeypatch):
    monkeypatch.setattr(reading, "BODY_S", 0.3)
    with connected(served.url) as connection:
        head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 50"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_no_path_leads_around_the_key(generator):
    key = "k\u00e9y"
    body = {"prompt": "x", "max_tokens": 2}
    with serving(generator, root_path="/llm", api_keys={key: SLOLimits()}) as served:
        client = served.client
        for path in (
            "/v1/completions",
            "/llm/v1/completions",
            "/llm/tokenize",
            "/tokenize",
            "/llm/v1/models",
        ):
            method = "GET" if path.endswith("models") else "POST"
            for headers in ({}, {b"Authorization": key.encode()}, {b"Authorization": b"Bearer x"}):
                answer = client.request(method, path, json=body, headers=headers)
                assert answer.status_code in (401, 404), path
        for scheme in (b"Bearer ", b"bearer "):
            headers = {b"Authorization": scheme + key.encode()}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert client.get("/health").status_code == 200
