"""Connections that say nothing: each holds a file and some memory, so they are closed, and not all are taken."""

from __future__ import annotations

import asyncio
from typing import Any

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._timer = self.loop.call_later(PATIENCE_S, self._close)

    def _close(self) -> None:
        transport: Any = self.transport
        if not transport.is_closing():
            transport.close()


def max_connections() -> int:
    """Return how many connections this process can hold."""
    if resource is None:
        return NO_LIMIT
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NO_LIMIT if most == resource.RLIM_INFINITY else max(most - OTHER_FILES, 16)
