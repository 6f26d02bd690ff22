"""``hf_slospec serve`` in a process of its own, for benchmarks and for scripts that try clients."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
START_S = 300  # the first start on a machine measures the costs of steps
STOP_S = 120


@contextlib.contextmanager
def local_server(
    *options: str, chat_template: str = CHAT_TEMPLATE, log: IO[str] | int = subprocess.DEVNULL
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield address and process of a server of this checkout, the embedded pair's by default; stop
    it afterwards.

    Args:
        options: further options of ``serve``.
        chat_template: a Jinja template.
        log: where its output goes.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(chat_template)
        template.flush()
        command = [
            sys.executable,
            "-m",
            "hf_slospec",
            "serve",
            "--port",
            str(port),
            "--chat-template",
            template.name,
        ]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        url = f"http://127.0.0.1:{port}"
        with running([*command, *options], url, os.environ | {"PYTHONPATH": paths}, log) as process:
            yield url, process


@contextlib.contextmanager
def running(
    command: Sequence[str],
    url: str,
    env: Mapping[str, str],
    log: IO[str] | int = subprocess.DEVNULL,
    start_s: float = START_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process of a server once its ``/health`` answers; stop it and its children
    afterwards.

    Args:
        command: starts the server.
        url: address of the server.
        env: environment of its process.
        log: where its output goes.
        start_s: seconds it may take to start.

    Raises:
        RuntimeError: it did not start.
    """
    process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        _wait_until_healthy(process, url, start_s)
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # children may outlive the server
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, start_s: float) -> None:
    until_s = time.monotonic() + start_s
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start within {start_s:.0f} s; its log says why")
