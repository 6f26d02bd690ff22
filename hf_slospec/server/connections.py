"""uvicorn's connections with timeouts for clients that send no request or read no response, and
uvicorn's server with a graceful stop.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module or nothing

PATIENCE_S = 10.0  # seconds for the head of a request to arrive
OTHER_FILES = 128  # file descriptors that the process needs besides those of connections
NO_LIMIT = 2**20  # maximum connections if the system does not limit open files


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, which closes connections whose client sends no request or does not read
    the response.

    Requests to upgrade to HTTP/2 or a web socket are answered in HTTP/1.1. uvicorn's other
    protocol, on httptools, would lose their bodies, and would send chunks to HTTP/1.0 clients.
    """

    def _should_upgrade(self) -> bool:
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the connection, or close it if there are more than ``max_connections``."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Read data; start the timeout of a request's head, or end it if the head is complete."""
        super().data_received(data)
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_busy and self._timer is None:
            self._expect_request()

    def pause_writing(self) -> None:
        """Wait for the client to read, at most ``reader_s`` seconds."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def on_response_complete(self) -> None:
        """End the response, and give the client ``reader_s`` seconds to read the rest."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._timer = self.loop.call_later(PATIENCE_S, self._close)

    def _expect_reader(self) -> None:
        if self._reader_timer is None:
            state = cast(FastAPI, self.config.app).state
            self._reader_timer = self.loop.call_later(state.reader_s, self._cut, state.counts)

    def _cut(self, counts: Counter[str]) -> None:
        """Drop the connection with its unsent data, unless its client has read enough meanwhile."""
        self._reader_timer = None
        if self.flow.write_paused or (
            self.transport.is_closing() and self.transport.get_write_buffer_size()
        ):
            counts["readers_cut"] += 1
            self.transport.abort()

    def _close(self) -> None:
        transport: Any = self.transport
        if not transport.is_closing():
            transport.close()


class SignalledServer(uvicorn.Server):
    """uvicorn's server, which after the first signal listens until the last response has ended. A
    second signal ends the process.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        at_end: Callable[[], object] = lambda: None,
        at_signal: Callable[[], object] = lambda: None,
    ):
        """Create a server.

        Args:
            at_end: called after the last response. Code after ``run`` is not reached, because
                uvicorn then raises the first signal again, which ends the process.
            at_signal: called at the first signal; lets the application refuse the requests that
                still arrive.
        """
        super().__init__(config)
        self._at_end = at_end
        self._at_signal = at_signal

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the responses that have begun, then close and call ``at_end``."""
        self._at_signal()
        begun = set(self.server_state.tasks)
        timeout_s = self.config.timeout_graceful_shutdown
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes it at once, or after its response
        if begun:
            _, late = await asyncio.wait(begun, timeout=timeout_s)
            self.config.timeout_graceful_shutdown = 0 if late else timeout_s
        await super().shutdown(sockets)
        await asyncio.to_thread(self._at_end)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, and end the process at the second."""
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


def max_connections() -> int:
    """Return the number of connections that this process can hold."""
    if resource is None:
        return NO_LIMIT
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NO_LIMIT if max_files == resource.RLIM_INFINITY else max(max_files - OTHER_FILES, 16)
