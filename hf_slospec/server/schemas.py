"""Check of JSON schemas in a separate process, which ends at its deadline or when the client
disconnects.
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
# Limit of wall-clock time as a multiple of that of CPU time, as other processes use the CPU
WALL_TIMES = 5.0


class SchemaCheck:
    """Checks that schemas can be compiled within limits of time and memory."""

    def __init__(self, limits: RequestLimits):
        self.limits = limits
        self.slots = JobSlots(
            1, limits.waiting
        )  # one at a time: compiling competes with the model for the CPU
        self._valid: dict[str, None] = {}  # an ordered set, oldest first

    async def check(
        self, client: str, schema: dict[str, Any], field: str = "response_format"
    ) -> None:
        """Return if a schema can be compiled; ``field`` of the body has it.

        Raises:
            InvalidInputError: it is invalid, or cannot be followed.
            LimitError: compiling it takes too long, or too much memory.
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
        """Return why a schema cannot be compiled; an empty text if it can."""
        seconds = self.limits.schema_s
        memory = self.limits.schema_memory_bytes
        job = f'{{"schema": {schema}, "options": {json.dumps(JSON_OPTIONS)}}}'.encode()
        # Not asyncio's: uvloop runs Python between fork and exec, which crashes where gRPC or
        # others have threads.
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(seconds), str(memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        timeout_s = WALL_TIMES * (seconds + 1)
        try:
            # Shielded, so that the process is waited for even if its client leaves before a thread
            # begins to.
            fault = await asyncio.shield(
                loop.run_in_executor(None, _outcome, process, job, timeout_s)
            )
        finally:
            # If it still runs because the client left; the thread above then returns
            process.kill()
        if process.returncode:
            raise LimitError(
                "schema_s",
                f"{field}: compiling the schema takes more than {seconds} s or {memory >> 20} MiB; make it "
                "simpler, such as by fewer patterns",
            )
        return fault.decode(errors="replace")


def _outcome(process: subprocess.Popen[bytes], job: bytes, timeout_s: float) -> bytes:
    """Return what a process writes, which is killed after a while."""
    try:
        return process.communicate(job, timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
