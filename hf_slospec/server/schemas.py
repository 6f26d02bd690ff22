"""Check of JSON schemas in a separate process (``schema_process.py``), which is killed at its
deadline or when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.grammars import JSON_OPTIONS
from hf_slospec.generate.json_schemas import to_follow
from hf_slospec.server.limits import LimitError, RequestLimits
from hf_slospec.server.work import JobSlots

PROGRAM = Path(__file__).with_name("schema_process.py")
KEPT = 256  # maximum number of valid schemas that are remembered
# Wall-clock limit as a multiple of the limit of CPU time, as other processes use the CPU, too
WALL_TIMES = 5.0


class SchemaCheck:
    """Checks that JSON schemas can be compiled within limits of time and memory."""

    def __init__(self, limits: RequestLimits):
        self.limits = limits
        # one process at a time: compiling competes with the model for the CPU
        self.slots = JobSlots(1, limits.waiting)
        self._valid: dict[str, None] = {}  # an ordered set, oldest first

    async def check(
        self, client: str, schema: dict[str, Any], field: str = "response_format"
    ) -> None:
        """Check that a schema can be compiled.

        Args:
            client: name of the client, for fair scheduling.
            field: field of the body that has the schema, for messages.

        Raises:
            InvalidInputError: the schema is invalid, or outputs cannot be made to follow it.
            LimitError: compiling takes too long, or too much memory.
            BusyError: too many checks wait.
        """
        if (key := json.dumps(schema)) in self._valid:
            return
        try:
            followed = json.dumps(to_follow(schema))
        except InvalidInputError as error:
            raise InvalidInputError(f"{field}: {error}") from error
        async with self.slots.slot(client):
            fault = await self._compile(followed, field)
        if fault:
            raise InvalidInputError(f"{field}: the schema cannot be followed: {fault}")
        self._valid[key] = None
        if len(self._valid) > KEPT:
            del self._valid[next(iter(self._valid))]

    async def _compile(self, schema: str, field: str) -> str:
        """Return the reason why a schema cannot be compiled; an empty text if it can."""
        seconds = self.limits.schema_s
        memory = self.limits.schema_memory_bytes
        job = f'{{"schema": {schema}, "options": {json.dumps(JSON_OPTIONS)}}}'.encode()
        # Not asyncio's subprocesses: uvloop runs Python between fork and exec, which crashes in
        # processes with threads, such as gRPC's.
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(seconds), str(memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        timeout_s = WALL_TIMES * (seconds + 1)
        try:
            # Shielded, so that a thread waits for the process to end even if the client disconnects
            # before the thread has started.
            fault = await asyncio.shield(
                loop.run_in_executor(None, _outcome, process, job, timeout_s)
            )
        finally:
            # It still runs if the client has disconnected; the thread above then returns
            process.kill()
        if process.returncode:
            raise LimitError(
                "schema_s",
                f"{field}: compiling the schema takes more than {seconds} s or {memory >> 20} MiB; make it "
                "simpler, such as by fewer patterns",
            )
        return fault.decode(errors="replace")


def _outcome(process: subprocess.Popen[bytes], job: bytes, timeout_s: float) -> bytes:
    """Return what a process writes to standard output; kill it after ``timeout_s`` seconds."""
    try:
        return process.communicate(job, timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
