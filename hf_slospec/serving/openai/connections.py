"""Connections that say nothing or read nothing, which are closed, as each holds a file and some memory; and signals."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module or nothing

PATIENCE_S = 10.0  # until the head of a request has arrived
OTHER_FILES = 128  # that the process needs for itself
NO_LIMIT = 2**20  # connections, where the system sets no limit to files


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, by what is installed
    """uvicorn's protocol, for connections on which requests arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take the connection, or close it if there are too many."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Read on; between the first byte of a request and the end of its head, the time counts."""
        super().data_received(data)
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_busy and self._timer is None:
            self._expect_request()

    def pause_writing(self) -> None:
        """Wait until the client has read most of what there is for it, but not for ever."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        """Continue to write."""
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def on_response_complete(self) -> None:
        """End the response; what the client has not read yet is kept for it, but not for ever."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._timer = self.loop.call_later(PATIENCE_S, self._close)

    def _expect_reader(self) -> None:
        if self._reader_timer is None:
            state = self.config.app.state
            self._reader_timer = self.loop.call_later(state.reader_s, self._cut, state.counts)

    def _cut(self, counts: Counter[str]) -> None:
        """Drop the connection, with what is to be sent, if its client has not read enough since then."""
        self._reader_timer = None
        if self.flow.write_paused or (self.transport.is_closing() and self.transport.get_write_buffer_size()):
            counts["readers_cut"] += 1
            self.transport.abort()

    def _close(self) -> None:
        transport: Any = self.transport
        if not transport.is_closing():
            transport.close()


class SignalledServer(uvicorn.Server):
    """uvicorn's server, which a second signal of any kind ends."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, and end the process at the second, whatever it is doing."""
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


def max_connections() -> int:
    """Return how many connections this process can hold."""
    if resource is None:
        return NO_LIMIT
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NO_LIMIT if most == resource.RLIM_INFINITY else max(most - OTHER_FILES, 16)
