"""How long an honest client waits, and what memory stays, after six abandoned requests of each bad
kind.

    python benchmarks/hostile.py [--target FOLDER --drafter lookup] [--json benchmarks/results/hostile-cpu-2core.json]

The server is ``hf_slospec serve`` in a process of its own. Six requests are sent at once and left
after two seconds; then another client asks for one line. Each kind is sent as it was found (mostly
refused now) and at the limits."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from local_server import local_server

from hf_slospec.cli.benchmark import provenance
from hf_slospec.server.limits import RequestLimits

NUM = 6
LEAVE_S = 2.0
REST_S = 30.0
# goals
ANSWER_S = 2.0
GROWTH = 1.10
LIMITS = RequestLimits()
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
LINE = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
PATTERNS = [f".*{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}.*" for i in range(59)]


def chat(**fields: Any) -> dict[str, Any]:
    """Return a chat's body."""
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200} | fields


def kinds(max_len: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and body of each kind of bad request, for a model that takes so many tokens."""
    schema = {
        "name": "x",
        "schema": {"type": "string", "allOf": [{"pattern": pattern} for pattern in PATTERNS]},
    }
    most = max(16 * max_len, 2**16)
    ids = [5 + i % 50 for i in range(min(max_len - 300, 8000))]
    stops = [f"{i:0{LIMITS.stop_chars}d}" for i in range(LIMITS.stop_strings)]
    choices = {"ignore_eos": True, "max_tokens": 200}
    return {
        "200 stop strings": (COMPLETION, LINE | {"stop": [f"{i:040d}" for i in range(200)]}),
        "stop strings at the limit": (COMPLETION, LINE | choices | {"stop": stops}),
        "20,000 prompts": (COMPLETION, LINE | {"prompt": [[5, 6, 7]] * 20_000}),
        "1.9 million prompts": (COMPLETION, LINE | {"prompt": [[5]] * 1_900_000}),
        "prompts at the limit": (
            COMPLETION,
            LINE | choices | {"prompt": [[5 + i, 6] for i in range(LIMITS.choices)]},
        ),
        "a prompt of 7 MB": (COMPLETION, LINE | {"prompt": "x = 1\n" * 1_160_000}),
        "a prompt at the limit of bytes": (COMPLETION, LINE | {"prompt": "x = 1\n" * (most // 6)}),
        "a prompt that fills the model": (COMPLETION, LINE | choices | {"prompt": ids}),
        "59 patterns": (CHAT, chat(response_format={"type": "json_schema", "json_schema": schema})),
        "a salt of 7 MB": (COMPLETION, LINE | {"cache_salt": "x" * 7_000_000}),
        "echo of a long prompt": (COMPLETION, LINE | {"prompt": ids, "echo": True, "logprobs": 20}),
        "messages at the limit": (
            CHAT,
            chat(messages=[{"role": "user", "content": "x"}] * (most // 60)),
        ),
        "tokens of 1.5 MB": (
            "/tokenize",
            {"prompt": "x = 1\n" * 250_000, "return_token_strs": True},
        ),
        "tokens at the limit": (
            "/tokenize",
            {"prompt": "x = 1\n" * (most // 6), "return_token_strs": True},
        ),
    }


def abandon(url: httpx.URL, path: str, content: bytes) -> None:
    """Send six requests, and leave all after a while."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    connections = []
    for _ in range(NUM):
        own = socket.create_connection((url.host, url.port or 80), timeout=LEAVE_S)
        connections.append(own)
        try:
            own.sendall(head + content)
        except OSError:  # refused, or not read in time
            continue
    time.sleep(LEAVE_S)
    for own in connections:
        own.close()


def memory_of(server: psutil.Process) -> int:
    """Return the resident bytes of a process and its children."""
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


def measure(
    client: httpx.Client, server: psutil.Process, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return seconds of an honest request and bytes of memory, for each kind."""
    max_len = client.get("/v1/models").json()["data"][0]["max_model_len"]

    def ask() -> float:
        begun_s = time.monotonic()
        client.post(COMPLETION, json=LINE).raise_for_status()
        return time.monotonic() - begun_s

    # The K/V pool grows to what requests need, and stays so large: that is no leak, so an honest
    # client fills it first.
    path, body = kinds(max_len)["a prompt that fills the model"]
    client.post(path, json=body | {"n": NUM}).raise_for_status()
    for _ in range(5):
        ask()
    found: dict[str, Any] = {"alone_s": ask(), "kinds": {}}
    for name, (path, body) in kinds(max_len).items():
        before = memory_of(server)
        abandon(client.base_url, path, json.dumps(body).encode())
        answer_s = ask()
        at_once = memory_of(server)
        time.sleep(REST_S)
        after = memory_of(server)
        found["kinds"][name] = {
            "answer_s": answer_s, "bytes_before": before, "bytes_at_once": at_once, "bytes_after": after,
            "growth": after / before, "is_met": answer_s < ANSWER_S and after < GROWTH * before,
        }  # fmt: skip
        say(
            f"{name:32} {answer_s:7.2f} s {before >> 20:6} MiB -> {after >> 20:6} MiB (x {after / before:.2f})"
        )
    found["metrics"] = [
        line
        for line in client.get("/metrics").text.splitlines()
        if "refused" in line or "left" in line
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ["--dtype", arguments.dtype, "--drafter", arguments.drafter]
    options += ["--target", arguments.target] if arguments.target else []
    with (
        local_server(*options) as (url, server),
        httpx.Client(base_url=url, timeout=600.0) as client,
    ):
        found = measure(client, psutil.Process(server.pid), print)
    if arguments.json:
        facts = provenance(
            target=arguments.target, drafter=arguments.drafter, dtype=arguments.dtype
        )
        arguments.json.write_text(json.dumps({"provenance": facts} | found, indent=1) + "\n")
    missed = [name for name, kind in found["kinds"].items() if not kind["is_met"]]
    print(f"goals missed by: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
