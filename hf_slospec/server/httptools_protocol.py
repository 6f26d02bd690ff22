"""uvicorn's protocol on httptools with two corrections, which its protocol on h11 does not need.

Bodies of requests to upgrade to another protocol are read, and responses to HTTP/1.0 are not
chunked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class _Parser(httptools.HttpRequestParser):
    """Parser that reads a request to upgrade once more without the header Upgrade: httptools skips
    its body.
    """

    def __init__(self, protocol: PlainHttpToolsProtocol):
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            parser = self._protocol.parser = _Parser(
                self._protocol
            )  # this one may ignore further data
            parser.feed_data(self._protocol.plain_head + bytes(data[upgrade.args[0] :]))


class PlainHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools that ignores requests to upgrade, and streams to HTTP/1.0
    without chunks.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self.plain_head = b""  # of the request to upgrade, without the header Upgrade

    @property
    def _is_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        """Begin the request, unless it will be read once more."""
        if not self._is_upgrade:
            super().on_headers_complete()
            return
        lines = [
            b"%b %b HTTP/%b"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.plain_head = b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        """End the request's body, unless it will be read once more."""
        if not self._is_upgrade:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        own_app = (
            partial(_without_chunks, cycle, app) if cycle.scope["http_version"] == "1.0" else app
        )
        super()._start_asgi_task(cycle, own_app)


async def _without_chunks(
    cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Callable[[Any], Any]
) -> None:
    """Run an application; the end of the connection ends its response if that has no length."""

    async def own_send(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf  # type: ignore[assignment]
        elif not message.get("more_body") and cycle.expected_content_length == math.inf:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, own_send)
