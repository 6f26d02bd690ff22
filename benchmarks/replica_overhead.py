"""What replicas cost beside the local server: seconds to start, memory, and milliseconds per
request and token.

    python benchmarks/replica_overhead.py --json benchmarks/results/replica-overhead-cpu-2core.json

The embedded pair in fp32. The same streamed requests go to ``hf_slospec serve`` and
``hf_slospec serve --replicas 1``, each in processes of its own, in turns.
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
import psutil
from http_overhead import over_http

from hf_slospec.cli.benchmark import provenance

PORTS = {"local": 8531, "replica": 8532}
STREAMS = (1, 16)
TOKENS = (1, 32)
WAIT_S = 300.0


def start(name: str) -> tuple[subprocess.Popen[bytes], float]:
    """Start a server, and return its process and the seconds until it answers."""
    command = [sys.executable, "-m", "hf_slospec", "serve", "--dtype", "float32", "--port", str(PORTS[name]),
               "--config", '{"kept_tokens": 0}']  # fmt: skip
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        command + (["--replicas", "1"] if name == "replica" else []), stderr=subprocess.DEVNULL
    )
    while True:
        try:
            if httpx.get(f"{url_of(name)}/health").status_code == 200:
                return process, time.perf_counter() - begun_s
        except httpx.HTTPError:
            pass
        assert process.poll() is None and time.perf_counter() - begun_s < WAIT_S
        time.sleep(0.2)


def url_of(name: str) -> str:
    return f"http://127.0.0.1:{PORTS[name]}"


def memory_mib(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the unshared memory of a server's processes, by what they are."""
    parts: dict[str, float] = {}
    own = psutil.Process(process.pid)
    for one in (own, *own.children(recursive=True)):
        title = " ".join(one.cmdline())
        kind = (
            "replica"
            if ":Model" in title
            else "front"
            if ":HTTP" in title
            else "server"
            if one == own
            else "Ray"
        )
        parts[kind] = parts.get(kind, 0.0) + one.memory_full_info().uss / 2**20
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--requests", type=int, default=4, help="of each stream, one after the other"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    servers = {}
    rows: list[dict[str, Any]] = []
    try:
        started = {name: start(name) for name in PORTS}
        servers = {name: process for name, (process, _) in started.items()}
        start_s = {name: seconds for name, (_, seconds) in started.items()}
        print(
            "| streams | tokens | local, ms per request | replica, ms per request | added per request |"
        )
        print("|---|---|---|---|---|")
        for streams in STREAMS:
            for tokens in TOKENS:
                pairs = []
                for repeat in range(arguments.repeats + 1):
                    pair = [
                        asyncio.run(over_http(url_of(name), streams, arguments.requests, tokens))
                        for name in PORTS
                    ]
                    pairs += [pair] if repeat else []
                scale = 1e3 / (streams * arguments.requests)
                row = dict(
                    streams=streams, tokens=tokens,
                    local_ms=scale * median(a for a, _ in pairs), replica_ms=scale * median(b for _, b in pairs),
                    added_ms=scale * median(b - a for a, b in pairs),
                )  # fmt: skip
                rows.append(row)
                print(
                    "| {streams} | {tokens} | {local_ms:.1f} | {replica_ms:.1f} | {added_ms:.2f} |".format(
                        **row
                    ),
                    flush=True,
                )
        memory = {name: memory_mib(process) for name, process in servers.items()}
        print(json.dumps({"start_s": start_s, "memory_mib": memory}, indent=1))
    finally:
        for process in servers.values():
            process.terminate()
            process.wait(WAIT_S)
    if arguments.json:
        facts = provenance(repeats=arguments.repeats, requests=arguments.requests)
        results = {"rows": rows, "start_s": start_s, "memory_mib": memory}
        arguments.json.write_text(
            json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
