"""What HTTP adds to ``submit``: milliseconds per request, and per token with many streams at once.

    python benchmarks/http_overhead.py --json benchmarks/results/http-overhead-cpu-2core.json

The embedded pair in fp32, whose steps take little time. Client and server run in processes of their
own, as they would; the same requests go through ``submit`` in the server's process, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from hf_slospec import SLOSpecGenerator, tiny_prompts
from hf_slospec.cli.benchmark import provenance

STREAMS = (1, 16)


async def direct(generator: SLOSpecGenerator, streams: int, requests: int, tokens: int) -> float:
    """Return the seconds that ``streams`` users need for their requests, one after the other each,
    by ``submit``.
    """

    async def user(place: int) -> None:
        for number in range(requests):
            handle = generator.submit(
                prompt(place, number), max_new_tokens=tokens, min_new_tokens=tokens
            )
            async for _ in handle:
                pass

    return await _timed(user, streams)


async def over_http(url: str, streams: int, requests: int, tokens: int) -> float:
    """Return the same over HTTP, streamed."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:

        async def user(place: int) -> None:
            for number in range(requests):
                body = {
                    "prompt": prompt(place, number), "max_tokens": tokens, "min_tokens": tokens, "temperature": 0,
                    "stream": True,
                }  # fmt: skip
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for _ in response.aiter_lines():
                        pass

        await user(0)  # opens a connection
        return await _timed(user, streams)


async def _timed(user: Any, streams: int) -> float:
    begun_s = time.perf_counter()
    await asyncio.gather(*(user(place) for place in range(streams)))
    return time.perf_counter() - begun_s


def prompt(place: int, number: int) -> str:
    """Return a prompt that no other request has."""
    texts = tiny_prompts()
    return f"# {place} {number}\n" + texts[(place + number) % len(texts)][:200]


SERVER = """
import sys, threading, asyncio, json, socket, uvicorn
sys.path.insert(0, sys.argv[1])
from benchmarks.http_overhead import direct
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.serve import SWITCH_S
import torch
torch.set_num_threads(1)
sys.setswitchinterval(SWITCH_S)
with SLOSpecGenerator(*load_tiny_pair(torch.float32), SLOSpecConfig(kept_tokens=0)) as generator:
    # With the protocol named, asyncio turns Nagle's algorithm off, as for sockets of its own.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP); listener.bind(("127.0.0.1", 0))
    app = make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        print(asyncio.run(direct(generator, *json.loads(line))), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--requests", type=int, default=4, help="of each stream, one after the other"
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    root = str(Path(__file__).resolve().parent.parent)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    rows = []
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"

        def by_submit(*amount: int) -> float:
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps(amount), file=server.stdin, flush=True)
            return float(server.stdout.readline())

        print(
            "| streams | tokens | submit, ms per request | HTTP adds, ms per request | per token |"
        )
        print("|---|---|---|---|---|")
        for streams in STREAMS:
            for tokens in (1, arguments.tokens):
                amount = streams, arguments.requests, tokens
                pairs = []
                for repeat in range(arguments.repeats + 1):
                    one = (by_submit(*amount), asyncio.run(over_http(url, *amount)))
                    pairs += [one] if repeat else []
                plain_s = median(a for a, _ in pairs) / arguments.requests
                added_s = median(b - a for a, b in pairs) / arguments.requests
                num_tokens = streams * tokens
                row = dict(
                    streams=streams, tokens=tokens, submit_ms=1e3 * plain_s,
                    added_ms_per_request=1e3 * added_s / streams,
                    added_ms_per_token=1e3 * added_s / num_tokens,
                )  # fmt: skip
                rows.append(row)
                print(
                    "| {streams} | {tokens} | {submit_ms:.1f} | {added_ms_per_request:.2f} | "
                    "{added_ms_per_token:.3f} |".format(**row)
                )
    finally:
        server.kill()
    if arguments.json:
        facts = provenance(
            repeats=arguments.repeats, requests=arguments.requests, tokens=arguments.tokens
        )
        arguments.json.write_text(json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
