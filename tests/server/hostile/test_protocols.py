"""Requests of HTTP/1.0, requests to upgrade and compressed bodies."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib

import httpx
import pytest

from hf_slospec.server.connections import ImpatientProtocol
from hf_slospec.server.limits import RequestLimits
from tests.server.conftest import serving
from tests.server.hostile.clients import SMALL, WAIT_S, connected, metrics_of

BODY = json.dumps(SMALL).encode()
STREAM = json.dumps(SMALL | {"stream": True}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
UPGRADES = [
    H2C,
    WEBSOCKET,
    b"Upgrade: TLS/1.0\r\nConnection: keep-alive, upgrade\r\n",
    b"Upgrade: h2c\r\n",
]
MAX_BYTES = 2**14


@pytest.fixture(scope="module")
def url(generator):
    bounds = RequestLimits(body_bytes=MAX_BYTES)
    with serving(generator, ImpatientProtocol, bounds=bounds) as served:
        yield served.url


def post(extra=b"", body=BODY, version=b"1.1", length=True):
    head = (
        b"POST /v1/completions HTTP/%b\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        % version
    )
    return (
        head + extra + (b"Content-Length: %d\r\n" % len(body) if length else b"") + b"\r\n" + body
    )


def received(connection):
    """Status and JSON of the next response, which has a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(4096)
        assert part, data
        data += part
    head, _, content = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    assert head.startswith(b"HTTP/1.1 "), head
    while len(content) < int(found[1]):
        part = connection.recv(4096)
        assert part
        content += part
    assert len(content) == int(found[1])  # nothing else follows
    return int(head.split()[1]), json.loads(content)


def check_answer(connection):
    status, answer = received(connection)
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_requests_to_upgrade_are_answered_as_they_are(url, upgrade):
    chunked = upgrade + b"Transfer-Encoding: chunked\r\n"
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
    with connected(url) as connection:
        for request in (post(upgrade), post(), post(chunked, chunks, length=False), post(upgrade)):
            connection.sendall(request)  # on one connection, which stays open
            check_answer(connection)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
        assert received(connection)[1]["version"]
        connection.sendall(post(upgrade + b"Connection: close\r\n"))
        check_answer(connection)
        assert not connection.recv(1)


def test_requests_to_upgrade_may_arrive_in_pieces(url):
    request = post(H2C)
    head_len = request.index(b"\r\n\r\n") + 4
    for cuts in ([1], [head_len - 1], [head_len], [head_len + 1], range(1, len(request), 9)):
        with connected(url) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begin = 0
            for cut in [*cuts, len(request)]:
                connection.sendall(request[begin:cut])
                begin = cut
            check_answer(connection)


def everything(url, request):
    """Head and content of a response that the end of the connection ends."""
    data = b""
    with connected(url) as connection:
        connection.sendall(request)
        while part := connection.recv(4096):
            data += part
    head, _, content = data.partition(b"\r\n\r\n")
    return head.lower(), content


@pytest.mark.parametrize(
    "extra", [b"", b"Connection: keep-alive\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"]
)
def test_streams_to_clients_of_http_1_0_end_with_the_connection(url, extra):
    head, content = everything(url, post(extra, STREAM, b"1.0"))
    assert (
        head.startswith(b"http/1.1 200")
        and b"transfer-encoding" not in head
        and b"content-length" not in head
    )
    assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")
    events = [
        json.loads(line.removeprefix("data: ")) for line in content.decode().split("\n\n")[:-2]
    ]
    whole = httpx.post(f"{url}/v1/completions", json=SMALL, timeout=WAIT_S).json()
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_other_responses_to_clients_of_http_1_0_have_a_length(url):
    head, content = everything(url, post(version=b"1.0"))
    assert (
        json.loads(content)["usage"] and b"content-length: %d\r\n" % len(content) in head + b"\r\n"
    )
    head, content = everything(url, b"HEAD /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert head.startswith(b"http/1.1 200") and not content
    assert everything(url, post(body=b"{", version=b"1.0"))[0].startswith(b"http/1.1 400")


def compressed(url, content, encoding="gzip"):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    return httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=WAIT_S)


def test_bodies_may_be_compressed(url):
    plain = compressed(url, BODY, "identity").json()
    for encoding in ("gzip", "x-gzip", "GZIP"):
        answer = compressed(url, gzip.compress(BODY, mtime=0), encoding)
        assert answer.status_code == 200 and answer.json()["choices"] == plain["choices"]
    with connected(url) as connection:  # byte by byte, and without a length
        content = gzip.compress(BODY, mtime=0)
        chunks = b"".join(b"1\r\n%b\r\n" % content[at : at + 1] for at in range(len(content)))
        extra = b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(post(extra, chunks + b"0\r\n\r\n", length=False))
        check_answer(connection)


def test_compressed_bodies_have_the_limit_of_others(url):
    with httpx.Client(base_url=url) as client:
        before = metrics_of(client).get('requests_refused_total{limit="body_bytes"}', 0)
        bombs = [gzip.compress(b"x" * size) for size in (MAX_BYTES + 1, 2**26)]
        assert len(bombs[0]) < 100
        endless = gzip.compress(BODY, mtime=0) + bytes(
            2 * MAX_BYTES
        )  # goes on behind the end of the stream
        empty_blocks = gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * MAX_BYTES  # and has no output
        for content in (*bombs, endless, empty_blocks):
            assert compressed(url, content).status_code == 413
        assert metrics_of(client)['requests_refused_total{limit="body_bytes"}'] == before + 4
    largest = json.dumps(SMALL | {"user": ""}).encode()
    largest = largest.replace(b'""', b'"%b"' % (b"x" * (MAX_BYTES - len(largest))))
    assert len(largest) == MAX_BYTES and compressed(url, gzip.compress(largest)).status_code == 200


ZIPPED = gzip.compress(BODY, mtime=0)
NO_GZIP = [b"", BODY, ZIPPED[:-4], ZIPPED + b"x", ZIPPED * 2, ZIPPED[:-8] + bytes(8)]
OTHERS = ["br", "zstd", "deflate", "gzip, gzip", "identity, gzip", "nonsense"]


@pytest.mark.parametrize(
    ("status", "encoding", "content"),
    [
        *((415, encoding, zlib.compress(BODY)) for encoding in OTHERS),
        *((400, "gzip", content) for content in NO_GZIP),
    ],
)
def test_other_encodings_and_what_is_no_gzip_are_refused(url, status, encoding, content):
    answer = compressed(url, content, encoding)
    assert answer.status_code == status and encoding in answer.json()["error"]["message"]
    assert status == 400 or answer.headers["accept-encoding"] == "gzip"
