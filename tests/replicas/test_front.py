"""The front over replicas of this process: refusals, deaths and resumption, without Ray."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest

from hf_slospec import (
    InvalidInputError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOStage,
)
from hf_slospec.generate.processors import OccurrencePenalties
from hf_slospec.replicas import replica as replica_module
from hf_slospec.replicas.failover import MAX_FAULTS, ReplicatedDecoding, ReplicatedEngine
from hf_slospec.replicas.messages import Alive, Failed, Report, ToReplica, Update
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.replicas.replica import ORPHAN_S, TICK_S
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from tests.support.breadth import nightly_but, quick_or
from tests.support.served_pair import WAIT_S, alone
from tests.support.stand_ins.replicas import offer_of, order_of, replicated

PROMPT = "def main(argv):\n    "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
}


@pytest.fixture(scope="module")
def two():
    with replicated(2) as made:
        yield made


@pytest.fixture
def engine(two):
    return two[0]


@pytest.fixture
def handle(two):
    two[1].offers.clear()
    two[1].streams.clear()
    two[0].directory.silent.clear()
    yield two[1]
    two[1].dies_after = lambda offer: None
    two[1].rename()


def ids(engine):
    return engine.tokenizer(PROMPT)["input_ids"]


async def until_idle(handle):
    async with asyncio.timeout(WAIT_S):
        while any(
            one.running + one.waiting
            for one in (own.generator.stats() for own in handle.replicas.values())
        ):
            await asyncio.sleep(0.02)


async def decoded(engine, order):
    decoding = await engine.submit(order)
    tokens = [token async for new, _ in decoding.asteps() for token in new]
    return tokens, decoding


CASES = [
    dict(),
    dict(do_sample=True, temperature=1.2, seed=3),
    dict(
        slo_tpot=[SLOStage(slo_tpot=500.0, until="\n"), SLOStage(slo_tpot=900.0, slo_ttft=900.0)],
        logprobs=1,
    ),
    dict(logits_processor=[OccurrencePenalties(8, 0.5, 0.5)]),
]


@pytest.mark.parametrize(
    "options", nightly_but(CASES[1:3], CASES), ids=["-".join(case) or "greedy" for case in CASES]
)
def test_output_goes_on_where_a_replica_died(pair, engine, handle, options):
    whole, undisturbed = asyncio.run(decoded(engine, order_of(ids(engine), **options)))
    if set(options) <= {"do_sample", "temperature", "seed"}:
        stock = {name: value for name, value in options.items() if name != "seed"}
        assert whole == alone(pair, PROMPT, options.get("seed"), max_new_tokens=40, **stock)
    for deaths in ([1, 1, 4], [0, 2], *quick_or([], [[1], [2, 3]])):
        left = list(deaths)
        handle.dies_after = lambda offer, left=left: left.pop(0) if left else None
        tokens, decoding = asyncio.run(decoded(engine, order_of(ids(engine), **options)))
        assert tokens == whole
        assert decoding.num_faults == len(deaths)
        assert (
            decoding.metrics.tokens == len(whole)
            and decoding.finish_reason == undisturbed.finish_reason
        )
        assert (decoding.metrics.resumed > 0) == any(
            number > 1 for number in deaths
        )  # the first answer has no tokens
        assert [each.logprob for each in decoding.logprobs] == pytest.approx(
            [each.logprob for each in undisturbed.logprobs], abs=1e-4
        )
    assert [offer.number for offer in handle.offers] == sorted(
        {offer.number for offer in handle.offers}
    )


def test_json_goes_on_within_its_schema(engine, handle):
    def order():
        made = order_of(ids(engine), do_sample=True, seed=4, eos_token_id=0, max_new_tokens=60)
        return type(made)(made.prompt, made.arguments, SCHEMA)

    whole, _ = asyncio.run(decoded(engine, order()))
    left = [3, 2]
    handle.dies_after = lambda offer: left.pop(0) if left else None
    assert asyncio.run(decoded(engine, order()))[0] == whole


def test_time_goes_on_over_deaths(engine, handle):
    left = [3]
    handle.dies_after = lambda offer: left.pop(0) if left else None
    begun_s = time.monotonic()
    _, decoding = asyncio.run(decoded(engine, order_of(ids(engine), slo_tpot=1.0)))
    seconds = time.monotonic() - begun_s
    metrics = decoding.metrics
    assert 0 < metrics.ttft_s + metrics.tpot_s * (metrics.tokens - 1) <= seconds + 0.1
    progress = handle.offers[-1].progress
    assert (
        sum(progress.acceptance_histogram) <= metrics.steps and progress.drafted <= metrics.drafted
    )


def test_request_that_kills_replicas_is_given_back(engine, handle):
    handle.dies_after = lambda offer: 0
    with pytest.raises(NotRunningError, match=f"{MAX_FAULTS} replicas failed"):
        asyncio.run(decoded(engine, order_of(ids(engine))))
    assert len(handle.offers) == MAX_FAULTS


def test_every_replica_may_refuse_once_before_the_request_is_best_effort(pair, engine, handle):
    tokens, decoding = asyncio.run(decoded(engine, order_of(ids(engine), slo_tpot=1e-6)))
    assert tokens == alone(pair, PROMPT, max_new_tokens=40)
    assert [offer.must_guarantee for offer in handle.offers] == [True, True, False]
    assert {offer.replica for offer in handle.offers[:2]} == {"r0", "r1"}
    assert not decoding.metrics.guaranteed
    handle.offers.clear()
    _, decoding = asyncio.run(decoded(engine, order_of(ids(engine), slo_tpot=5.0)))
    assert decoding.metrics.guaranteed and len(handle.offers) == 1
    handle.offers.clear()
    asyncio.run(decoded(engine, order_of(ids(engine), slo_tpot=1e-6, best_effort=True)))
    assert [offer.must_guarantee for offer in handle.offers] == [False]


def test_only_full_queues_everywhere_are_an_error():
    with replicated(2, max_queue=1, max_batch=1) as (engine, handle):

        async def run():
            prompt = ids(engine)
            busy = [await engine.submit(order_of(prompt, max_new_tokens=4000)) for _ in range(2)]
            for decoding in busy:  # until it runs it fills its replica's queue
                await anext(decoding.asteps())
            orders = (engine.submit(order_of(prompt, max_new_tokens=4000)) for _ in range(8))
            waiting = [await asyncio.gather(order, return_exceptions=True) for order in orders]
            taken = [found for (found,) in waiting if not isinstance(found, QueueFull)]
            assert 1 <= len(taken) <= 4
            for decoding in (*busy, *taken):
                assert isinstance(decoding, ReplicatedDecoding)
                decoding.cancel()
            await until_idle(handle)

        asyncio.run(run())


def test_errors_of_the_request_are_not_tried_elsewhere(engine, handle):
    with pytest.raises(InvalidInputError, match="max_new_tokens"):
        asyncio.run(decoded(engine, order_of(ids(engine), max_new_tokens=10**9)))
    assert len(handle.offers) == 1


def test_cancelled_request_leaves_its_replica(engine, handle):
    async def run():
        decoding = await engine.submit(order_of(ids(engine), max_new_tokens=4000))
        steps = decoding.asteps()
        await anext(steps)
        decoding.cancel()
        await until_idle(handle)
        assert handle.streams[-1].was_cancelled

    asyncio.run(run())


def test_replica_whose_batcher_died_is_unhealthy_and_loses_nothing(pair):
    with replicated(2) as (engine, handle):
        begun = asyncio.Event()

        def dies_after(offer):
            begun.set()

        handle.dies_after = dies_after

        async def run():
            decoding = await engine.submit(order_of(ids(engine), max_new_tokens=60, slo_tpot=5.0))
            tokens = []
            async for new, _ in decoding.asteps():
                if not tokens:
                    await asyncio.to_thread(handle.first().generator.stop, False)
                    dead = handle.replicas.pop("r0")
                    with pytest.raises(NotRunningError):
                        dead.check_health()
                tokens += new
            assert decoding.replica == "r1" and decoding.num_faults == 1
            return tokens

        assert asyncio.run(run()) == alone(pair, PROMPT, max_new_tokens=60)


def test_step_that_hangs_fails_the_health_check(handle):
    replica = handle.first()
    replica.check_health()
    speculator = replica.generator.decoder.speculator
    batcher = replica.generator._service.batcher
    with speculator.lock:
        running = replica.generator.submit(PROMPT, max_new_tokens=4)
        time.sleep(0.3)
        replica.check_health()  # it waits for a generate call, which is no step
    running.result(30)
    batcher.step_begun_s = time.monotonic() - 1.0
    with pytest.raises(NotRunningError, match=r"has not ended for more than 0\.2 s"):
        replica.check_health()
    batcher.step_begun_s = None


def test_reports_contain_what_was_taken(handle, engine):
    replica = handle.first()

    async def run():
        answers = replica.decode(
            offer_of(order_of(ids(engine), max_new_tokens=3000, slo_tpot=5.0), number=7)
        )
        await anext(answers)
        reports = replica.reports(ToReplica("r0"), "test", [])
        report = await anext(reports)
        while isinstance(report, Alive):  # a long step
            report = await anext(reports)
        assert isinstance(report, Report) and report.replica == "r0"
        assert report.seen["test"] == 7 and report.load.guaranteed == ((5.0, 1),)
        await reports.aclose()
        gauges = await replica.record_autoscaling_stats()
        assert set(gauges) == {"missed", "waiting", "utilisation"} and gauges["utilisation"] > 0
        await answers.aclose()

    asyncio.run(run())


def test_replica_that_nobody_asks_for_ends_itself(handle, engine, monkeypatch):
    replica = handle.first()
    most = round(ORPHAN_S / TICK_S)

    def num_ticks():
        count = 0
        while replica.is_wanted_after_tick():
            count += 1
            assert count <= most
        return count

    async def ask():
        reports = replica.reports(ToReplica("r0"), "test", [])
        await anext(reports)
        await reports.aclose()

    assert num_ticks() == most
    replica.check_health()
    assert num_ticks() == most, "Serve has asked"
    asyncio.run(ask())
    assert num_ticks() == most, "a front has asked"
    # A request that it finishes, as it is to end, or that nobody wants
    replica._handles["test", 1] = None
    assert all(replica.is_wanted_after_tick() for _ in range(2 * most))
    del replica._handles["test", 1]
    assert num_ticks() == most

    ended = threading.Event()
    monkeypatch.setattr(replica_module, "_end_process", ended.set)
    replica_module._end_when_orphaned(replica)
    assert ended.wait(WAIT_S)
    replica.check_health()


def test_replica_drops_what_a_front_says_it_has_left(handle, engine):
    """Calls that are cancelled while they run, while they are submitted and before they arrive."""
    replica = handle.first()

    async def run():
        running = replica.decode(offer_of(order_of(ids(engine), max_new_tokens=4000), number=8))
        await anext(running)
        arriving = asyncio.ensure_future(
            anext(replica.decode(offer_of(order_of(ids(engine)), number=9)))
        )
        await asyncio.sleep(0)
        for sender, is_running in (("another", True), ("test", False)):
            reports = replica.reports(ToReplica("r0"), sender, [8, 9, 10])
            await anext(reports)
            await reports.aclose()
            assert (("test", 8) in replica._handles) == is_running
        answers = [answer async for answer in running]
        assert isinstance(answers[-1], Failed) and isinstance(
            answers[-1].error, RequestCancelledError
        )
        assert not isinstance(await arriving, Update)
        late = replica.decode(offer_of(order_of(ids(engine)), number=10))
        assert [answer async for answer in late] == []
        await until_idle(handle)

    asyncio.run(run())


BODIES = [
    ("/v1/completions", dict(prompt=PROMPT, max_tokens=12, temperature=0)),
    (
        "/v1/completions",
        dict(
            prompt=[PROMPT, "import os\n"], max_tokens=9, temperature=0.9, seed=5, n=2, logprobs=2
        ),
    ),
    ("/v1/completions", dict(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)),
    ("/v1/completions", dict(prompt=PROMPT, max_tokens=12, temperature=0, stream=True)),
    ("/v1/completions", dict(prompt=PROMPT, max_tokens=10**9)),
    ("/v1/completions", dict(prompt="")),
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "x"}])),
    ("/tokenize", dict(prompt=PROMPT)),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=str)
def test_answers_are_those_of_the_local_server(engine, handle, path, body):
    local = LocalEngine(handle.first().generator)

    here, there = [
        (answer.status_code, _plain(answer.text)) for answer in _posted((local, engine), path, body)
    ]
    assert _without_floats(here) == _without_floats(there)
    assert _floats(here) == pytest.approx(
        _floats(there), abs=1e-3
    )  # steps of other shapes round logprobs differently


def _posted(engines, path, body):
    """The answers of a server in front of each engine."""

    async def answers():
        found = []
        for own in engines:
            app = make_app(own, ServerSettings(model_name="tiny"))
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost"
            ) as client:
                found.append(await client.post(path, json=body))
        return found

    return asyncio.run(answers())


def _plain(text):
    """An answer without what differs from call to call."""
    if text.startswith("data: "):
        texts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for each in texts for choice in each["choices"])
    whole = json.loads(text)
    for name in ("id", "created", "metrics"):
        whole.pop(name, None)
    if "usage" in whole:
        whole["usage"] = {
            name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")
        }
    return whole


def _floats(answer):
    """All floats of an answer, in its order."""
    if isinstance(answer, (list, tuple, dict)):
        parts = answer.values() if isinstance(answer, dict) else answer
        return [number for part in parts for number in _floats(part)]
    return [answer] if isinstance(answer, float) else []


def _without_floats(answer):
    """An answer with one and the same number in place of each float."""
    return json.loads(json.dumps(answer), parse_float=lambda _: 0.5)


def test_metrics_of_all_replicas_are_in_one_place(engine, handle):
    async def metrics():
        app = make_app(engine, ServerSettings(model_name="tiny"))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return (await client.get("/metrics")).text

    text = asyncio.run(metrics())
    for replica in ("r0", "r1"):
        assert (
            f'hf_slospec:num_requests_running{{engine="0",model_name="tiny",replica="{replica}"}} 0.0'
            in text
        )
    assert text.count("# TYPE hf_slospec:num_requests_running gauge") == 1


def test_engine_without_replicas_takes_nothing(engine):
    engine.check_running()
    bare = ReplicatedEngine(
        engine.handle, engine.handle.first().describe(None), lambda: [], ReplicaOptions()
    )
    with pytest.raises(NotRunningError, match="no replica runs"):
        bare.check_running()
