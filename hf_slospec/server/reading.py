"""Reading of HTTP requests: API key, body and model name are checked, and errors become responses
in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotGuaranteedError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    UnsupportedOptionError,
    describe_fault,
)
from hf_slospec.server.access import ServerSettings, Tenant
from hf_slospec.server.answers import error_body
from hf_slospec.server.bodies import SamplingBody
from hf_slospec.server.chats import ForeignBody
from hf_slospec.server.engine import ServedEngine
from hf_slospec.server.limits import CONTEXT_CODE, ContextOverflowError, LimitError
from hf_slospec.server.options import Objective
from hf_slospec.server.work import BusyError

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
RETRY_AFTER_S = 1  # seconds that refused clients are told to wait
GZIP = ("gzip", "x-gzip")  # values of Content-Encoding
BODY_S = 30.0  # seconds for a request's body to arrive
# Headers of Gateway API's inference extension: the name of an Objective, and the name of the group
# of clients that counts as one in fair scheduling.
OBJECTIVE = "x-gateway-inference-objective"
FAIRNESS_ID = "x-gateway-inference-fairness-id"
# Allowed values of these headers
GATEWAY_NAME = re.compile(r"[!-~]{1,253}")
# In an error's location, pydantic inserts the type of the union member that it tried, such as
# "constrained-float", "list[SLOStage]" or "str"; _fields drops these names.
TYPE_NAME = re.compile(r"str|int|float|bool|.*[^a-z0-9_].*")
FIELD = re.compile(r"[a-z_]+(?=: | must be )")  # the field's name with which some messages begin
INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
RETRY = {"Retry-After": str(RETRY_AFTER_S)}
# Status, type, code and headers of the responses to errors; the first matching entry is used.
ANSWERS: tuple[tuple[Any, int, str, str | None, Mapping[str, str] | None], ...] = (
    (BusyError, 503, UNAVAILABLE, "busy", RETRY),
    (QueueFull, 429, "rate_limit_error", "queue_full", RETRY),
    (NotGuaranteedError, 429, "rate_limit_error", "not_guaranteed", RETRY),
    (NotRunningError | RequestCancelledError, 503, UNAVAILABLE, None, None),
    (InvalidInputError | InvalidTypeError | UnsupportedOptionError, 400, INVALID, None, None),
)
OTHER = "other"  # counts objectives that are not configured: their names are arbitrary


class Fault(Exception):  # noqa: N818  it is an answer
    """Error that is sent as the response: a status, headers, and a body in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        for_anthropic: str = "",
    ):
        """``for_anthropic``, if not empty, is the message in Anthropic's format."""
        super().__init__(status)
        self.status = status
        self.body = error_body(message, kind, param, code)
        self.headers = headers
        self.for_anthropic = for_anthropic


