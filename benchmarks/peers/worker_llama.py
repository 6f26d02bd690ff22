"""Worker of llama.cpp: a llama-server of its own, with weights of one type, alone or with one way
of drafting.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import NewTokens, Request, Settings, serve

SLOTS = 8  # rows at once
GREEDY = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}


def start(
    binary: Path, port: int, settings: Settings, kind: str, mode: str
) -> subprocess.Popen[bytes]:
    """Start a llama-server."""
    models = settings.models
    threads = str(settings.threads)
    command = [
        str(binary),
        "-m",
        str(models / f"target-{kind}.gguf"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "-t",
        threads,
        "-tb",
        threads,
        "-np",
        str(SLOTS),
        "-c",
        str(SLOTS * settings.context),
        "--no-webui",
    ]
    method, _, draft_tokens = mode.partition(":")
    command += ["--spec-type", method] if method != "none" else []
    if draft_tokens:
        command += ["-md", str(models / f"draft-{kind}.gguf"), "-td", threads, "-tbd", threads]
        command += ["--spec-draft-n-max", draft_tokens, "--spec-draft-p-min", "0.0"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def fetch(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON that a GET, or a POST of ``body``, answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server has loaded its models; RuntimeError if it exits."""
    while process.poll() is None:
        try:
            fetch(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"llama-server exited with code {process.returncode}")


def main() -> None:
    settings, (kind, mode) = Settings.read()
    binary = (
        settings.folder / ("llama-avx2" if settings.isa == "avx2" else "build/bin") / "llama-server"
    )
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = start(binary, port, settings, kind, mode)
    wait_until_ready(url, process)
    pool = ThreadPoolExecutor(SLOTS)
    ends = {f"[{token}]": token for token in settings.ends}  # texts that to_gguf.py gives to tokens

    def generate(request: Request) -> NewTokens:
        def row(ids: list[int]) -> list[int]:
            body = {"prompt": ids, "n_predict": request["new_tokens"], "stop": list(ends), **GREEDY}
            answer = fetch(
                f"{url}/completion", body | {"cache_prompt": False, "return_tokens": True}
            )
            tokens: list[int] = answer["tokens"]
            return tokens

        return list(pool.map(row, request["ids"]))

    lines = (version.stdout + version.stderr).splitlines()
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    serve(
        generate,
        versions=[line for line in lines if line.startswith("version")],
        kernels=sorted({line.split("/")[-1] for line in maps if "/libggml-cpu" in line}),
    )


if __name__ == "__main__":
    main()
