"""Stress test of the server: users that stream, disconnect, read slowly, chat and send rubbish;
nothing lost, no leak.

    python benchmarks/server_soak.py [--minutes 15] [--json benchmarks/results/server-soak-cpu-2core.json]

The server is ``hf_slospec serve`` in a process of its own, on the embedded pair in fp32, with all
invariants checked in every step. Greedy texts are compared with those of stock ``generate``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from local_server import local_server

from hf_slospec import load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance

USERS = 12
LONGEST = 32
SAMPLE_S = 5.0
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CONFIG = {"kv_tokens": 6_000, "max_queue": 64, "check_invariants": True}


class Users:
    """What users do, and what came of it."""

    def __init__(self, client: httpx.AsyncClient, prompts: list[str], texts: list[str], seed: int):
        self.client, self.prompts, self.texts, self.rng = (
            client,
            prompts,
            texts,
            random.Random(seed),
        )
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.kinds: list[Callable[[], Awaitable[str]]] = [
            self.whole, self.whole, self.streamed, self.streamed, self.leaving, self.leaving_whole, self.slow,
            self.chat, self.choices, self.json, self.rubbish, self.silent,
        ]  # fmt: skip

    async def act(self, until_s: float) -> None:
        """Do one thing after another until the time is over."""
        while time.monotonic() < until_s:
            kind = self.rng.choice(self.kinds)
            try:
                outcome = await kind()
            except httpx.HTTPError as error:
                outcome = f"FAILED {type(error).__name__}"
            self.outcomes[f"{kind.__name__}: {outcome}"] += 1

    def body(self) -> tuple[dict[str, Any], str]:
        """Return a greedy completion's body, and the text that must come."""
        which = self.rng.randrange(len(self.prompts))
        slo = {"slo_tpot": self.rng.choice([1e-6, 0.05, 1.0])} if self.rng.random() < 0.5 else {}
        return {
            "prompt": self.prompts[which],
            "max_tokens": LONGEST,
            "temperature": 0,
        } | slo, self.texts[which]

    async def whole(self) -> str:
        body, text = self.body()
        answer = await self.client.post("/v1/completions", json=body)
        return self._checked(answer, lambda found: found["choices"][0]["text"] == text)

    async def choices(self) -> str:
        body, _ = self.body()
        more = {
            "n": 3,
            "temperature": 1.0,
            "seed": self.rng.randrange(99),
            "logprobs": 2,
            "echo": True,
        }
        answer = await self.client.post("/v1/completions", json=body | more)
        return self._checked(answer, lambda found: len(found["choices"]) == 3)

    async def json(self) -> str:
        messages = [{"role": "user", "content": self.rng.choice(self.prompts)}]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"messages": messages, "response_format": form, "max_tokens": 200}
        answer = await self.client.post("/v1/chat/completions", json=body)
        return self._checked(
            answer, lambda found: "ok" in json.loads(found["choices"][0]["message"]["content"])
        )

    async def chat(self) -> str:
        messages: list[dict[str, str]] = []
        for _ in range(self.rng.randrange(1, 5)):
            messages.append({"role": "user", "content": self.rng.choice(self.prompts)})
            body = {"messages": messages, "max_tokens": 16, "temperature": 0}
            answer = await self.client.post("/v1/chat/completions", json=body)
            if (
                outcome := self._checked(
                    answer, lambda found: "content" in found["choices"][0]["message"]
                )
            ) != "right":
                return outcome
            messages.append(
                {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
            )
        return "right"

    async def streamed(self, pause_s: float = 0.0, lines_at_most: float = float("inf")) -> str:
        body, text = self.body()
        found = ""
        count = 0
        async with self.client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as answer:
            self.statuses[answer.status_code] += 1
            if answer.status_code == 429:
                return "queue full"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    found += choices[0]["text"] if choices else ""
                count += 1
                if count > lines_at_most:
                    return "left"
                await asyncio.sleep(pause_s)
        return "right" if found == text else "WRONG"

    async def slow(self) -> str:
        return await self.streamed(pause_s=0.05)

    async def leaving(self) -> str:
        return await self.streamed(lines_at_most=self.rng.randrange(6))

    async def leaving_whole(self) -> str:
        body, _ = self.body()
        try:
            await asyncio.wait_for(
                self.client.post("/v1/completions", json=body), self.rng.uniform(0.0, 0.2)
            )
        except TimeoutError:
            return "left"
        return "right"

    async def rubbish(self) -> str:
        content = self.rng.choice(
            [b"{", b"\xff\xfe", b"[" * 50_000, b'{"prompt": 1e999}', b'{"prompt": "x", "n": -1}']
        )
        path = self.rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"])
        answer = await self.client.post(
            path, content=content, headers={"Content-Type": "application/json"}
        )
        self.statuses[answer.status_code] += 1
        return "refused" if 400 <= answer.status_code < 500 else "WRONG"

    async def silent(self) -> str:
        url = self.client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        writer.close()
        return "closed"

    def _checked(self, answer: httpx.Response, is_right: Callable[[Any], bool]) -> str:
        self.statuses[answer.status_code] += 1
        if answer.status_code == 429:
            return "queue full"
        return "right" if answer.status_code == 200 and is_right(answer.json()) else "WRONG"


async def soak(url: str, process: psutil.Process, seconds: float, seed: int) -> dict[str, Any]:
    """Let the users act, and return outcomes, statuses and the server's memory over time."""
    target, _, tokenizer = load_tiny_pair()
    prompts = [text[:80] for text in tiny_prompts()[:8]]
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    memory: list[int] = []
    limits = httpx.Limits(max_connections=4 * USERS)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        users = Users(client, prompts, texts, seed)
        until_s = time.monotonic() + seconds

        async def watch() -> None:
            while True:
                memory.append(process.memory_info().rss)
                await asyncio.sleep(SAMPLE_S)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(users.act(until_s) for _ in range(USERS)))
        watching.cancel()
        for _ in range(100):  # cancelled requests leave at the next step
            metrics = (await client.get("/metrics")).text
            left = [
                line for line in metrics.splitlines() if line.startswith("hf_slospec:num_requests_")
            ]
            if all(line.endswith(" 0.0") for line in left):
                break
            await asyncio.sleep(0.1)
    counts = {
        name: dict(sorted(counter.items()))
        for name, counter in vars(users).items()
        if name in ("outcomes", "statuses")
    }
    return counts | {
        "left": left,
        "resident_bytes": memory,
        "growth": memory[-1] / memory[len(memory) // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with local_server("--dtype", "float32", "--config", json.dumps(CONFIG)) as (url, server):
        found = asyncio.run(
            soak(url, psutil.Process(server.pid), 60 * arguments.minutes, arguments.seed)
        )
        server.terminate()
        found["exit"] = server.wait(120)
    memory = found["resident_bytes"]
    print(
        json.dumps(
            {name: value for name, value in found.items() if name != "resident_bytes"}, indent=1
        )
    )
    print(f"memory {memory[0] / 2**20:.0f} .. {memory[-1] / 2**20:.0f} MiB")
    if arguments.json:
        facts = provenance(minutes=arguments.minutes, seed=arguments.seed, users=USERS)
        arguments.json.write_text(json.dumps({"provenance": facts} | found, indent=1) + "\n")
    assert not [
        name for name in found["outcomes"] if name.split(": ")[1].isupper() or "FAILED" in name
    ], found["outcomes"]
    assert not [status for status in found["statuses"] if status >= 500], found["statuses"]
    assert all(line.endswith(" 0.0") for line in found["left"]), found["left"]


if __name__ == "__main__":
    main()
