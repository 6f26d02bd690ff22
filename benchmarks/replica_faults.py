"""Requests to a replicated server while its replicas are killed: is any lost, and is every output that of ``generate``?

    python benchmarks/replica_faults.py --json benchmarks/results/replica-faults-cpu-2core.json

The embedded pair in fp32, on a local Ray. Half of the requests are sampled with a seed, half are streamed, half have
SLOs. A replica is killed by SIGKILL, as the system does when memory runs out; Serve starts another one in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import torch

from hf_slospec import SLOSpecConfig, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.replicas import ReplicaOptions
from hf_slospec.replicas.start import served

PORT = 8517
TIMEOUT_S = 600.0


def bodies(number: int, seed: int) -> list[dict[str, Any]]:
    """Return the bodies of requests."""
    rng, texts = random.Random(seed), tiny_prompts()
    made = []
    for index in range(number):
        body: dict[str, Any] = {
            "model": "tiny", "prompt": f"# {index}\n" + texts[index % len(texts)][:160],
            "max_tokens": rng.randint(24, 120), "temperature": 0, "stream": index % 4 >= 2,
        }  # fmt: skip
        if index % 2:
            body |= {"temperature": 1.1, "top_p": 0.95, "seed": index}
        if index % 8 >= 4:
            body["slo_tpot"] = rng.choice([0.05, 0.2, 1.0])
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        made.append(body)
    return made


def expected(body: dict[str, Any], pair: tuple[Any, Any, Any]) -> str:
    """Return the text that stock ``generate`` gives."""
    target, _, tokenizer = pair
    inputs = tokenizer(body["prompt"], return_tensors="pt")
    options: dict[str, Any] = {"do_sample": False}
    if "seed" in body:
        torch.manual_seed(body["seed"])
        options = dict(do_sample=True, temperature=body["temperature"], top_p=body["top_p"], top_k=0)
    out = target.generate(**inputs, max_new_tokens=body["max_tokens"], **options)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return text, metrics and seconds of one request, or its error."""
    begun_s = time.perf_counter()
    try:
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            whole = response.json()
            text, usage = whole["choices"][0]["text"], whole["usage"]
        else:
            text, usage = "", None
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                stream.raise_for_status()
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise RuntimeError(chunk["error"]["message"])
                        text += "".join(choice["text"] for choice in chunk["choices"])
                        usage = chunk.get("usage") or usage
            assert usage is not None, "the stream ended without usage"
    except (httpx.HTTPError, RuntimeError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "metrics": usage["metrics"], "seconds": time.perf_counter() - begun_s}


def replica_processes() -> list[psutil.Process]:
    """Return the processes of the replicas that run."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any(":Model" in part for part in child.cmdline())]


async def kill(every_s: float, rng: random.Random, kills: list[float]) -> None:
    """Kill a random replica every so many seconds."""
    begun_s = time.perf_counter()
    while True:
        await asyncio.sleep(every_s)
        processes = await asyncio.to_thread(replica_processes)
        if processes:
            os.kill(rng.choice(processes).pid, 9)
            kills.append(time.perf_counter() - begun_s)
            print(f"{kills[-1]:6.1f} s: killed one of {len(processes)} replicas", flush=True)


async def run(url: str, requests: list[dict[str, Any]], streams: int, every_s: float, seed: int) -> dict[str, Any]:
    """Send all requests, ``streams`` at a time, while replicas are killed."""
    kills: list[float] = []
    answers: list[dict[str, Any]] = [{}] * len(requests)
    queue = iter(range(len(requests)))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await send(client, requests[0])
        killer = asyncio.ensure_future(kill(every_s, random.Random(seed), kills))

        async def user() -> None:
            for index in queue:
                answers[index] = await send(client, requests[index])

        begun_s = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(streams)))
        seconds = time.perf_counter() - begun_s
        killer.cancel()
    return {"answers": answers, "kills": kills, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--streams", type=int, default=6, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    requests, pair = bodies(arguments.requests, arguments.seed), load_tiny_pair(torch.float32)
    texts = [expected(body, pair) for body in requests]
    options = ReplicaOptions(
        dtype="float32", replicas=arguments.replicas, cpus=0.5, threads=1, config=SLOSpecConfig(kv_tokens=20_000)
    )
    begun_s = time.perf_counter()
    with served(options, "127.0.0.1", PORT) as url:
        start_s = time.perf_counter() - begun_s
        print(f"{arguments.replicas} replicas after {start_s:.0f} s", flush=True)
        found = asyncio.run(run(url, requests, arguments.streams, arguments.every, arguments.seed))
    answers = found["answers"]
    lost = [answer["error"] for answer in answers if "error" in answer]
    wrong = [index for index, answer in enumerate(answers) if "text" in answer and answer["text"] != texts[index]]
    done = [answer for answer in answers if "text" in answer]
    resumed = [answer["metrics"]["resumed_tokens"] for answer in done if answer["metrics"]["resumed_tokens"]]
    results = dict(
        requests=len(requests), lost=len(lost), different=len(wrong), kills=len(found["kills"]), resumed=len(resumed),
        resumed_tokens=sum(resumed), seconds=found["seconds"], start_s=start_s,
        median_s=median(answer["seconds"] for answer in done), longest_s=max(answer["seconds"] for answer in done),
        errors=sorted(set(lost)),
    )  # fmt: skip
    print(json.dumps(results, indent=1))
    if arguments.json:
        facts = provenance(**{name: value for name, value in vars(arguments).items() if name != "json"})
        arguments.json.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")
    raise SystemExit(bool(lost or wrong))


if __name__ == "__main__":
    main()
