"""The FastAPI application with all endpoints, for an engine. Completions and chats are in
``completions.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import hf_slospec
from hf_slospec.batcher.stats import Collector, with_labels
from hf_slospec.server.access import OwnPagesOnly, ServerSettings
from hf_slospec.server.answers import SLO_ANSWER_HEADERS, event
from hf_slospec.server.anthropic import PATH, CountTokensBody, MessagesBody, anthropic_error
from hf_slospec.server.bodies import CompletionBody, DetokenizeBody, LoadBody
from hf_slospec.server.chat_templates import ChatTemplates
from hf_slospec.server.chats import ChatBody, TokenizeBody
from hf_slospec.server.completions import Completions
from hf_slospec.server.engine import ServedEngine
from hf_slospec.server.reading import (
    Fault,
    RequestReader,
    check_framing,
    check_running,
    fault_of,
)
from hf_slospec.server.responses import ResponsesBody
from hf_slospec.server.schemas import SchemaCheck

# Response headers that web pages of allowed origins may read
EXPOSED_HEADERS = ("Retry-After", *SLO_ANSWER_HEADERS)
OPEN = ("/health", "/load_model", "/metrics", "/version")  # paths that never need an API key
WHILE_STOPPING = ("/metrics", "/version")  # paths that are answered after the signal to stop


def make_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """Return the FastAPI application that serves an engine."""
    app = FastAPI(
        title="hf_slospec", version=hf_slospec.__version__, docs_url=None, redoc_url=None,
        dependencies=[Depends(check_framing)],
    )  # fmt: skip
    reader = RequestReader(engine, settings)
    templates = ChatTemplates(engine, settings.bounds, settings.special_tokens)
    schemas = SchemaCheck(settings.bounds)
    completions = Completions(reader, templates, schemas)
    small = _SmallEndpoints(reader, templates, schemas)
    # read by ImpatientProtocol, and by check_running
    app.state.reader_s = settings.bounds.reader_s
    app.state.counts = reader.counts
    app.state.is_stopping = False
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip
    if not settings.api_keys:
        app.add_middleware(
            OwnPagesOnly,
            allowed_origins=settings.allowed_origins,
            allowed_hosts=settings.allowed_hosts,
        )
    for kind in (HTTPException, Fault):  # unknown paths and methods; missing keys
        app.add_exception_handler(kind, _answer_fault)
    definitions: dict[str, Any] = {}
    routes: tuple[tuple[str, str, Callable[..., Any], type[BaseModel] | None], ...] = (
        ("POST", "/v1/chat/completions", completions.chat, ChatBody),
        ("POST", "/v1/completions", completions.complete, CompletionBody),
        ("POST", "/v1/responses", completions.translated, ResponsesBody),
        ("POST", PATH, completions.translated, MessagesBody),
        ("POST", f"{PATH}/count_tokens", completions.counted, CountTokensBody),
        ("POST", "/tokenize", small.tokenize, TokenizeBody),
        ("POST", "/detokenize", small.detokenize, DetokenizeBody),
        ("POST", "/load_model", small.load_model, LoadBody),
        ("GET", "/tokenizer_info", small.tokenizer_info, None),
        ("GET", "/v1/models", small.models, None),
        ("GET", "/v1/models/{model:path}", small.model, None),
        ("GET", "/health", small.health, None),
        ("HEAD", "/health", small.health, None),
        ("GET", "/metrics", small.metrics, None),
        ("GET", "/version", small.version, None),
    )
    for method, path, endpoint, body in routes:
        extra = None
        if body is not None:
            extra = {"requestBody": _described(body, definitions)}
            endpoint = reader.with_body(body, endpoint)
        checks = [] if path in WHILE_STOPPING else [check_running]
        checks += [] if path in OPEN else [reader.check_key]
        app.add_api_route(
            path, reader.with_faults(endpoint), methods=[method], openapi_extra=extra, response_model=None,
            include_in_schema=method != "HEAD",
            dependencies=[Depends(check) for check in checks],
        )  # fmt: skip
    _add_definitions(app, definitions)
    return app


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Handle an exception as FastAPI's exception handler: return an error in the format of the API
    that was called.
    """
    fault = fault_of(error)
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    body = fault.body
    if path.startswith(PATH):
        body = anthropic_error(body, fault.status, fault.for_anthropic)
    return JSONResponse(body, fault.status, fault.headers)


