"""Bad requests, disconnects, keys and limits: a clear answer, and nothing else is disturbed."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from hf_slospec import QueueFull, SLOSpecGenerator, tiny_prompts
from hf_slospec.server import connections, reading
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.options import SLOLimits
from tests.server.conftest import KEY, STRICT_KEY, Served, listening

PROMPT = tiny_prompts()[0][:60]
CHAT: dict[str, Any] = dict(messages=[{"role": "user", "content": "x"}])
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completions", dict(prompt=""), "prompt"),
    ("completions", dict(prompt=[]), "prompt"),
    ("completions", dict(prompt=[10**6]), "10000"),
    ("completions", dict(prompt=[-1]), "prompt"),
    ("completions", dict(prompt=7), "prompt"),
    ("completions", dict(), "prompt"),
    ("completions", dict(prompt="x", temperature=-1), "temperature"),
    ("completions", dict(prompt="x", temperature="hot"), "temperature"),
    ("completions", dict(prompt="x", temperature=1e300), "temperature"),
    ("completions", dict(prompt="x", repetition_penalty=1e-300), "repetition_penalty"),
    ("completions", dict(prompt="x", top_p=0), "top_p"),
    ("completions", dict(prompt="x", n=0), "n"),
    ("completions", dict(prompt="x", n=2, best_of=5), "best_of"),
    ("completions", dict(prompt="x", suffix="y"), "suffix"),
    ("completions", dict(prompt="x", logprobs=1000), "logprobs"),
    ("completions", dict(prompt="x", max_tokens=10**6), "max_tokens"),
    ("completions", dict(prompt="x", max_tokens=0), "max_tokens"),
    ("completions", dict(prompt="x", max_tokens=4, min_tokens=5), "min_tokens"),
    ("completions", dict(prompt="x", stop=[""]), "stop"),
    ("completions", dict(prompt="x", logit_bias={"99999999": 1}), "logit_bias"),
    ("completions", dict(prompt="x", logit_bias={"a": 1}), "logit_bias"),
    ("completions", dict(prompt="x", logit_bias={"1": 1000}), "logit_bias"),
    ("completions", dict(prompt="x", slo_tpot=0), "slo_tpot"),
    ("completions", dict(prompt="x", slo_tpot=5e-324), "slo_tpot"),
    ("completions", dict(prompt="x", slo_ttft=5e-324), "slo_ttft"),
    ("completions", dict(prompt="x", slo_tpot=-1.5), "slo_tpot"),
    ("completions", dict(prompt="x", slo_tpot=[]), "slo_tpot"),
    ("completions", dict(prompt="x", slo_tpot=[{"slo_tpot": -1.0}]), "slo_tpot"),
    ("completions", dict(prompt="x", slo_tpot=[{"slo_tpot": 1.0, "slo_ttft": 0}]), "slo_ttft"),
    ("completions", dict(prompt="x", slo_tpot=[{"slo_tpot": 1.0}, {"slo_tpot": 1.0}]), "slo_tpot"),
    (
        "completions",
        dict(prompt="x", slo_tpot=[{"slo_tpot": 1.0, "until": "x", "tokens": 1}]),
        "slo_tpot",
    ),
    ("completions", dict(prompt="x", stream_options={"include_usage": True}), "stream_options"),
    ("completions", dict(prompt="x", guided_json={}), "guided_json"),
    (
        "completions",
        dict(prompt="x", response_format={"type": "json_object"}, ignore_eos=True),
        "response_format",
    ),
    ("completions", dict(prompt="x " * 30_000), "reduce the length of the prompt"),
    ("chat/completions", dict(messages=[]), "messages"),
    ("chat/completions", CHAT | dict(response_format={"type": "json_schema"}), "response_format"),
    ("chat/completions", CHAT | dict(tool_choice="required"), "tool_choice"),
    ("chat/completions", CHAT | dict(top_logprobs=2), "top_logprobs"),
    (
        "chat/completions",
        CHAT | dict(chat_template_kwargs={"chat_template": "{{ 1 / 0 }}"}),
        "chat_template",
    ),
    (
        "chat/completions",
        dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "image_url.url",
    ),
    (
        "chat/completions",
        dict(messages=[{"role": "user", "content": [{"type": "video_url"}]}]),
        "type",
    ),
]


@pytest.mark.parametrize(("path", "body", "named"), BAD, ids=lambda value: str(value)[:60])
def test_bad_fields_are_named(served: Served, path: str, body: dict[str, Any], named: str) -> None:
    answer = served.client.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert named in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("slo_tpot", "fast", "slo_tpot"),
        ("slo_tpot", [{"slo_tpot": "fast"}], "slo_tpot.0.slo_tpot"),
        ("stop", 3, "stop"),
        ("prompt", [[5], [6, "x"]], "prompt.1.1"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("n", 1000, "n"),
    ],
)
def test_errors_name_fields_and_no_types(
    served: Served, field: str, value: Any, param: str
) -> None:
    error = served.client.post("/v1/completions", json={"prompt": "x", field: value}).json()[
        "error"
    ]
    assert error["param"] == param
    assert not any(
        name in error["message"] for name in ("constrained", "list[", "SLOStage", ".str")
    ), error


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"null", b'{"prompt": "x"' + b"}" * 9, b"[" * 100_000, b'{"prompt": "\xff\xfe"}',
        b'{"prompt": NaN}', b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda content: repr(content[:16]),
)  # fmt: skip
def test_what_is_no_json_is_refused(served: Served, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = served.client.post(
            path, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_unknown_models_paths_and_methods(served: Served) -> None:
    answer = served.client.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert answer.status_code == 404 and "'tiny'" in answer.json()["error"]["message"]
    assert served.client.get("/v1/nothing").status_code == 404
    assert served.client.get("/v1/nothing").json()["error"]["message"]
    assert served.client.get("/v1/completions").status_code == 405


def test_keys_and_their_limits(guarded: Served) -> None:
    client = guarded.client
    body = {"prompt": PROMPT, "max_tokens": 3}
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY[:-1]}):
        for path in ("/v1/completions", "/tokenize"):
            answer = client.post(path, json={"prompt": "x"}, headers=header)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in answer.text
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


def test_large_bodies_are_refused(guarded: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = guarded.client.post("/v1/completions", json={"prompt": "x" * 5000}, headers=headers)
    assert answer.status_code == 413 and "4096 bytes" in answer.json()["error"]["message"]


def wait_until_idle(generator: SLOSpecGenerator) -> None:
    deadline_s = time.monotonic() + 60
    while (stats := generator.stats()).running or stats.waiting:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels(served: Served, stream: bool) -> None:
    before = served.generator.stats().finished.get("cancelled", 0)
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
    if stream:
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(Exception, match="timed out"):
            served.client.post("/v1/completions", json=body, timeout=0.3)
    wait_until_idle(served.generator)
    assert served.generator.stats().finished["cancelled"] == before + 2


def test_a_full_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise QueueFull("full")

    monkeypatch.setattr(served.generator, "submit", full)
    answer = served.client.post("/v1/completions", json={"prompt": PROMPT})
    assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0


def test_errors_of_a_running_request_end_its_stream_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = served.generator.submit

    def failing(*arguments: Any, **options: Any) -> Any:
        handle = submit(*arguments, **options)
        handle.fail(RuntimeError("a fault of its own"))
        return handle

    monkeypatch.setattr(served.generator, "submit", failing)
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    assert served.client.post("/v1/completions", json=body).status_code == 500
    with served.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert (
        json.loads(lines[-2][6:])["error"]["type"] == "internal_error"
        and lines[-1] == "data: [DONE]"
    )
    monkeypatch.undo()
    assert (
        served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code
        == 200
    )


def test_silent_connections_are_closed_and_hold_up_no_request(
    generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
    with listening(app, http=connections.ImpatientProtocol) as url:
        host, port = url.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(40)]
        for number, each in enumerate(silent):
            each.settimeout(60.0)
            if number % 2:
                each.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                )  # and no more of the head
        with httpx.Client(base_url=url, timeout=120.0) as client:
            body = {"prompt": "x", "max_tokens": 40, "min_tokens": 40, "temperature": 0}
            for _ in range(3):  # longer than the patience, and on one connection
                assert client.post("/v1/completions", json=body).status_code == 200
        for each in silent:
            assert not each.recv(1024)  # closed
            each.close()


def test_no_more_connections_are_taken_than_there_is_room_for(
    generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 3)
    app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
    with listening(app, http=connections.ImpatientProtocol) as url:
        host, port = url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(3)]
        time.sleep(0.2)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            httpx.get(f"{url}/health", timeout=60.0)
        for each in held:
            each.close()


def test_bodies_that_do_not_arrive_are_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BODY_S", 0.3)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as connection:
        head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 50"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_no_path_leads_around_the_key(generator: SLOSpecGenerator) -> None:
    key = "k\u00e9y"
    body = {"prompt": "x", "max_tokens": 2}
    app = make_app(
        LocalEngine(generator), ServerSettings(model_name="tiny", api_keys={key: SLOLimits()})
    )
    with (
        listening(app, root_path="/llm") as url,
        httpx.Client(base_url=url, timeout=60.0) as client,
    ):
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
