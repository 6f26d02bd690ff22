"""The HTTP application: OpenAI's endpoints on an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import hf_slospec
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    UnsupportedOptionError,
    describe_fault,
)
from hf_slospec.serving.openai.access import AccessOptions, OwnPagesOnly, Tenant
from hf_slospec.serving.openai.answers import Answer, error_body, slo_headers
from hf_slospec.serving.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadBody,
    SamplingBody,
    TokenizeBody,
)
from hf_slospec.serving.openai.chat_templates import ChatTemplates
from hf_slospec.serving.openai.choices import Choice, Echo, Piece, PromptOnly, merged
from hf_slospec.serving.openai.engine import Decoding, Order, ServedEngine
from hf_slospec.serving.openai.limits import LimitError
from hf_slospec.serving.openai.messages import PlainParts, TemplateParts
from hf_slospec.serving.openai.orders import (
    PromptInputs,
    chat_prompt,
    end_tokens,
    num_top_logprobs,
    order_of,
    prompt_of,
)
from hf_slospec.serving.openai.schemas import SchemaCheck
from hf_slospec.serving.openai.work import BusyError
from hf_slospec.serving.telemetry import Collector

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
InPool = Callable[..., Awaitable[Any]]  # calls a function with arguments in a thread of the pool, in its client's turn
LONG_PIECE = 64  # tokens whose log probabilities take long to write
RETRY_AFTER_S = 1
BODY_S = 30.0  # until a request's body has arrived
OPEN = ("/health", "/load_model", "/metrics", "/version")  # paths that need no API key where there are keys


class ServerSettings(AccessOptions):
    """Settings of the HTTP application."""

    model_name: str
    secret: bytes = Field(default_factory=partial(secrets.token_bytes, 32), repr=False)  # of the salts of texts


def make_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """Return the application that serves an engine."""
    app = FastAPI(
        title="hf_slospec", version=hf_slospec.__version__, docs_url=None, redoc_url=None,
        dependencies=[Depends(_check_framing)],
    )  # fmt: skip
    server = _Server(engine, settings)
    app.state.reader_s, app.state.counts = settings.bounds.reader_s, server.counts  # for the connections
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    if not settings.api_keys:
        app.add_middleware(OwnPagesOnly, allowed_origins=settings.allowed_origins, allowed_hosts=settings.allowed_hosts)
    for kind in (HTTPException, Fault):  # of the framework, as for a path that is not there, and of keys
        app.add_exception_handler(kind, _answer_fault)
    definitions: dict[str, Any] = {}
    for method, path, endpoint, body in (
        ("POST", "/v1/chat/completions", server.chat, ChatBody),
        ("POST", "/v1/completions", server.complete, CompletionBody),
        ("POST", "/tokenize", server.tokenize, TokenizeBody),
        ("POST", "/detokenize", server.detokenize, DetokenizeBody),
        ("POST", "/load_model", server.load_model, LoadBody),
        ("GET", "/v1/models", server.models, None),
        ("GET", "/v1/models/{model:path}", server.model, None),
        ("GET", "/health", server.health, None),
        ("HEAD", "/health", server.health, None),
        ("GET", "/metrics", server.metrics, None),
        ("GET", "/version", server.version, None),
    ):
        extra = None if body is None else {"requestBody": _described(body, definitions)}
        app.add_api_route(
            path, server.with_faults(endpoint), methods=[method], openapi_extra=extra, response_model=None,
            include_in_schema=method != "HEAD",
            dependencies=[] if path in OPEN else [Depends(server.check_key)],
        )  # fmt: skip
    _add_definitions(app, definitions)
    return app


def _described(body: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a body for OpenAPI, and add what it refers to."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions |= schema.pop("$defs", {})
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _add_definitions(app: FastAPI, definitions: dict[str, Any]) -> None:
    """Add schemas that bodies refer to; bodies are read by the endpoints themselves, so FastAPI does not know them."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        made: dict[str, Any] = make()
        made.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return made

    app.openapi = openapi  # type: ignore[method-assign]


class Fault(Exception):  # noqa: N818  it is an answer
    """An answer that is an error."""

    def __init__(self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None):
        """``body`` is an error in OpenAI's form."""
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})

    def response(self) -> Response:
        """Return it as a response."""
        return JSONResponse(self.body, self.status, self.headers)


