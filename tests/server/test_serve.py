"""The command ``serve``: what it refuses, what it says, and how it ends."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from hf_slospec import SLOSpecGenerator, load_tiny_pair
from hf_slospec.server.options import ServeOptions
from hf_slospec.server.serve import welcome
from hf_slospec.tiny.embedded import FOLDER
from tests.support.breadth import quick_or

START_S = 240.0
NO_COMPILER = ["--config", '{"compile": false}']  # it would go on beside other tests


@pytest.mark.parametrize(("is_chat", "is_guarded"), [(True, False), (False, True)])
def test_the_welcome_names_device_dtype_and_a_request_of_the_right_kind(is_chat, is_guarded):
    target, _, tokenizer = load_tiny_pair()
    tokenizer.chat_template = "{{ messages }}" if is_chat else None
    options = ServeOptions(
        target=str(FOLDER / "target"), api_keys={"key": {}} if is_guarded else {}
    )
    assert options.name == "target"  # not the path
    generator = SLOSpecGenerator(target, tokenizer=tokenizer)
    said = dict(line.split(maxsplit=1) for line in welcome(options, generator).splitlines())
    assert (
        said["model"].startswith("target: 6 M parameters, float32, on cpu")
        and said["drafter"] == "prompt lookup"
    )
    curl = shlex.split(said["curl"])
    body = json.loads(curl[-1])
    assert body["model"] == "target" and body["slo_tpot"] > 0
    assert curl[1] == "http://127.0.0.1:8000/v1/" + (
        "chat/completions" if is_chat else "completions"
    )
    assert is_guarded is ("Authorization: Bearer $KEY" in curl)
    if is_chat:
        assert body["messages"] == [
            {"role": "user", "content": "Write a short poem about the sea."}
        ]
    else:
        assert body["prompt"] == "Once upon a time,"
    kind = "chat.completions" if is_chat else "completions"
    ast.parse(said["Python"])
    assert f".{kind}.create(model='target', " in said["Python"]


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


NEW_TOKENS = quick_or(120, 300)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_signal_lets_requests_finish(num_processes, tmp_path):
    port = free_port()
    log = tmp_path / "log"
    options = ["--size", "tiny", "--drafter", "lookup+mtp"]
    drafter = "prompt lookup + MTP layer, "
    if num_processes > 1:
        target, _, tokenizer = load_tiny_pair()
        for part in (target, tokenizer):
            part.save_pretrained(tmp_path / "target")
        options = ["--target", str(tmp_path / "target"), "--tensor-parallel-size", "2"]
        drafter = "prompt lookup"
    options += ["--dtype", "float32", "--port", str(port), *NO_COMPILER]
    torchrun = TORCHRUN if num_processes > 1 else []
    command = [sys.executable, *torchrun, "-m", "hf_slospec", "serve", *options]
    environment = os.environ | {"HF_SLOSPEC_API_KEY": "secret-key"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer secret-key"}
        ) as client:
            wait_for(client, process)
            body = {"prompt": "def main():", "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0,
                    "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
            with client.stream("POST", "/v1/completions", json=body, timeout=START_S) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                *_, last, done = [first, *filter(None, lines)]
        assert (
            done == "data: [DONE]"
            and json.loads(last[6:])["usage"]["completion_tokens"] == NEW_TOKENS
        )
        process.wait(START_S)
    finally:
        process.kill()
        process.wait()
    said = log.read_text()
    assert said.count(f"drafter  {drafter}") == said.count("loading and measuring") == 1
    assert (
        f"http://127.0.0.1:{port}/v1" in said
        and "API key required" in said
        and "secret-key" not in said
    )


def wait_for(client, process):
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None
        try:
            assert client.get("/health").status_code == 200
            return
        except httpx.ConnectError:
            time.sleep(0.2)
    raise AssertionError("the server did not start")