def _described(body: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a body's OpenAPI description; put schemas that it refers to into ``definitions``."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions |= schema.pop("$defs", {})
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _add_definitions(app: FastAPI, definitions: dict[str, Any]) -> None:
    """Add ``definitions``, the schemas that request bodies refer to, to the OpenAPI description.
    FastAPI does not know these schemas, as the endpoints read the bodies themselves.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        description: dict[str, Any] = make()
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return description

    app.openapi = openapi  # type: ignore[method-assign]


class _SmallEndpoints:
    """Endpoints for tokenizing, information about model and tokenizer, health and metrics."""

    def __init__(self, reader: RequestReader, templates: ChatTemplates, schemas: SchemaCheck):
        self.reader = reader
        self.engine = reader.engine
        self.settings = reader.settings
        self.templates = templates
        self.schemas = schemas
        self.created = int(time.time())

    def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a text or of messages."""
        tokenizer = self.engine.tokenizer
        if body.messages is not None:
            chat = ChatBody(
                messages=body.messages, add_generation_prompt=body.add_generation_prompt
            )
            token_ids = self.templates.prompt(chat).tokens
        else:
            token_ids = tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)[
                "input_ids"
            ]
        answer = {
            "count": len(token_ids),
            "max_model_len": self.engine.max_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            texts = {token: tokenizer.decode([token]) for token in set(token_ids)}
            answer["token_strs"] = [texts[token] for token in token_ids]
        return JSONResponse(answer)

    def detokenize(self, body: DetokenizeBody) -> Response:
        if body.tokens and max(body.tokens) >= self.engine.vocab_size:
            text = f"tokens has {max(body.tokens)}, and the vocabulary has {self.engine.vocab_size} tokens"
            raise Fault(400, text, param="tokens")
        return JSONResponse({"prompt": self.engine.tokenizer.decode(body.tokens)})

    async def tokenizer_info(self) -> Response:
        """Return the tokenizer's class, special tokens and chat template; raises Fault if the
        server was started without ``--tokenizer-info``.
        """
        if not self.settings.tokenizer_info:
            text = "this server does not describe its tokenizer; start it with --tokenizer-info"
            raise Fault(404, text, "not_found_error")
        tokenizer = self.engine.tokenizer
        info = {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": tokenizer.model_max_length,
        }
        return JSONResponse(
            info | tokenizer.special_tokens_map | {"chat_template": tokenizer.chat_template}
        )

    async def load_model(self, request: Request, body: LoadBody) -> Response:
        """Return an event that says that the model is loaded, for which ``transformers chat`` waits."""
        return Response(event({"status": "ready", "cached": True}), media_type="text/event-stream")

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        self.reader.check_model(model)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "hf_slospec",
            "max_model_len": self.engine.max_len,
        }

    async def health(self) -> Response:
        """Return status 200 if the engine runs; otherwise raise NotRunningError."""
        self.engine.check_running()
        return Response(status_code=200)

    async def version(self) -> Response:
        return JSONResponse({"version": hf_slospec.__version__})

    async def metrics(self) -> Response:
        from prometheus_client import CollectorRegistry, generate_latest

        of_engine = await self.engine.families(self.settings.metrics_prefix)
        labels = {
            "model_name": self.settings.model_name,
            "engine": "0",
        }  # the labels of vLLM's metrics
        families = [*with_labels(of_engine, **labels), *self._families()]
        registry = CollectorRegistry()
        registry.register(Collector(lambda: iter(families)))
        return PlainTextResponse(
            generate_latest(registry).decode(), media_type="text/plain; version=0.0.4"
        )

    def _families(self) -> Iterator[Any]:
        """Yield metric families of the server itself; the engine has more."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        prefix = self.settings.metrics_prefix
        pools = {"work": self.engine.work, "schemas": self.schemas.slots}
        rows: list[tuple[Any, str, str, str, dict[str, int]]] = [
            (kind, name.replace("num_", "pool_jobs_"), text, "pool",
             {pool: getattr(slots, name) for pool, slots in pools.items()})
            for kind, name, text in (
                (GaugeMetricFamily, "num_running", "Jobs that prepare requests now."),
                (GaugeMetricFamily, "num_waiting", "Jobs that wait to begin."),
                (CounterMetricFamily, "num_refused", "Jobs refused as too many waited."),
                (CounterMetricFamily, "num_dropped", "Jobs dropped as their client left."),
            )
        ]  # fmt: skip
        for kind, name, text, label, counts in (
            (CounterMetricFamily, "requests_refused", "Requests above a limit.", "limit", self.reader.refused),
            (CounterMetricFamily, "requests_by_objective", "Requests with a gateway's objective.", "objective",
             self.reader.objectives),
            *rows,
        ):  # fmt: skip
            family = kind(prefix + name, text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        for name, text in (
            ("clients_left", "Requests whose client left before their answer began."),
            ("readers_cut", "Connections that were closed because nothing was read."),
        ):
            yield CounterMetricFamily(prefix + name, text, value=self.reader.counts[name])
