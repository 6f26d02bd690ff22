"""Requests to a replicated server whose replicas fail: is any lost, and is every output that of
``generate``?

    python -m benchmarks.replica_faults --json benchmarks/results/replica-faults-cpu-2core.json
    sudo python -m benchmarks.replica_faults --machines --json
    benchmarks/results/replica-faults-machines-cpu-2core.json

The embedded pair in fp32. Half of the requests are sampled with a seed. By default on a local Ray:
half are streamed, half have SLOs. A replica is killed by SIGKILL, as the system does when memory
runs out; Serve starts another one in its place.

With ``--machines``, on three machines, which are network namespaces (``benchmarks/machines.py``):
streams, and one short request every half second, while a machine is killed or cut off, a replica is
frozen, or packets are delayed and lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import torch

from benchmarks.machines import REPLICA, Machines, enter, machines, missing, wait_until
from hf_slospec import SLOSpecConfig, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.replicas import ReplicaOptions
from hf_slospec.replicas.start import served

PORT = 8517
TIMEOUT_S = 600.0
KEY = "fault"
OPTIONS: dict[str, Any] = {"dtype": "float32", "config": {"kv_tokens": 20_000, "compile": False}}
START_S = 300.0  # seconds for replicas to start, on a busy machine
# New requests during a fault: tokens of each, seconds between two
SHORT_TOKENS = 8
EVERY_S = 0.5
AFTER_S = 12.0  # seconds of new requests after the last act of a fault
Act = Callable[[Machines], Any]


def bodies(number: int, seed: int) -> list[dict[str, Any]]:
    """Return the bodies of requests."""
    rng = random.Random(seed)
    texts = tiny_prompts()
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
        options = dict(
            do_sample=True, temperature=body["temperature"], top_p=body["top_p"], top_k=0
        )
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
            text = whole["choices"][0]["text"]
            usage = whole["usage"]
        else:
            text = ""
            usage = None
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


async def kill_now_and_then(every_s: float, rng: random.Random, kills: list[float]) -> None:
    """Kill a random replica every so many seconds."""
    begun_s = time.perf_counter()
    while True:
        await asyncio.sleep(every_s)
        processes = await asyncio.to_thread(replica_processes)
        if processes:
            os.kill(rng.choice(processes).pid, 9)
            kills.append(time.perf_counter() - begun_s)
            print(f"{kills[-1]:6.1f} s: killed one of {len(processes)} replicas", flush=True)


async def run(
    url: str, requests: list[dict[str, Any]], streams: int, every_s: float, seed: int
) -> dict[str, Any]:
    """Send all requests, ``streams`` at a time, while replicas are killed."""
    kills: list[float] = []
    answers: list[dict[str, Any]] = [{}] * len(requests)
    queue = iter(range(len(requests)))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await send(client, requests[0])
        killer = asyncio.ensure_future(kill_now_and_then(every_s, random.Random(seed), kills))

        async def user() -> None:
            for index in queue:
                answers[index] = await send(client, requests[index])

        begun_s = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(streams)))
        seconds = time.perf_counter() - begun_s
        killer.cancel()
    return {"answers": answers, "kills": kills, "seconds": seconds}


# ---- several machines


def freeze(number: int) -> Act:
    """Return the act that stops or continues the replica of machine 1, as ``number`` says."""
    return lambda made: made.signal(1, number, REPLICA)


def kill(made: Machines) -> None:
    made.signal(1, signal.SIGKILL)


def cut(made: Machines) -> None:
    made.link(1, "down")


def heal(made: Machines) -> None:
    made.link(1, "up")


DELAY = ("delay", "40ms", "loss", "1%")
FAULTS: dict[
    str, list[tuple[float, Act]]
] = {  # acts by name, each with the seconds after the streams have begun
    "none": [],
    "machine killed": [(0.0, kill)],
    "machine cut off": [(0.0, cut)],
    "machine cut off for 20 s": [(0.0, cut), (20.0, heal)],
    "machine cut off for 3 s": [(0.0, cut), (3.0, heal)],
    "replica frozen": [(0.0, freeze(signal.SIGSTOP))],
    "replica frozen for 20 s": [(0.0, freeze(signal.SIGSTOP)), (20.0, freeze(signal.SIGCONT))],
    "40 ms of delay, 1 % loss": [],
}
FRONT_FAULT = "machine with a front killed"


def long_bodies(number: int, tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of streams."""
    texts = tiny_prompts()
    made = []
    for index in range(number):
        body: dict[str, Any] = {
            "model": "tiny", "prompt": f"# {index}\n" + texts[index % len(texts)][:160], "max_tokens": tokens,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        sampling = (
            {"temperature": 1.1, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0}
        )
        made.append(body | sampling)
    return made


async def timed_stream(
    client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event
) -> dict[str, Any]:
    """Return text, replicas' metrics and the longest pause of a stream, or its error."""
    text = ""
    usage = None
    pause_s = 0.0
    last_s = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                now_s = time.monotonic()
                if text:  # the wait for the first token is no pause
                    pause_s = max(pause_s, now_s - last_s)
                last_s = now_s
                text += "".join(choice["text"] for choice in chunk["choices"])
                begun.set()
                usage = chunk.get("usage") or usage
        if usage is None:
            raise RuntimeError("the stream ended without usage")
    except (httpx.HTTPError, RuntimeError) as error:
        begun.set()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "metrics": usage["metrics"], "pause_s": pause_s}


