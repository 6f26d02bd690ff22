"""The HTTP application: OpenAI's endpoints on an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

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
from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.server.access import AccessOptions, OwnPagesOnly, Tenant
from hf_slospec.server.answers import Answer, error_body
from hf_slospec.server.bodies import ChatBody, CompletionBody, DetokenizeBody, LoadBody, SamplingBody, TokenizeBody
from hf_slospec.server.chat_templates import ChatTemplates
from hf_slospec.server.choices import Choice, NothingToDecode, Piece, merged
from hf_slospec.server.engine import Decoding, Order, ServedEngine
from hf_slospec.server.messages import PlainParts, TemplateParts
from hf_slospec.server.orders import (
    PromptInputs,
    chat_prompt,
    end_tokens,
    num_top_logprobs,
    order_of,
    prompt_of,
)
from hf_slospec.serving.telemetry import Collector

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
RETRY_AFTER_S = 1
BODY_S = 30.0  # until a request's body has arrived
OPEN = ("/health", "/load_model", "/metrics", "/version")  # paths that need no API key where there are keys


class ServerSettings(AccessOptions):
    """Settings of the HTTP application."""

    model_name: str
    max_body_bytes: Annotated[int, Field(ge=1024)] = 2**23
    secret: bytes = Field(default_factory=partial(secrets.token_bytes, 32), repr=False)  # of the salts of texts


def make_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """Return the application that serves an engine."""
    app = FastAPI(title="hf_slospec", version=hf_slospec.__version__, docs_url=None, redoc_url=None)
    server = _Server(engine, settings)
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
        ("GET", "/metrics", server.metrics, None),
        ("GET", "/version", server.version, None),
    ):
        extra = None if body is None else {"requestBody": _described(body, definitions)}
        app.add_api_route(
            path, _with_faults(endpoint), methods=[method], openapi_extra=extra, response_model=None,
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
        self.templates = ChatTemplates(settings.special_tokens)

    # ---- before the endpoints

    async def check_key(self, request: Request) -> None:
        """Set the request's tenant; raises Fault without a valid API key where there are keys."""
        header = request.headers.get("authorization", "")
        request.state.tenant = self.settings.tenant(header, self.settings.secret)
        if request.state.tenant is None:
            body = error_body("the API key is missing or wrong", "authentication_error", code="invalid_api_key")
            raise Fault(401, body, {"WWW-Authenticate": "Bearer"})

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """Return the validated body.

        Raises:
            Fault: it is too large or too late, no JSON, or invalid.
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
                    if len(received) > self.settings.max_body_bytes:
                        most = self.settings.max_body_bytes
                        raise Fault(413, error_body(f"the body has more than {most} bytes", "invalid_request_error"))
        except TimeoutError:
            text = f"the body was not there after {BODY_S:.0f} s"
            raise Fault(408, error_body(text, "invalid_request_error"), {"Connection": "close"}) from None
        try:
            body = kind.model_validate_json(bytes(received))
        except ValidationError as error:
            faults = error.errors(include_url=False)
            param = ".".join(map(str, faults[0]["loc"])) or None
            message = "; ".join(map(describe_fault, faults[:5]))
            raise Fault(400, error_body(message, "invalid_request_error", param)) from error
        self._check_model(getattr(body, "model", None))
        return body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            text = f"there is no model {name!r}; the model here is {self.settings.model_name!r}"
            raise Fault(404, error_body(text, "not_found_error", "model", "model_not_found"))

    # ---- completions

    async def chat(self, request: Request) -> Response:
        """Return the answer to a chat."""
        body = await self._read(request, ChatBody)

        def prompts() -> list[PromptInputs]:
            return [
                chat_prompt(
                    body.messages, self.engine, self.templates, add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    tools=body.shown_tools,
                    template_kwargs=body.chat_template_kwargs,
                )
            ]  # fmt: skip

        return await self._answer(request, body, prompts)

    async def complete(self, request: Request) -> Response:
        """Return the completions of one prompt or several."""
        body = await self._read(request, CompletionBody)
        return await self._answer(request, body, lambda: [prompt_of(p, body, self.engine) for p in body.prompts])

    async def _answer(
        self, request: Request, body: SamplingBody, make_prompts: Callable[[], list[PromptInputs]]
    ) -> Response:
        answer = Answer(
            self.settings.model_name, isinstance(body, ChatBody), self._token_text,
            num_top_logprobs(body) is not None, body.options.include_usage or body.options.continuous_usage_stats,
            body.options.continuous_usage_stats,
        )  # fmt: skip
        choices: list[Choice] = []
        tenant: Tenant = request.state.tenant
        terms = tenant.arguments(body, request.headers)
        prompts = await asyncio.to_thread(make_prompts)
        try:
            for prompt in prompts:
                orders = [order_of(body, prompt, terms, self.engine, number) for number in range(body.n)]
                echo = await self._echo(body, prompt.tokens)
                for order in orders:
                    order = replace(order, request_id=answer.id)
                    choices.append(await self._choice(len(choices), order, body, echo))
        except BaseException:
            for choice in choices:
                choice.decoding.cancel()
            raise
        if body.stream:
            events = self._events(answer, merged(choices), choices)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(request, answer, merged(choices), choices)

    async def _choice(
        self, index: int, order: Order, body: SamplingBody, echo: list[TokenLogprobs | None] | None
    ) -> Choice:
        """Submit an order, and return it as a choice."""
        reader: PlainParts | TemplateParts = PlainParts()
        template = self.engine.response_template
        if template is not None and isinstance(body, ChatBody) and body.json_schema is None:  # JSON is all content
            prefix = await asyncio.to_thread(self.engine.tokenizer.decode, order.prompt)
            reader = TemplateParts(template, prefix, body.shown_tools)
        skips, hidden = body.skip_special_tokens, body.stop_token_ids or []
        if isinstance(reader, TemplateParts):  # templates know special tokens by their texts
            skips, hidden = False, end_tokens(body, self.engine.generation_config)
        wants_offsets = isinstance(body, CompletionBody) and body.logprobs is not None
        is_empty = order.arguments["max_new_tokens"] == 0
        decoding: Decoding = NothingToDecode(order.prompt) if is_empty else await self.engine.submit(order)
        return Choice(
            index, decoding, order.prompt, partial(self._text, skips), body.stop_strings, hidden,
            body.include_stop_str_in_output, echo, reader, wants_offsets,
        )  # fmt: skip

    async def _echo(self, body: SamplingBody, prompt: list[int]) -> list[TokenLogprobs | None] | None:
        """Return log probabilities of a prompt that the answer repeats, none if not asked for; None: no such prompt."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return None
        return [] if body.logprobs is None else await self.engine.prompt_logprobs(prompt, body.logprobs)

    async def _whole(
        self, request: Request, answer: Answer, pieces: AsyncIterator[Piece], choices: Sequence[Choice]
    ) -> Response:
        """Return the answer once all pieces are there, or cancel the requests if the client goes away."""
        gathered = [Piece(choice.index, "", [], []) for choice in choices]

        async def gather() -> None:
            async for piece in pieces:
                gathered[piece.index] = gathered[piece.index].joined(piece)

        work, gone = asyncio.ensure_future(gather()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                for choice in choices:
                    choice.decoding.cancel()
        if work.cancelled() or not work.done():
            return Response(status_code=499)  # the client has gone
        work.result()
        metrics = choices[0].decoding.metrics
        headers = {"x-slo-guaranteed": str(metrics.guaranteed).lower(), "x-slo-attained": str(metrics.attained).lower()}
        return JSONResponse(answer.whole(gathered, choices), headers=headers)

    async def _events(
        self, answer: Answer, pieces: AsyncIterator[Piece], choices: Sequence[Choice]
    ) -> AsyncIterator[str]:
        seen: set[int] = set()
        try:
            async for piece in pieces:
                yield _event(answer.chunk(piece, choices, piece.index not in seen))
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
        if body.messages is not None:
            chat = partial(chat_prompt, add_generation_prompt=body.add_generation_prompt)
            ids = (await asyncio.to_thread(chat, body.messages, self.engine, self.templates)).tokens
        else:
            tokenize = partial(self.engine.tokenizer, add_special_tokens=body.add_special_tokens)
            ids = (await asyncio.to_thread(tokenize, body.prompt))["input_ids"]
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.engine.max_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [self._token_text(token) for token in ids]
        return JSONResponse(found)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._read(request, DetokenizeBody)
        if body.tokens and max(body.tokens) >= self.engine.vocab_size:
            text = f"tokens has {max(body.tokens)}, and the vocabulary has {self.engine.vocab_size} tokens"
            raise Fault(400, error_body(text, "invalid_request_error", "tokens"))
        return JSONResponse({"prompt": self.engine.tokenizer.decode(body.tokens)})

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

        families = await self.engine.families(self.settings.metrics_prefix)
        registry = CollectorRegistry()
        registry.register(Collector(lambda: iter(families)))
        return PlainTextResponse(generate_latest(registry).decode(), media_type="text/plain; version=0.0.4")

    async def version(self) -> Response:
        """Return the version."""
        return JSONResponse({"version": hf_slospec.__version__})


def _fault_of(error: Exception) -> Fault:
    """Return the answer to an error."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, HTTPException):  # of the framework: no such path or method
        return Fault(error.status_code, error_body(str(error.detail), "invalid_request_error"), error.headers)
    if isinstance(error, QueueFull):
        body = error_body(str(error), "rate_limit_error", code="queue_full")
        return Fault(429, body, {"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, NotRunningError | RequestCancelledError):
        return Fault(503, error_body(str(error), "service_unavailable_error"))
    if isinstance(error, InvalidInputError | InvalidTypeError | UnsupportedOptionError):
        return Fault(400, error_body(str(error), "invalid_request_error"))
    logger.error("a request failed", exc_info=error)
    return Fault(500, error_body("the request failed; the server's log says why", "internal_error"))


def _with_faults(endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Return an endpoint that answers errors itself: the framework would close the connection with the unknown ones."""

    @wraps(endpoint)
    async def answer(**arguments: Any) -> Response:
        try:
            return await endpoint(**arguments)
        except Exception as error:  # noqa: BLE001  the log has those that are faults of ours
            return _fault_of(error).response()

    return answer


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Return the answer to an error, in OpenAI's form."""
    return _fault_of(error).response()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def _disconnected(request: Request) -> None:
    """Wait until the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
