"""Replicas on a local Ray: answers, bursts, deaths, scaling down, deploys and the end of the
server, for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import ray

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.replicas import ReplicaOptions
from hf_slospec.replicas.start import served
from tests.support.paths import ROOT
from tests.support.served_pair import PROMPTS, alone

WAIT_S = 600.0  # far more than anything here takes
# No compiler runs beside the replicas, and none goes on after them.
CONFIG = SLOSpecConfig(kv_tokens=20_000, compile=False)
OPTIONS = ReplicaOptions(
    dtype="float32", replicas=2, cpus=0.1, threads=1, drain_s=WAIT_S, config=CONFIG
)


@pytest.fixture(scope="module")
def url(free_port, pair):
    _ = SLOSpecGenerator(
        *pair, OPTIONS.config
    ).decoder.speculator.costs  # measured here, for all replicas
    with served(OPTIONS, "127.0.0.1", free_port) as address:
        yield address


@pytest.fixture(scope="module")
def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def body_of(index, tokens=60, **fields):
    body = {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": tokens,
        "temperature": 0,
    } | fields
    if index % 2:
        body |= {"temperature": 1.0, "seed": index}
    return body


def text_of(pair, body):
    """What stock ``generate`` writes."""
    sampling = (
        dict(do_sample=True, temperature=1.0, top_k=0) if "seed" in body else dict(do_sample=False)
    )
    ids = alone(
        pair, body["prompt"], body.get("seed"), max_new_tokens=body["max_tokens"], **sampling
    )
    return str(pair[2].decode(ids, skip_special_tokens=True))


async def streamed(client, body, begun):
    """Return text and measurements of a streamed answer; ``begun`` is set with its first token."""
    text = ""
    usage = {}
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body | fields) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                begun.set()
                usage = chunk.get("usage") or usage
    return text, usage["metrics"]


def during_streams(url, pair, disturb, number=4, tokens=100):
    """Check that streams which are disturbed once all have begun end as if they were not; return
    measurements.
    """
    bodies = [body_of(index, tokens) for index in range(number)]

    async def run():
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            begun = [asyncio.Event() for _ in bodies]
            pairs = zip(bodies, begun, strict=True)
            streams = asyncio.gather(*(streamed(client, body, event) for body, event in pairs))
            all_begun = asyncio.gather(*(event.wait() for event in begun))
            await asyncio.wait(
                [streams, all_begun], return_when=asyncio.FIRST_COMPLETED
            )  # or one has failed
            await disturb()
            return await streams

    found = asyncio.run(run())
    assert [text for text, _ in found] == [text_of(pair, body) for body in bodies]
    return [metrics for _, metrics in found]


def replica_processes():
    replicas = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, or a zombie
            if any("Replica" in part and ":Model" in part for part in one.cmdline()):
                replicas.append(one)
    return replicas


def num_running(url):
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    return text.count("\nhf_slospec:num_requests_running{")


def wait_until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.5)


def test_answers_are_those_of_generate_and_a_burst_uses_all_replicas(url, pair):
    bodies = [body_of(index, 24, slo_tpot=5.0 if index < 3 else None) for index in range(8)]

    async def run():
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )

    answers = [response.json() for response in asyncio.run(run())]
    assert [answer["choices"][0]["text"] for answer in answers] == [
        text_of(pair, body) for body in bodies
    ]
    metrics = [answer["usage"]["metrics"] for answer in answers]
    assert len({own["replica"] for own in metrics}) == 2
    assert [own["guaranteed"] for own in metrics] == [True] * 3 + [False] * 5
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    assert {own["replica"] for own in metrics} == {
        line.split('replica="')[1].split('"')[0]
        for line in text.splitlines()
        if "num_requests_running{" in line
    }
    assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200


def test_other_machines_reach_none_of_rays_ports(url):
    addresses = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.net_connections(kind="inet")
            addresses += [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]
    assert len(addresses) > 2 * OPTIONS.replicas, "each replica has two, and the node has some"
    assert all(address.removeprefix("::ffff:").startswith("127.") for address in addresses), (
        addresses
    )


def test_slo_that_no_replica_can_guarantee_is_served_as_best_effort(url, pair):
    body = body_of(0, 16, slo_tpot=1e-6)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()
    assert answer["choices"][0]["text"] == text_of(pair, body)
    assert answer["usage"]["metrics"]["guaranteed"] is False
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    declined = [
        line
        for line in text.splitlines()
        if line.startswith("hf_slospec:slo_guarantees_declined_total{")
    ]
    assert [float(line.split()[-1]) for line in declined] == [1.0, 1.0]


@pytest.mark.nightly  # test_faults.py kills stand-ins
def test_replica_that_is_killed_loses_nothing_and_is_replaced(url, pair):
    async def kill():
        os.kill(replica_processes()[0].pid, signal.SIGKILL)

    def some_were_resumed():  # the killed replica may have served none of the streams
        metrics = during_streams(url, pair, kill)
        wait_until(lambda: num_running(url) == 2)
        return any(own["resumed_tokens"] for own in metrics)

    assert any(some_were_resumed() for _ in range(5))


@pytest.mark.nightly
def test_command_deploys_to_a_cluster_and_ends_after_the_last_stream(url, pair):
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "hf_slospec", "serve", "--replicas", "1", "--dtype", "float32",
               "--port", url.rsplit(":", 1)[1], "--config", '{"kv_tokens": 10000, "compile": false}']  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    lines = []

    async def deploy():
        def read():
            for line in process.stderr:
                lines.append(line)
                if line.startswith("address"):
                    return

        await asyncio.to_thread(read)

    try:
        metrics = during_streams(url, pair, deploy)
        assert not any(
            own["resumed_tokens"] for own in metrics
        )  # the replicas that go, two of two, finish them
        assert any(line.startswith("address") for line in lines), lines

        async def end():
            process.send_signal(signal.SIGINT)

        during_streams(url, pair, end, number=2)
        assert process.wait(WAIT_S) == 0
        assert (
            httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 404
        )  # the cluster goes on without it
    finally:
        process.kill()
        process.stderr.close()
