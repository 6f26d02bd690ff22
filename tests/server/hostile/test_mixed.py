"""Clients of all kinds at once, hostile ones among them: right texts, no fault of the server,
nothing left behind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from hf_slospec import SLOSpecGenerator, tiny_prompts
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.server.choices import Choice
from hf_slospec.server.connections import ImpatientProtocol
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.limits import RequestLimits
from tests.server.conftest import Served, serving
from tests.server.hostile.clients import (
    CHAT,
    HARD_SCHEMA,
    LONG_MINUTES,
    SMALL,
    WAIT_S,
    wait_until_idle,
    with_schema,
)
from tests.server.hostile.test_limits import TOO_MUCH

CLIENTS = 6
ACTS = 8
SEED = 0
GROWTH = 1.25  # the process's memory, from a quarter of the long form to its end
COMPLETION = "/v1/completions"
WORST: list[tuple[str, dict[str, Any]]] = [
    (
        COMPLETION,
        SMALL | {"stop": [f"{i:040d}" for i in range(32)], "max_tokens": 200, "ignore_eos": True},
    ),
    (
        COMPLETION,
        {"prompt": [[5 + i, 6] for i in range(64)], "max_tokens": 200, "ignore_eos": True},
    ),
    (
        COMPLETION,
        {"prompt": "x = 1\n" * 150, "echo": True, "logprobs": 20, "max_tokens": 200, "n": 4},
    ),
    ("/v1/chat/completions", with_schema(HARD_SCHEMA)),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x"}] * 300}),
    ("/tokenize", {"prompt": "x = [1]\n" * 5000, "return_token_strs": True}),
]


@pytest.fixture
def mixed(generator: SLOSpecGenerator) -> Iterator[Served]:
    bounds = RequestLimits(workers=2, waiting=8, schema_s=1, reader_s=5)
    engine = LocalEngine(generator, work=bounds.new_work())
    with serving(engine, ImpatientProtocol, bounds=bounds) as made:
        yield made


class Clients:
    """What clients do, and what came of it."""

    def __init__(self, client: httpx.AsyncClient, texts: dict[str, str]):
        self.client = client
        self.texts = texts
        self.rng = random.Random(SEED)
        self.statuses: Counter[int] = Counter()
        self.wrong = list[Any]()
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.honest,
            self.honest,
            self.stream,
            self.leave,
            self.exceed,
        ]
        self.kinds = kinds

    async def act(self, is_over: Callable[[int], bool]) -> None:
        number = 0
        while not is_over(number):
            # Each of the first acts is another kind, so that a short run has all of them.
            await (
                self.kinds[number] if number < len(self.kinds) else self.rng.choice(self.kinds)
            )()
            number += 1

    def _told(self, status: int) -> bool:
        self.statuses[status] += 1
        return status == 200

    async def honest(self) -> None:
        prompt, text = self.rng.choice(list(self.texts.items()))
        answer = await self.client.post(COMPLETION, json=SMALL | {"prompt": prompt})
        if self._told(answer.status_code) and answer.json()["choices"][0]["text"] != text:
            self.wrong.append((prompt, answer.text))

    async def stream(self) -> None:
        prompt, text = self.rng.choice(list(self.texts.items()))
        body = SMALL | {"prompt": prompt, "stream": True}
        found = ""
        async with self.client.stream("POST", COMPLETION, json=body) as answer:
            if not self._told(answer.status_code):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
        if found != text:
            self.wrong.append((prompt, found))

    async def leave(self) -> None:
        path, body = self.rng.choice(WORST)
        try:
            await asyncio.wait_for(self.client.post(path, json=body), self.rng.uniform(0.0, 0.3))
        except TimeoutError:
            return

    async def exceed(self) -> None:
        _, path, body, _ = self.rng.choice([case for case in TOO_MUCH if case[0] != "schema_s"])
        answer = await self.client.post(path, json=body)
        self._told(answer.status_code)
        if answer.status_code not in (400, 503):
            self.wrong.append((path, answer.text))


def test_mixed_clients(mixed: Served) -> None:
    prompts = [text[:50] for text in tiny_prompts()[:4]]
    texts = {
        prompt: mixed.client.post(COMPLETION, json=SMALL | {"prompt": prompt}).json()["choices"][0][
            "text"
        ]
        for prompt in prompts
    }
    before = kept_objects()
    process = psutil.Process()
    sizes = list[int]()
    end_s = time.monotonic() + 60 * LONG_MINUTES

    async def run() -> Clients:
        async with httpx.AsyncClient(base_url=mixed.url, timeout=WAIT_S) as client:
            clients = Clients(client, texts)

            def is_over(number: int) -> bool:
                sizes.append(process.memory_info().rss)
                return number >= ACTS and time.monotonic() >= end_s

            await asyncio.gather(*(clients.act(is_over) for _ in range(CLIENTS)))
            return clients

    clients = asyncio.run(run())
    assert not clients.wrong
    assert set(clients.statuses) <= {200, 400, 429, 503} and clients.statuses[200] > CLIENTS, (
        clients.statuses
    )
    wait_until_idle(mixed.client)
    assert mixed.client.post(COMPLETION, json=SMALL).status_code == 200
    assert kept_objects() <= before
    if LONG_MINUTES:
        assert sizes[-1] < GROWTH * sizes[len(sizes) // 4]


def kept_objects() -> int:
    """Return how many requests and choices something still refers to."""
    gc.collect()
    return sum(isinstance(each, (Choice, RequestHandle)) for each in gc.get_objects())
