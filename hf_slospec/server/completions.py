"""Endpoints of completions and chats. They turn a body into choices, which the engine decodes, and
the choices' output into a response.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hf_slospec.batcher.texts import Detokenizer
from hf_slospec.server.answers import Answer, AnswerForm, slo_headers
from hf_slospec.server.bodies import CompletionBody, SamplingBody
from hf_slospec.server.chat_templates import ChatTemplates, PromptInputs
from hf_slospec.server.chats import ChatBody, ForeignBody
from hf_slospec.server.choices import Choice, Piece, merged
from hf_slospec.server.engine import Order
from hf_slospec.server.orders import end_tokens, order_of, prompt_of
from hf_slospec.server.reading import RequestReader, fault_of, while_connected
from hf_slospec.server.schemas import SchemaCheck
from hf_slospec.server.tool_calls import CallParts, Parser, PlainParts, TemplateParts

InPool = Callable[..., Awaitable[Any]]  # calls a function with its arguments in the thread pool
LONG_PIECE = 64  # tokens; log probabilities of longer pieces are formatted in the thread pool


class Completions:
    def __init__(self, reader: RequestReader, templates: ChatTemplates, schemas: SchemaCheck):
        self.reader = reader
        self.engine = reader.engine
        self.templates = templates
        self.schemas = schemas
        self._texts = {skips: Detokenizer(self.engine.tokenizer, skips) for skips in (False, True)}

    async def chat(self, request: Request, body: ChatBody) -> Response:
        return await self._answer_chat(request, body, self.form(body))

    async def translated(self, request: Request, body: ForeignBody) -> Response:
        """Return the response to a body of another API, which is translated into a chat."""
        return await self._answer_chat(request, body.chat, body.answer(self.form(body.chat)))

    def counted(self, body: ForeignBody) -> Response:
        """Return a response with the number of tokens of the prompt that the body makes."""
        return JSONResponse({"input_tokens": len(self.templates.prompt(body.chat).tokens)})

    async def _answer_chat(self, request: Request, body: ChatBody, answer: AnswerForm) -> Response:
        return await self._answer(request, body, [partial(self.templates.prompt, body)], answer)

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        prompts = [partial(prompt_of, prompt, body, self.engine) for prompt in body.prompts]
        return await self._answer(request, body, prompts, self.form(body))

    def form(self, body: SamplingBody) -> Answer:
        return Answer(self.reader.settings.model_name, body, self._texts[False].token_bytes)

    async def _answer(
        self,
        request: Request,
        body: SamplingBody,
        make_prompts: Sequence[Callable[[], PromptInputs]],
        answer: AnswerForm,
    ) -> Response:
        in_pool = partial(self.reader.in_pool, request)
        choices: list[Choice] = []
        try:
            terms = self.reader.terms(request, body)
            if body.json_schema is not None:
                await self.schemas.check(request.state.client, body.json_schema, body.schema_field)
            prompts = [await in_pool(make) for make in make_prompts]
            per_prompt_orders = [
                [order_of(body, prompt, terms, self.engine, i) for i in range(body.n)]
                for prompt in prompts
            ]
            for orders in per_prompt_orders:
                for order in orders:
                    order = replace(order, request_id=answer.id, client=request.state.client)
                    choices.append(await self._choice(len(choices), order, body, in_pool))
            if not body.stream:
                return await self._whole(answer, merged(choices), choices, in_pool)
        except BaseException:
            _cancel(choices)
            raise
        return _Stream(self._events(answer, merged(choices), choices, in_pool), choices)

    async def _choice(
        self, index: int, order: Order, body: SamplingBody, in_pool: InPool
    ) -> Choice:
        parser: Parser = PlainParts()
        template = self.engine.response_template
        if isinstance(body, ChatBody) and body.must_call:
            parser = CallParts()
        elif template is not None and isinstance(body, ChatBody) and body.json_schema is None:
            # with a schema, all output is content
            parser = await in_pool(self._parser, template, order.prompt, body)
        arguments: dict[str, Any] = {"skip_special_tokens": body.skip_special_tokens}
        hidden = body.stop_token_ids or []
        if isinstance(parser, TemplateParts):
            # response templates match the texts of special tokens
            arguments["skip_special_tokens"] = False
            hidden = end_tokens(body, self.engine.generation_config)
        has_offsets = isinstance(body, CompletionBody) and body.logprobs is not None
        echoes = isinstance(body, CompletionBody) and body.echo
        if echoes and has_offsets:
            arguments["prompt_logprobs"] = order.arguments["logprobs"]
        is_prompt_only = not order.arguments["max_new_tokens"]
        if is_prompt_only:
            arguments["max_new_tokens"] = 1  # the engine decodes at least one token
        order = replace(order, arguments=order.arguments | arguments)
        return Choice(
            index, await self.engine.submit(order), order.prompt,
            self._texts[arguments["skip_special_tokens"]], in_pool, body.stop_strings, hidden,
            body.include_stop_str_in_output, echoes, is_prompt_only, parser, has_offsets, body.min_tokens,
        )  # fmt: skip

    def _parser(self, template: dict[str, Any], prompt: list[int], body: ChatBody) -> TemplateParts:
        return TemplateParts(
            template, self.engine.tokenizer.decode(prompt), body.shown_tools, body.max_calls
        )

    async def _whole(
        self,
        answer: AnswerForm,
        pieces: AsyncIterator[Piece],
        choices: Sequence[Choice],
        in_pool: InPool,
    ) -> Response:
        gathered = [Piece(choice.index, "", [], []) for choice in choices]
        async for piece in pieces:
            gathered[piece.index] = gathered[piece.index].joined(piece)

        def response() -> Response:
            return JSONResponse(answer.whole(gathered, choices), headers=slo_headers(choices))

        return await in_pool(response) if answer.wants_logprobs else response()

    async def _events(
        self,
        answer: AnswerForm,
        pieces: AsyncIterator[Piece],
        choices: Sequence[Choice],
        in_pool: InPool,
    ) -> AsyncIterator[str]:
        begun: set[int] = set()  # indices of choices that have sent a chunk

        def events_of(piece: Piece) -> str:
            return answer.chunk(piece, choices, piece.index not in begun)

        try:
            if first := answer.begin(choices):
                yield first
            async for piece in pieces:
                takes_long = answer.wants_logprobs and len(piece.tokens) > LONG_PIECE
                yield await in_pool(events_of, piece) if takes_long else events_of(piece)
                begun.add(piece.index)
            yield answer.end(choices)
        except Exception as error:  # noqa: BLE001  the status has been sent, so the stream carries the error
            yield answer.failed(fault_of(error).body, choices)


class _Stream(StreamingResponse):
    """Streaming response that cancels its requests at its end, even if it never starts."""

    def __init__(self, events: AsyncIterator[str], choices: Sequence[Choice]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # servers may raise OSError from send
            with contextlib.suppress(ClientDisconnect, OSError):
                # replaces the task group of starlette's method
                await while_connected(receive, self.stream_response(send))
        finally:
            _cancel(self._choices)


def _cancel(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.decoding.cancel()