async def during_fault(
    url: str,
    made: Machines,
    acts: Sequence[tuple[float, Act]],
    streams: Sequence[dict[str, Any]],
    short: dict[str, Any],
) -> dict[str, Any]:
    """Send streams, act, and send a short request every half second until all is over."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, headers=headers, limits=limits
    ) as client:
        begun = [asyncio.Event() for _ in streams]
        running = [
            asyncio.ensure_future(timed_stream(client, body, event))
            for body, event in zip(streams, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        is_over = asyncio.gather(*running)
        new: list[asyncio.Future[dict[str, Any]]] = []

        async def probe() -> None:
            while True:
                new.append(asyncio.ensure_future(send(client, short)))
                await asyncio.sleep(EVERY_S)

        begun_s = time.monotonic()
        probing = asyncio.ensure_future(probe())
        for after_s, act in acts:
            await asyncio.sleep(max(begun_s + after_s - time.monotonic(), 0.0))
            await asyncio.to_thread(act, made)
        await asyncio.gather(is_over, asyncio.sleep(AFTER_S))
        probing.cancel()
        return {"streams": is_over.result(), "new": await asyncio.gather(*new)}


def in_namespace(name: str, job: Callable[[], Any]) -> Any:
    """Return what a job returns in a thread of its own, whose sockets belong to a network
    namespace.
    """
    with ThreadPoolExecutor(1, initializer=enter, initargs=(name,)) as pool:
        return pool.submit(job).result()


def num_replicas(made: Machines, url: str) -> int:
    """Return the number of replicas that answer a front."""

    def job() -> int:
        try:
            text = httpx.get(
                f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=30.0
            ).text
        except httpx.HTTPError:
            return 0
        return text.count("\nhf_slospec:num_requests_running{")

    return int(in_namespace(made.names[0], job))


def restore(made: Machines, url: str) -> float:
    """Undo faults, wait until two replicas answer, and return the seconds that this took."""
    begun_s = time.monotonic()
    made.delay(())
    made.link(1, "up")
    made.signal(1, signal.SIGCONT)

    def are_two() -> bool:
        if not any(
            word in command
            for command in made.commands(1).values()
            for word in ("raylet", "ray start")
        ):
            made.signal(1, signal.SIGKILL)
            made.start_ray(
                1
            )  # the node was killed, or has ended itself because it was declared dead
        return num_replicas(made, url) == 2

    time.sleep(10.0)  # for a node that was declared dead to hear of it
    wait_until(are_two, START_S, "two replicas")
    return time.monotonic() - begun_s


def result_of(found: dict[str, Any], texts: Sequence[str], short_text: str) -> dict[str, Any]:
    """Return the figures of a fault."""
    streams = found["streams"]
    new = found["new"]
    lost = [answer["error"] for answer in (*streams, *new) if "error" in answer]
    return dict(
        streams=len(streams),
        equal=sum(answer.get("text") == text for answer, text in zip(streams, texts, strict=True)),
        by_replica=sorted(Counter(answer["metrics"]["replica"] for answer in streams if "metrics" in answer).values()),
        resumed=sum(bool(answer["metrics"]["resumed_tokens"]) for answer in streams if "metrics" in answer),
        longest_pause_s=max((answer["pause_s"] for answer in streams if "pause_s" in answer), default=None),
        new=len(new), new_equal=sum(answer.get("text") == short_text for answer in new),
        longest_new_s=max((answer["seconds"] for answer in new if "seconds" in answer), default=None),
        lost=len(lost), errors=sorted(set(lost)),
    )  # fmt: skip


def serve_command(made: Machines, has_two_fronts: bool) -> list[str]:
    """Return the command that serves on the machines, with the front on the head, or one there and
    one on machine 1.
    """
    if not has_two_fronts:
        options = [
            f"--{name}={json.dumps(value) if name == 'config' else value}"
            for name, value in OPTIONS.items()
        ]
        host = ("--host", made.addresses[0], "--port", str(PORT), "--api-key", KEY)
        return [sys.executable, "-m", "hf_slospec", "serve", "--replicas", "2", *host, *options]
    arguments = OPTIONS | {
        "replicas": 2,
        "fronts": 2,
        "front_resource": "front",
        "api_keys": {KEY: {}},
    }
    application = {
        "name": "hf_slospec",
        "import_path": "hf_slospec.replicas:app",
        "args": arguments,
    }
    deployed = {
        "proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": PORT}, "applications": [application],
    }  # fmt: skip
    path = made.folder / "application.json"
    path.write_text(json.dumps(deployed))  # JSON is YAML
    return [str(Path(sys.executable).parent / "serve"), "run", str(path)]


def on_machines(
    faults: Sequence[str], streams: int, tokens: int, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the results by fault, and save them after each."""
    pair = load_tiny_pair(torch.float32)
    long = long_bodies(streams, tokens)
    short = bodies(1, 0)[0] | {"max_tokens": SHORT_TOKENS}
    texts = [expected(body, pair) for body in long]
    short_text = expected(short, pair)
    results: dict[str, Any] = {}
    for has_two_fronts in (False, True):
        names = [name for name in faults if (name == FRONT_FAULT) == has_two_fronts]
        if not names:
            continue
        with machines(3, fronts=(0, 1)) as made:
            made.start(0, serve_command(made, has_two_fronts), "serve.log")
            url = f"http://{made.addresses[0]}:{PORT}"
            try:
                wait_until(
                    lambda made=made, url=url: num_replicas(made, url) == 2, START_S, "two replicas"
                )
                for name in names:
                    if not made.delay(DELAY if "delay" in name else ()):
                        results[name] = {"not_run": "this kernel has no netem"}
                        continue
                    acts = FAULTS.get(name, [(0.0, kill)])
                    job = partial(asyncio.run, during_fault(url, made, acts, long, short))
                    results[name] = result_of(in_namespace(made.names[0], job), texts, short_text)
                    print(name, json.dumps(results[name]), flush=True)
                    if name != names[-1]:
                        results[name]["restored_s"] = restore(made, url)
                    save(results)
            except TimeoutError:
                print((made.folder / "serve.log").read_text()[-5000:], flush=True)
                raise
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--streams", type=int, default=6, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--machines", action="store_true", help="on three machines; needs root and iproute2"
    )
    parser.add_argument(
        "--tokens", type=int, default=300, help="of each of eight streams, with --machines"
    )
    parser.add_argument(
        "--fault",
        choices=[*FAULTS, FRONT_FAULT],
        action="append",
        help="with --machines; default: all",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.machines:
        if (reason := missing()) is not None:
            parser.error(f"--machines: {reason}")
        faults = arguments.fault or [*FAULTS, FRONT_FAULT]
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit("terminated")
        )  # so that the machines are removed
        results = on_machines(faults, 8, arguments.tokens, partial(write, arguments))
        run = [each for each in results.values() if "not_run" not in each]
        raise SystemExit(any(each["lost"] or each["equal"] < each["streams"] for each in run))
    requests = bodies(arguments.requests, arguments.seed)
    pair = load_tiny_pair(torch.float32)
    texts = [expected(body, pair) for body in requests]
    options = ReplicaOptions(
        dtype="float32",
        replicas=arguments.replicas,
        cpus=0.5,
        threads=1,
        config=SLOSpecConfig(kv_tokens=20_000),
    )
    begun_s = time.perf_counter()
    with served(options, "127.0.0.1", PORT) as url:
        start_s = time.perf_counter() - begun_s
        print(f"{arguments.replicas} replicas after {start_s:.0f} s", flush=True)
        found = asyncio.run(run(url, requests, arguments.streams, arguments.every, arguments.seed))
    answers = found["answers"]
    lost = [answer["error"] for answer in answers if "error" in answer]
    wrong = [
        index
        for index, answer in enumerate(answers)
        if "text" in answer and answer["text"] != texts[index]
    ]
    done = [answer for answer in answers if "text" in answer]
    resumed = [
        answer["metrics"]["resumed_tokens"]
        for answer in done
        if answer["metrics"]["resumed_tokens"]
    ]
    results = dict(
        requests=len(requests), lost=len(lost), different=len(wrong), kills=len(found["kills"]), resumed=len(resumed),
        resumed_tokens=sum(resumed), seconds=found["seconds"], start_s=start_s,
        median_s=median(answer["seconds"] for answer in done), longest_s=max(answer["seconds"] for answer in done),
        errors=sorted(set(lost)),
    )  # fmt: skip
    write(arguments, results)
    raise SystemExit(bool(lost or wrong))


def write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print results, and write them with their provenance if a file was named."""
    print(json.dumps(results, indent=1))
    if arguments.json:
        facts = provenance(
            **{name: value for name, value in vars(arguments).items() if name != "json"}
        )
        arguments.json.write_text(
            json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
