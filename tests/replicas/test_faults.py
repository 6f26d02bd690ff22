"""Replicas that are full, dead or slow, and clients that leave: nothing is lost, asked for ever or
counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import time

import pytest
from typer.testing import CliRunner

from hf_slospec import NotRunningError, QueueFull
from hf_slospec.cli.app import app as cli
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.replicas import start
from hf_slospec.replicas.messages import Offer
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.request.state import Progress
from hf_slospec.server.options import ServerOptions
from tests.support.breadth import quick_or
from tests.support.paths import ROOT
from tests.support.served_pair import alone
from tests.support.stand_ins.replicas import order_of, replicated

PROMPT = "def main(argv):\n    "


def ids(engine):
    return engine.tokenizer(PROMPT)["input_ids"]


NEW_TOKENS = quick_or(60, 100)


def test_begun_request_waits_where_all_queues_are_full_for_a_moment(pair):
    """r0 dies with a request that has written tokens; r1's queue is full just then; the request is
    lost.
    """
    with replicated(2, max_queue=1, max_batch=1) as (engine, handle):

        async def run():
            decoding = await engine.submit(order_of(ids(engine), max_new_tokens=NEW_TOKENS))
            tokens = []
            async for new, _ in decoding.asteps():
                if not tokens:
                    names = list(handle.replicas)
                    dead = handle.replicas.pop(decoding.replica)
                    (other,) = handle.replicas.values()
                    for _ in range(3):
                        with contextlib.suppress(QueueFull):
                            other.generator.submit(PROMPT, max_new_tokens=NEW_TOKENS)
                        await asyncio.sleep(0.05)
                    await asyncio.to_thread(dead.generator.stop, False)
                    assert len(names) == 2
                tokens += new
            return tokens

        assert asyncio.run(run()) == alone(pair, PROMPT, max_new_tokens=NEW_TOKENS)


def test_stream_that_ends_without_an_answer_is_a_fault_of_the_replica(pair):
    with replicated(2) as (engine, handle):
        real = handle.decode.remote

        class Empty:
            async def __anext__(self):
                raise StopAsyncIteration

            def cancel(self): ...

        handle.decode.remote = lambda offer: (setattr(handle.decode, "remote", real), Empty())[1]

        async def run():
            decoding = await engine.submit(order_of(ids(engine), max_new_tokens=5))
            return [token async for new, _ in decoding.asteps() for token in new]

        assert asyncio.run(run()) == alone(pair, PROMPT, max_new_tokens=5)


def test_cancel_during_begin_sends_no_further_offer():
    """``cancel`` closes the stream; its RayError is taken for a death, and another replica gets the
    request.
    """
    with replicated(2) as (engine, handle):
        from ray.exceptions import RayError

        number = []

        class Slow:
            def __init__(self):
                self.closed = asyncio.Event()
                number.append(self)

            async def __anext__(self):
                await self.closed.wait()
                raise RayError("cancelled")

            def cancel(self):
                self.closed.set()

        handle.decode.remote = lambda offer: Slow()

        async def run():
            from hf_slospec.replicas.failover import ReplicatedDecoding

            order = order_of(ids(engine))
            decoding = ReplicatedDecoding(engine, order, engine._need(order))
            begin = asyncio.ensure_future(decoding.begin())
            await asyncio.sleep(0.05)
            decoding.cancel()
            await asyncio.wait([begin], timeout=0.5)
            begin.cancel()
            assert len(number) == 1

        asyncio.run(run())


def test_load_that_is_asked_for_while_the_batcher_dies_is_an_error_of_ours():
    """CancelledError ends the task that asked (Serve's report), as if somebody had cancelled it."""
    with replicated(1) as (_engine, handle):
        generator = handle.replicas["r0"].generator

        async def run():
            speculator = generator.decoder.speculator
            with speculator.lock:
                generator.submit(PROMPT, max_new_tokens=4)
                await asyncio.sleep(0.2)  # the step waits for the lock
                asked = asyncio.ensure_future(generator.aload())
                await asyncio.sleep(0.05)
                engine_of = generator._service._engine()
                engine_of.step = lambda: 1 / 0  # a CUDA error, say
            await asyncio.wait([asked], timeout=60)
            assert asked.done()
            if asked.cancelled():
                raise AssertionError("aload was cancelled")
            assert isinstance(asked.exception(), NotRunningError)

        asyncio.run(run())


def test_requests_with_slos_are_not_kept_for_ever():
    """Serve calls record_autoscaling_stats only where there is autoscaling."""
    with replicated(1) as (engine, handle):
        replica = handle.replicas["r0"]
        replica._recent.extend((time.monotonic() - 3600, False) for _ in range(1000))

        async def run():
            order = order_of(ids(engine), max_new_tokens=2, slo_tpot=5.0)
            async for _ in replica.decode(
                Offer("r0", order, engine._need(order), Progress([]), "test", 0)
            ):
                pass
            assert len(replica._recent) < 10

        asyncio.run(run())


def stages_request(now_s=0.0, progress=None):
    return Request(
        0, RequestParams([1, 2], 100, stages=(Stage(0.1, 3), Stage(0.1))), now_s, progress
    )


def test_resumed_tokens_of_a_later_stage_earn_no_time():
    request = stages_request(1000.0, Progress(list(range(53)), 50.0, 49.0))
    # 50 tokens of stage 2 are from before; now 1 token in 4 s is late by 40 times
    request.emit(7)
    request.record_step(0, 0, 1.0, PhaseTimes(), 1004.0)
    assert request.metrics().attained is False


@pytest.mark.parametrize(
    "wrong",
    [
        dict(dtype="bogus"),
        dict(device="toaster"),
        dict(size="huge"),
        dict(metrics_prefix="1 bad"),
        dict(hang_s=math.inf),
        dict(silent_s=0.1),
        dict(max_hops=-1),
        dict(routing="random"),
        dict(backup="none"),
        dict(front_resource=""),
        dict(tensor_parallel_size=2),
        dict(drain_s=math.inf),
        dict(cpus=math.inf),
        dict(min_replicas=3),
        dict(images=True),
        dict(cpus=2.5),
        dict(response_template={"x": 1}),
        dict(api_keys={"": {}}),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(wrong):
    from hf_slospec import InvalidInputError

    (name,) = wrong
    with pytest.raises(InvalidInputError, match=name):
        ReplicaOptions(**wrong)


@pytest.mark.parametrize(
    ("host", "location"),
    [
        ("127.0.0.1", "HeadOnly"),
        ("10.0.0.1", "HeadOnly"),
        ("0.0.0.0", "EveryNode"),
        ("::", "EveryNode"),
    ],
)
def test_proxies_of_other_machines_listen_only_where_they_can(host, location, monkeypatch):
    started = {}
    monkeypatch.setattr(start.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(start.serve, "start", lambda *given: started.update(given=given))
    monkeypatch.setattr(start.serve, "run", lambda *_, **__: None)
    monkeypatch.setattr(start.serve, "delete", lambda _: None)
    with start.served(ReplicaOptions(), host, 8000):
        pass
    assert started["given"] == (location, {"host": host, "port": 8000, "root_path": ""})


def test_documentation_lists_the_options_of_replicas_with_their_defaults():
    table = re.findall(
        r"^\| (`\w+`.*?) \| (.*?) \|", (ROOT / "docs" / "replicas.md").read_text(), re.MULTILINE
    )
    listed = {
        name: default
        for names, defaults in table
        for name, default in zip(re.findall(r"\w+", names), defaults.split(", "), strict=False)
        if name not in ServerOptions.model_fields
    }
    fields = {name: field.default for name, field in ReplicaOptions.model_fields.items()}
    assert listed == {
        name: "none" if default is None else default if isinstance(default, str) else f"{default:g}"
        for name, default in fields.items()
        if name not in ServerOptions.model_fields
    }


def test_drafter_reaches_the_models_of_a_replica():
    from hf_slospec import InvalidInputError
    from hf_slospec.server.options import ServeOptions

    models = dict(
        target="org/name", drafter="suffix+org/draft", share_texts=True, allow_missing=True
    )
    options = start.replica_options(ServeOptions(**models), 2)
    assert models.items() <= dict(options).items() and not options.allow_pickle
    with pytest.raises(
        InvalidInputError,
        match=r"^assistant and drafter are .* in drafter alone: drafter org/draft",
    ):
        ReplicaOptions(target="org/name", assistant="org/draft", drafter="suffix")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--host", "0.0.0.0"], "--api-key"),
        (["--replicas", "2", "--dtype", "bogus"], "dtype"),
        (["--replicas", "2", "--target", "no/such", "--assistant", "no/such"], "no/such"),
        (["--replicas", "2", "--drafter", "lookup+./no/such"], "./no/such"),
        (["--replicas", "2", "--port", "{busy}"], "cannot listen"),
    ],
)
def test_command_is_refused_before_ray_starts(options, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(start.ray, "init", lambda **_: pytest.fail("Ray was started"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = str(listener.getsockname()[1])
        command = ["serve", *(option.format(busy=busy) for option in options)]
        result = CliRunner(env={"COLUMNS": "300"}).invoke(cli, command)
    assert result.exit_code != 0 and message in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