class _Server:
    """The endpoints."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings):
        self.engine, self.settings, self.begun = engine, settings, int(time.time())
        self.bounds, self.schemas = settings.bounds, SchemaCheck(settings.bounds)
        self.counts: Counter[str] = Counter()  # clients that left, readers that were cut
        self.refused: Counter[str] = Counter()  # requests, by the limit that they exceeded
        self.templates = ChatTemplates(settings.special_tokens)

    # ---- before the endpoints

    async def check_key(self, request: Request) -> None:
        """Set the request's tenant; raises Fault without a valid API key where there are keys."""
        header = request.headers.get("authorization", "")
        request.state.tenant = self.settings.tenant(header, self.settings.secret)
        if request.state.tenant is None:
            body = error_body("the API key is missing or wrong", "authentication_error", code="invalid_api_key")
            raise Fault(401, body, {"WWW-Authenticate": "Bearer"})
        address = request.client.host if request.client is not None else ""
        request.state.client = request.state.tenant.name or address  # clients take turns by it

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """Return the validated body.

        Raises:
            Fault: it is too large or too late, no JSON, or invalid.
            LimitError: it asks for too much.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # pages cannot send that one without having asked first
            text = f"the header Content-Type must be application/json, got {media_type or 'none'}"
            raise Fault(415, error_body(text, "invalid_request_error"))
        received = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    received += part
                    if len(received) > (most := self.bounds.body_bytes):
                        self.refused["body_bytes"] += 1
                        raise Fault(413, error_body(f"the body has more than {most} bytes", "invalid_request_error"))
        except TimeoutError:
            text = f"the body was not there after {BODY_S:.0f} s"
            raise Fault(408, error_body(text, "invalid_request_error"), {"Connection": "close"}) from None
        content = bytes(received)
        self.bounds.check_json(content)
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            param = ".".join(map(str, faults[0]["loc"])) or None
            message = "; ".join(map(describe_fault, faults[:5]))
            raise Fault(400, error_body(message, "invalid_request_error", param)) from error
        self._check_model(getattr(body, "model", None))
        self.bounds.check_body(body, self.engine.max_len)
        return body

    async def _in_pool(self, request: Request, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns in the pool of threads, in its client's turn."""
        return await self.engine.work.run(request.state.client, function, *arguments)

    async def _while_there(self, request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
        """Return an answer, or cancel its making when the client goes away."""
        work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            work.cancel()
            await asyncio.wait((work,))
            raise ClientDisconnect
        finally:
            gone.cancel()
            work.cancel()

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            text = f"there is no model {name!r}; the model here is {self.settings.model_name!r}"
            raise Fault(404, error_body(text, "not_found_error", "model", "model_not_found"))

    # ---- completions

    async def chat(self, request: Request) -> Response:
        """Return the answer to a chat."""
        body = await self._read(request, ChatBody)

        def prompt() -> PromptInputs:
            return chat_prompt(
                body.messages, self.engine, self.bounds, self.templates,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                tools=body.shown_tools,
                template_kwargs=body.chat_template_kwargs,
            )  # fmt: skip

        return await self._while_there(request, self._answer(request, body, [prompt]))

    async def complete(self, request: Request) -> Response:
        """Return the completions of one prompt or several."""
        body = await self._read(request, CompletionBody)
        prompts = [partial(prompt_of, prompt, body, self.engine) for prompt in body.prompts]
        return await self._while_there(request, self._answer(request, body, prompts))

    async def _answer(
        self, request: Request, body: SamplingBody, make_prompts: Sequence[Callable[[], PromptInputs]]
    ) -> Response:
        answer = Answer(
            self.settings.model_name, isinstance(body, ChatBody), self._token_text,
            num_top_logprobs(body) is not None, body.options.include_usage or body.options.continuous_usage_stats,
            body.options.continuous_usage_stats,
        )  # fmt: skip
        in_pool = partial(self._in_pool, request)
        tenant: Tenant = request.state.tenant
        terms = tenant.arguments(body, request.headers)
        if isinstance(body, ChatBody) and body.json_schema is not None:
            await self.schemas.check(request.state.client, body.json_schema)
        prompts = [await in_pool(make) for make in make_prompts]
        orders = [[order_of(body, prompt, terms, self.engine, i) for i in range(body.n)] for prompt in prompts]
        choices: list[Choice] = []
        try:
            for own in orders:
                echo = self._echo(body)
                for order in own:
                    order = replace(order, request_id=answer.id, client=request.state.client)
                    choices.append(await self._choice(len(choices), order, body, echo, in_pool))
            if not body.stream:
                return await self._whole(answer, merged(choices), choices, in_pool)
        except BaseException:
            _cancel(choices)
            raise
        return _Stream(self._events(answer, merged(choices), choices, in_pool), choices)

    async def _choice(self, index: int, order: Order, body: SamplingBody, echo: Echo | None, in_pool: InPool) -> Choice:
        """Submit an order, and return it as a choice."""
        reader: PlainParts | TemplateParts = PlainParts()
        template = self.engine.response_template
        if template is not None and isinstance(body, ChatBody) and body.json_schema is None:  # JSON is all content
            reader = await in_pool(self._reader, template, order.prompt, body)
        skips, hidden = body.skip_special_tokens, body.stop_token_ids or []
        if isinstance(reader, TemplateParts):  # templates know special tokens by their texts
            skips, hidden = False, end_tokens(body, self.engine.generation_config)
        wants_offsets = isinstance(body, CompletionBody) and body.logprobs is not None
        return Choice(
            index, await self._decoding(order, echo), order.prompt, partial(self._text, skips), in_pool,
            body.stop_strings, hidden, body.include_stop_str_in_output, echo, reader, wants_offsets,
        )  # fmt: skip

    async def _decoding(self, order: Order, echo: Echo | None) -> Decoding:
        """Submit an order, and return the request, or what stands for one that writes nothing."""
        arguments, scores_prompt = order.arguments, echo is not None and echo.is_first()
        if scores_prompt:
            arguments = arguments | {"prompt_logprobs": arguments["logprobs"]}
        if arguments["max_new_tokens"]:
            return await self.engine.submit(replace(order, arguments=arguments))
        if not scores_prompt:
            return PromptOnly(order.prompt, None)
        arguments = arguments | {"max_new_tokens": 1}  # which is not shown
        return PromptOnly(order.prompt, await self.engine.submit(replace(order, arguments=arguments)))

    def _echo(self, body: SamplingBody) -> Echo | None:
        """Return the echo of a prompt, if the answer repeats it."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return None
        return Echo(None if body.logprobs is None else asyncio.get_running_loop().create_future())

    def _reader(self, template: dict[str, Any], prompt: list[int], body: ChatBody) -> TemplateParts:
        return TemplateParts(template, self.engine.tokenizer.decode(prompt), body.shown_tools)

    async def _whole(
        self, answer: Answer, pieces: AsyncIterator[Piece], choices: Sequence[Choice], in_pool: InPool
    ) -> Response:
        """Return the answer once all pieces are there."""
        gathered = [Piece(choice.index, "", [], []) for choice in choices]
        async for piece in pieces:
            gathered[piece.index] = gathered[piece.index].joined(piece)

        def response() -> Response:
            return JSONResponse(answer.whole(gathered, choices), headers=slo_headers(choices))

        return await in_pool(response) if answer.wants_logprobs else response()

    async def _events(
        self, answer: Answer, pieces: AsyncIterator[Piece], choices: Sequence[Choice], in_pool: InPool
    ) -> AsyncIterator[str]:
        seen: set[int] = set()

        def event(piece: Piece) -> str:
            return _event(answer.chunk(piece, choices, piece.index not in seen))

        try:
            async for piece in pieces:
                takes_long = answer.wants_logprobs and len(piece.tokens) > LONG_PIECE
                yield await in_pool(event, piece) if takes_long else event(piece)
                seen.add(piece.index)
            if answer.includes_usage:
                yield _event(answer.usage_chunk(choices))
        except Exception as error:  # noqa: BLE001  of the request's own, after the status was sent
            yield _event(_fault_of(error).body)
        yield "data: [DONE]\n\n"

    def _text(self, skips_special_tokens: bool, tokens: list[int]) -> str:
        text: str = self.engine.tokenizer.decode(tokens, skip_special_tokens=skips_special_tokens)
        return text

    def _token_text(self, token: int) -> str:
        text: str = self.engine.tokenizer.decode([token])
        return text

    # ---- small endpoints

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of messages."""
        body = await self._read(request, TokenizeBody)
        return await self._while_there(request, self._in_pool(request, self._tokenized, body))

    def _tokenized(self, body: TokenizeBody) -> Response:
        if body.messages is not None:
            made = chat_prompt(
                body.messages,
                self.engine,
                self.bounds,
                self.templates,
                add_generation_prompt=body.add_generation_prompt,
            )
            ids = made.tokens
        else:
            ids = self.engine.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"]
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.engine.max_len, "tokens": ids}
        if body.return_token_strs:
            texts = {token: self._token_text(token) for token in set(ids)}
            found["token_strs"] = [texts[token] for token in ids]
        return JSONResponse(found)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._read(request, DetokenizeBody)
        if body.tokens and max(body.tokens) >= self.engine.vocab_size:
            text = f"tokens has {max(body.tokens)}, and the vocabulary has {self.engine.vocab_size} tokens"
            raise Fault(400, error_body(text, "invalid_request_error", "tokens"))
        return await self._while_there(request, self._in_pool(request, self._detokenized, body.tokens))

    def _detokenized(self, tokens: list[int]) -> Response:
        return JSONResponse({"prompt": self.engine.tokenizer.decode(tokens)})

    async def load_model(self, request: Request) -> Response:
        """Return that the model is loaded, as ``transformers chat`` asks first."""
        await self._read(request, LoadBody)
        return Response(_event({"status": "ready", "cached": True}), media_type="text/event-stream")

    async def models(self) -> Response:
        """Return the list of models, which has one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """Return a description of the model."""
        self._check_model(model)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.begun,
            "owned_by": "hf_slospec",
            "max_model_len": self.engine.max_len,
        }

    async def health(self) -> Response:
        """Return whether requests are taken."""
        self.engine.check_running()
        return Response(status_code=200)

    async def metrics(self) -> Response:
        """Return metrics for Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest

        families = [*await self.engine.families(self.settings.metrics_prefix), *self._families()]
        registry = CollectorRegistry()
        registry.register(Collector(lambda: iter(families)))
        return PlainTextResponse(generate_latest(registry).decode(), media_type="text/plain; version=0.0.4")

    def _families(self) -> Iterator[Any]:
        """Yield the metric families of the server itself."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        prefix, pools = self.settings.metrics_prefix, {"work": self.engine.work, "schemas": self.schemas.turns}
        refused = CounterMetricFamily(prefix + "requests_refused", "Requests above a limit.", labels=["limit"])
        for limit, count in self.refused.items():
            refused.add_metric([limit], count)
        yield refused
        for name, text in (
            ("clients_left", "Requests whose client left before their answer began."),
            ("readers_cut", "Connections that were closed because nothing was read."),
        ):
            yield CounterMetricFamily(prefix + name, text, value=self.counts[name])
        for kind, name, text in (
            (GaugeMetricFamily, "num_running", "Jobs that prepare requests now."),
            (GaugeMetricFamily, "num_waiting", "Jobs that wait for their turn."),
            (CounterMetricFamily, "num_refused", "Jobs refused as too many waited."),
            (CounterMetricFamily, "num_dropped", "Jobs dropped as their client left."),
        ):
            family = kind(prefix + name.replace("num_", "pool_jobs_"), text, labels=["pool"])
            for pool, own in pools.items():
                family.add_metric([pool], getattr(own, name))
            yield family

    def with_faults(self, endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        """Return an endpoint that answers errors itself: the framework would close the connection with unknown ones."""

        @wraps(endpoint)
        async def answer(**arguments: Any) -> Response:
            try:
                return await endpoint(**arguments)
            except ClientDisconnect:
                self.counts["clients_left"] += 1
                return Response(status_code=499)  # which is not read
            except LimitError as error:
                self.refused[error.limit] += 1
                return _fault_of(error).response()
            except Exception as error:  # noqa: BLE001  the log has those that are faults of ours
                return _fault_of(error).response()

        return answer

    async def version(self) -> Response:
        """Return the version."""
        return JSONResponse({"version": hf_slospec.__version__})


def _fault_of(error: Exception) -> Fault:
    """Return the answer to an error."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, HTTPException):  # of the framework: no such path or method
        return Fault(error.status_code, error_body(str(error.detail), "invalid_request_error"), error.headers)
    if isinstance(error, BusyError):
        body = error_body(str(error), "service_unavailable_error", code="busy")
        return Fault(503, body, {"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, QueueFull):
        body = error_body(str(error), "rate_limit_error", code="queue_full")
        return Fault(429, body, {"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, NotRunningError | RequestCancelledError):
        return Fault(503, error_body(str(error), "service_unavailable_error"))
    if isinstance(error, InvalidInputError | InvalidTypeError | UnsupportedOptionError):
        return Fault(400, error_body(str(error), "invalid_request_error"))
    logger.error("a request failed", exc_info=error)
    return Fault(500, error_body("the request failed; the server's log says why", "internal_error"))


class _Stream(StreamingResponse):
    """A stream of events, whose requests end with it even if it never begins."""

    def __init__(self, events: AsyncIterator[str], choices: Sequence[Choice]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._choices)


def _cancel(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.decoding.cancel()


async def _check_framing(request: Request) -> None:
    """Raise Fault for a body with two lengths, of which a proxy may have read the other one."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        text = "Content-Length and Transfer-Encoding exclude each other"
        raise Fault(400, error_body(text, "invalid_request_error"), {"Connection": "close"})


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Return the answer to an error, in OpenAI's form."""
    return _fault_of(error).response()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def _disconnected(request: Request) -> None:
    """Wait until the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