class RequestReader:
    """Reads the requests of all endpoints, and counts refused requests and clients that left."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings):
        self.engine = engine
        self.settings = settings
        self.bounds = settings.bounds
        # clients_left: disconnected before the response; readers_cut: closed as they did not read
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # requests by the limit that they exceeded
        self.objectives: Counter[str] = Counter()  # requests by their objective

    async def check_key(self, request: Request) -> None:
        """Set the tenant and client of ``request.state``; raises Fault if the API key is missing or
        wrong.
        """
        header = (
            request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        )
        request.state.tenant = self.settings.tenant(header)
        if request.state.tenant is None:
            raise Fault(
                401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        address = request.client.host if request.client is not None else ""
        request.state.client = request.state.tenant.name or address  # the unit of fair scheduling
        fairness_id = _gateway_name(request, FAIRNESS_ID)
        if fairness_id is not None and self.settings.trust_gateway:
            request.state.client += f" {fairness_id}"

    def terms(self, request: Request, body: SamplingBody) -> dict[str, Any]:
        """Return the arguments of ``submit`` that depend on the tenant or the objective, and count
        the objective.

        Raises:
            Fault: the objective is no valid name. A name that is not configured has no effect.
            InvalidInputError: the request asks for more than the key allows.
        """
        objective = Objective()
        if (name := _gateway_name(request, OBJECTIVE)) is not None:
            objective = self.settings.objectives.get(name, objective)
            self.objectives[name if name in self.settings.objectives else OTHER] += 1
        tenant: Tenant = request.state.tenant
        return tenant.arguments(body, request.headers, objective)

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Return the validated body of a request.

        Raises:
            Fault: the body is too large, arrives too late, is no JSON, or is invalid.
            LimitError: it asks for more than a limit allows.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # browsers send this type across origins only after a CORS preflight
        if media_type != "application/json":
            text = f"the header Content-Type must be application/json, got {media_type or 'none'}"
            raise Fault(415, text)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", *GZIP):
            text = f"the header Content-Encoding must be gzip, or left out, got {reprlib.repr(encoding)}"
            raise Fault(415, text, headers={"Accept-Encoding": "gzip"})
        gzip = zlib.decompressobj(zlib.MAX_WBITS | 16) if encoding in GZIP else None
        received = bytearray()
        num_sent = 0
        max_bytes = self.bounds.body_bytes
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    num_sent += len(part)
                    received += (
                        part
                        if gzip is None
                        else gzip.decompress(part, max_bytes + 1 - len(received))
                    )
                    if max(num_sent, len(received)) > max_bytes:
                        self.refused["body_bytes"] += 1
                        text = f"the body has more than {max_bytes} bytes"
                        raise Fault(413, text)
            if gzip is not None and (not gzip.eof or gzip.unused_data):
                raise zlib.error("the stream is incomplete, or is not the only one")
        except zlib.error as error:
            raise Fault(400, f"the body is no valid gzip: {error}") from error
        except TimeoutError:
            text = f"the body was not there after {BODY_S:.0f} s"
            raise Fault(408, text, headers={"Connection": "close"}) from None
        content = bytes(received)
        self.bounds.check_json(content)
        try:
            body = kind.model_validate_json(content)
            checked = body.chat if isinstance(body, ForeignBody) else body
        except ValidationError as error:
            faults = _of_likeliest_types(error.errors(include_url=False))
            param = ".".join(map(str, faults[0]["loc"])) or None
            message = "; ".join(list(dict.fromkeys(map(describe_fault, faults)))[:5])
            raise Fault(400, message, param=param) from error
        self.check_model(getattr(body, "model", None))
        self.bounds.check_body(checked, self.engine.max_len)
        return body

    def check_model(self, name: str | None) -> None:
        """Raise Fault if a request names another model than the one that is served."""
        if name is not None and name != self.settings.model_name:
            text = f"there is no model {name!r}; the model here is {self.settings.model_name!r}"
            raise Fault(404, text, "not_found_error", "model", "model_not_found")

    async def in_pool(self, request: Request, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the thread pool, which clients share fairly; return its result."""
        return await self.engine.work.run(request.state.client, function, *arguments)

    def with_body(
        self, kind: type[BaseModel], endpoint: Callable[..., Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that reads the body and is cancelled when the client disconnects.

        Args:
            endpoint: a coroutine function of the request and the body, or a function of the body
                alone, which runs in the thread pool.
        """

        async def answer(request: Request) -> Response:
            body = await self.read(request, kind)
            if inspect.iscoroutinefunction(endpoint):
                answering = endpoint(request, body)
            else:
                answering = self.in_pool(request, endpoint, body)
            return await while_connected(request.receive, answering)

        return answer

    def with_faults(
        self, endpoint: Callable[..., Awaitable[Response]]
    ) -> Callable[..., Awaitable[Response]]:
        """Return an endpoint that raises every error as a Fault. After errors that FastAPI does not
        know, it would close the connection.
        """

        @wraps(endpoint)
        async def answer(**arguments: Any) -> Response:
            try:
                return await endpoint(**arguments)
            except ClientDisconnect:
                self.counts["clients_left"] += 1
                return Response(status_code=499)  # its client is gone
            except LimitError as error:
                self.refused[error.limit] += 1
                raise fault_of(error) from error
            except Exception as error:
                raise fault_of(error) from error

        return answer


def _of_likeliest_types(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return validation errors with the locations of their fields, for each field only the deepest.

    If a field's type is a union, pydantic reports errors for each of its types; the deepest are
    those of the type that the value resembles most.
    """
    shown = [ErrorDetails(**(fault | {"loc": _fields(fault)})) for fault in faults]
    deepest = dict[tuple[int | str, ...], int]()
    for fault in shown:
        path = fault["loc"]
        deepest[path[:1]] = max(deepest.get(path[:1], 0), len(path))
    return [fault for fault in shown if len(fault["loc"]) == deepest[fault["loc"][:1]]]


def _fields(fault: ErrorDetails) -> tuple[int | str, ...]:
    """Return an error's location in the body, without the names of types that pydantic inserts."""
    path = fault["loc"]
    # the last part is then certainly a field's name, even if it looks like a type's
    keys = path[-1:] if fault["type"] in ("missing", "extra_forbidden") else ()
    fields = (
        part
        for part in path[: len(path) - len(keys)]
        if isinstance(part, int) or not TYPE_NAME.fullmatch(part)
    )
    return (*fields, *keys)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; if the client disconnects before, cancel it and raise
    ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,))
        raise ClientDisconnect
    finally:
        gone.cancel()
        working.cancel()


def fault_of(error: Exception) -> Fault:
    """Return the Fault that answers an error; log errors that are not expected (status 500)."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, HTTPException):  # FastAPI found no such path or method
        return Fault(error.status_code, str(error.detail), headers=error.headers)
    message = str(error)
    if isinstance(error, ContextOverflowError):
        return Fault(
            400, message, param=error.field, code=CONTEXT_CODE, for_anthropic=error.for_anthropic
        )
    for kinds, status, kind, code, headers in ANSWERS:
        if isinstance(error, kinds):
            field = FIELD.match(message) if status == 400 else None
            return Fault(status, message, kind, field and field[0], code, headers)
    logger.error("a request failed", exc_info=error)
    return Fault(500, "the request failed; the server's log says why", "internal_error")


async def check_framing(request: Request) -> None:
    """Raise Fault for both Content-Length and Transfer-Encoding: a proxy may have used the one that
    this server does not use (request smuggling).
    """
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        text = "Content-Length and Transfer-Encoding exclude each other; send one of them"
        raise Fault(400, text, headers={"Connection": "close"})


async def check_running(request: Request) -> None:
    """Raise Fault (503) if the server is stopping."""
    if request.app.state.is_stopping:
        headers = {**RETRY, "Connection": "close"}
        text = "the server is stopping; retry later"
        raise Fault(503, text, UNAVAILABLE, code="stopping", headers=headers)


def _gateway_name(request: Request, header: str) -> str | None:
    """Return the value of a gateway's header, or None; raises Fault if it is no valid name."""
    name = request.headers.get(header)
    if name is not None and not GATEWAY_NAME.fullmatch(name):
        text = f"header {header} must be 1 to 253 visible ASCII characters without spaces, got {reprlib.repr(name)}"
        raise Fault(400, text)
    return name


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
