"""Clients that leave, send too much or read nothing, and looks at what a server keeps of them."""

from __future__ import annotations

import json
import re
import socket
import time

WAIT_S = 120.0  # far more than anything here takes
SMALL = {"prompt": "def main():", "max_tokens": 3, "temperature": 0}
PATTERNS = [f".*{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}.*" for i in range(59)]
HARD_SCHEMA = {"type": "string", "allOf": [{"pattern": pattern} for pattern in PATTERNS]}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


def with_schema(schema):
    return CHAT | {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def connected(url, receive_bytes=None):
    """Return a connection, with a receive buffer of so many bytes."""
    host, port = url.removeprefix("http://").split(":")
    own = socket.socket()
    if receive_bytes is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    own.settimeout(WAIT_S)
    try:
        own.connect((host, int(port)))
    except OSError:
        own.close()
        raise
    return own


def sent(url, path, body, key="none", receive_bytes=None):
    """Send a request, and return the connection, on which the answer may be waited for, or not."""
    content = json.dumps(body).encode()
    own = connected(url, receive_bytes)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    own.sendall(head.encode() + content)
    return own


def metrics_of(client):
    """Return the samples at /metrics, by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {re.sub("^hf_slospec:", "", name): float(value) for name, value in pairs}


def wait_until(is_so):
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_until_idle(client):
    """Wait until no request is being prepared, waiting or running."""
    kinds = (
        "num_requests_running",
        "num_requests_waiting",
        "pool_jobs_running",
        "pool_jobs_waiting",
    )

    def is_idle():
        found = metrics_of(client)
        return not any(value for name, value in found.items() if name.startswith(kinds))

    wait_until(is_idle)
