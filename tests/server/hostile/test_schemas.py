"""Schemas are compiled in a process with limits, which ends with its client."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.grammars import Grammars
from hf_slospec.server import schemas
from hf_slospec.server.limits import LimitError, RequestLimits
from hf_slospec.server.schemas import SchemaCheck
from tests.server.hostile.clients import (
    CHAT,
    HARD_SCHEMA,
    WAIT_S,
    with_schema,
)

FINE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
}
LONG = RequestLimits(schema_s=1000, schema_memory_bytes=2**33)  # the operating system ends nothing


def programs():
    """Return the processes of this one that compile schemas."""
    found = []
    for child in psutil.Process().children():
        try:
            found += (
                [child] if any(str(schemas.PROGRAM) in word for word in child.cmdline()) else []
            )
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def run(story):
    return asyncio.run(asyncio.wait_for(story, WAIT_S))


@pytest.mark.parametrize(
    "limits", [RequestLimits(schema_s=1), RequestLimits(schema_memory_bytes=2**25, schema_s=100)]
)
def test_a_schema_that_takes_too_much_is_given_up(limits):
    with pytest.raises(
        LimitError, match="response_format: compiling the schema takes more than"
    ) as caught:
        run(SchemaCheck(limits).check("a", HARD_SCHEMA))
    assert caught.value.limit == "schema_s" and not programs()


def test_a_fine_schema_is_tried_once(monkeypatch):
    async def story():
        check = SchemaCheck(RequestLimits(schema_s=100))
        await check.check("a", FINE)
        monkeypatch.setattr(schemas, "PROGRAM", "/no/such/program")
        await check.check("b", FINE)

    run(story())


CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)}  # less than 64 KiB
WRONG = [
    ({"type": "nonsense"}, "the schema cannot be followed: [A-Za-z]"),
    ({"type": "string", "pattern": "("}, "the schema cannot be followed: [A-Za-z]"),
    ({"type": "array", "uniqueItems": True}, "the schema cannot be followed: .*uniqueItems"),
    ({"$ref": "#/$defs/a0", "$defs": CHAIN}, "the schema nests too deeply"),
]


@pytest.mark.parametrize(("schema", "fault"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_with_a_schema_is_said(schema, fault):
    with pytest.raises(InvalidInputError, match=f"^response_format: {fault}"):
        run(SchemaCheck(RequestLimits(schema_s=100)).check("a", schema))


def test_the_process_ends_with_its_client_and_the_next_one_has_its_turn():
    async def story():
        check = SchemaCheck(LONG)
        hard = asyncio.ensure_future(check.check("a", HARD_SCHEMA))
        queued = asyncio.ensure_future(check.check("a", {"const": 1}))
        while not programs():
            await asyncio.sleep(0.01)
        fine = asyncio.ensure_future(check.check("b", FINE))
        await asyncio.sleep(0)
        queued.cancel()
        hard.cancel()
        await fine
        assert (
            hard.cancelled()
            and queued.cancelled()
            and check.slots.num_dropped == 1
            and not programs()
        )
        assert check.slots.num_running == check.slots.num_waiting == 0

    run(story())


def test_a_process_whose_wait_has_not_begun_is_reaped_all_the_same(monkeypatch):
    made = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    async def story():
        is_free = threading.Event()
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(is_free.wait, WAIT_S)
        left = asyncio.ensure_future(SchemaCheck(LONG).check("a", HARD_SCHEMA))
        while not made:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        is_free.set()

    monkeypatch.setattr(schemas.subprocess, "Popen", Recorded)
    run(story())  # which waits for the threads
    (process,) = made
    assert process.returncode and process.stdin.closed


def test_choices_share_one_compiled_schema(served, monkeypatch):
    compiled = []
    compile_own = Grammars._compiled

    def counted(grammars, schema):
        compiled.append(schema)
        return compile_own(grammars, schema)

    monkeypatch.setattr(Grammars, "_compiled", counted)
    schema = {"type": "object", "properties": {"own": {"type": "integer"}}, "required": ["own"]}
    body = CHAT | with_schema(schema) | {"n": 4, "max_tokens": 6}
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200
    assert compiled == [schema]
