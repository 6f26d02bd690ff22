"""The pool of work before admission: turns of clients, a bounded queue, and nothing for clients
that have left.
"""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.limits import RequestLimits
from hf_slospec.server.options import SLOLimits
from hf_slospec.server.work import JobSlots, Work
from tests.server.conftest import serving
from tests.server.hostile.clients import (
    SMALL,
    WAIT_S,
    metrics_of,
    sent,
    wait_until,
    wait_until_idle,
)


class Gate:
    """Holds the jobs that go through it, and remembers whose they were."""

    def __init__(self):
        self.is_open = threading.Event()
        self.begun = []

    def __call__(self, name):
        self.begun.append(name)
        assert self.is_open.wait(WAIT_S)
        return name


def run(story):
    return asyncio.run(asyncio.wait_for(story, WAIT_S))


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns():
    async def story():
        gate = Gate()
        work = Work(1, 100)
        jobs = [
            asyncio.ensure_future(work.run(name[0], gate, name))
            for name in ("a0", "a1", "a2", "a3", "b0", "c0")
        ]
        await settled()
        assert work.num_running == 1 and work.num_waiting == 5
        gate.is_open.set()
        assert await asyncio.gather(*jobs) == ["a0", "a1", "a2", "a3", "b0", "c0"]
        assert gate.begun == ["a0", "a1", "b0", "c0", "a2", "a3"]
        await settled()
        assert work.num_running == work.num_waiting == 0

    run(story())


def test_a_client_that_leaves_loses_its_place_and_a_thread_keeps_its_own_until_it_ends():
    async def story():
        gate = Gate()
        work = Work(1, 10)
        undone = []
        running, waiting = (
            asyncio.ensure_future(work.run("a", gate, name, undo=undone.append)) for name in "xy"
        )
        other = asyncio.ensure_future(work.run("b", gate, "z"))
        await settled()
        running.cancel()
        waiting.cancel()
        await settled()
        assert running.cancelled() and waiting.cancelled()
        assert work.num_running == 1 and work.num_waiting == 1 and work.num_dropped == 1
        gate.is_open.set()
        assert await other == "z" and gate.begun == ["x", "z"] and undone == ["x"]

    run(story())


def test_a_place_that_is_left_when_its_turn_comes_goes_on_to_the_next():
    async def story():
        slots = JobSlots(1, 100)
        order = []

        async def take(name):
            async with slots.slot(name[0]):
                order.append(name)

        await slots.enter("a")
        jobs = [asyncio.ensure_future(take(name)) for name in ("a1", "a2", "b1")]
        await settled()
        for job in jobs[:2]:
            job.cancel()
        slots.leave()  # before the cancelled ones have noticed
        await jobs[2]
        await settled()
        assert (
            order == ["b1"]
            and slots.num_running == slots.num_waiting == 0
            and slots.num_dropped == 2
        )

    run(story())


# ---- over HTTP


@pytest.fixture
def narrow(generator):
    """A server with one thread and a queue of three, and a gate before its tokenizer."""
    bounds = RequestLimits(workers=1, waiting=3)
    gate = Gate()
    engine = LocalEngine(generator, work=bounds.new_work())
    own = engine.tokenizer

    class Gated:
        def __getattr__(self, name):
            return getattr(own, name)

        def __call__(self, text, **options):
            gate(text)
            return own(text, **options)

    engine.tokenizer = Gated()
    with serving(engine, bounds=bounds, api_keys={"k1": SLOLimits(), "k2": SLOLimits()}) as served:
        served.client.headers["Authorization"] = "Bearer k1"
        try:
            yield served, gate
        finally:
            gate.is_open.set()


def post(served, key, answers, **fields):
    def ask():
        headers = {"Authorization": f"Bearer {key}"}
        answers.append(
            httpx.post(
                f"{served.url}/v1/completions", json=SMALL | fields, headers=headers, timeout=WAIT_S
            )
        )

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def waiting(served):
    return metrics_of(served.client)['pool_jobs_waiting{pool="work"}']


def test_a_full_pool_answers_503_to_the_greediest_key_and_goes_on(narrow):
    served, gate = narrow
    answers = []
    threads = [post(served, "k1", answers)]
    wait_until(lambda: len(gate.begun) == 1)
    for number in range(3):
        threads.append(post(served, "k1", answers))
        wait_until(lambda number=number: waiting(served) == number + 1)
    others = []
    threads.append(post(served, "k2", others))
    wait_until(lambda: len(answers) == 1)
    assert answers[0].status_code == 503 and int(answers[0].headers["Retry-After"]) > 0
    assert answers[0].json()["error"]["code"] == "busy"
    assert metrics_of(served.client)['pool_jobs_refused_total{pool="work"}'] == 1
    gate.is_open.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
    assert others[0].status_code == 200
    wait_until_idle(served.client)


def test_leaving_a_list_of_prompts_cancels_all_that_it_had_begun(served):
    before = served.generator.stats().finished
    body = {
        "prompt": [[5 + i, 6, 7] for i in range(40)],
        "max_tokens": 500,
        "ignore_eos": True,
        "temperature": 0,
    }
    connection = sent(served.url, "/v1/completions", body)
    wait_until(lambda: served.generator.stats().running > 0)
    connection.close()
    wait_until_idle(served.client)
    after = served.generator.stats().finished
    assert (
        after["cancelled"] > before.get("cancelled", 0)
        and after.get("length", 0) < before.get("length", 0) + 40
    )
