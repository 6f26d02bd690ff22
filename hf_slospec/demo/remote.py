"""Generator of the demo by a running server: every stream is a streamed request to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from hf_slospec.demo.highlight import TextPiece
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.engine.request import FinishReason, RequestMetrics
from hf_slospec.errors import (
    InvalidInputError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOSpecError,
    UnsupportedOptionError,
)
from hf_slospec.generate.speculator import clock

T = TypeVar("T")
MAX_PORT = 65535
TIMEOUT = httpx.Timeout(10.0, read=120.0)  # seconds; a read waits for the next chunk, also in the server's queue
FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # options of submit, fields of bodies
# Exceptions by OpenAI's types of errors.
FAULTS = {
    "invalid_request_error": InvalidInputError,
    "rate_limit_error": QueueFull,
    "service_unavailable_error": NotRunningError,
}
EVENT = "data: {"  # prefix of lines with a chunk


class RemoteHandle:
    """A streamed request to a server, as far as it has been received.

    Measurements are the server's; times of commits are arrival times of chunks. A chunk has the tokens of one step or,
    if this reader was slow, of several; its accepted draft tokens are taken to be its first ones.
    """

    def __init__(self, read: Callable[[RemoteHandle], Future[None]]):
        """``read`` starts to read the stream into this handle."""
        self._commits: list[Commit] = []
        self._pieces: list[TextPiece] = []
        self._num_nodes = self._num_accepted = 0  # total of all commits
        self.metrics: RequestMetrics | None = None
        self.replica: str | None = None
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self._reading = read(self)

    @property
    def commits(self) -> list[Commit]:
        """One commit for each chunk with tokens."""
        return list(self._commits)

    @property
    def pieces(self) -> list[TextPiece]:
        """The text so far, by the origin of its tokens."""
        return list(self._pieces)

    def cancel(self) -> None:
        """Cancel the request by closing its connection."""
        self.end("cancelled")
        self._reading.cancel()

    def result(self) -> RequestMetrics:
        """Wait for the end and return the server's measurements; raises the request's error."""
        concurrent.futures.wait([self._reading])
        if self.error is not None:
            raise self.error
        if self.finish_reason == "cancelled" or self.metrics is None:
            raise RequestCancelledError("the request was cancelled")
        return self.metrics

    # ---- for the reader

    async def read(self, lines: AsyncIterator[str]) -> None:
        """Take all chunks; raises the error of a chunk, or NotRunningError if the last chunk is missing."""
        reason = None
        async for line in lines:
            if line.startswith(EVENT):
                reason = self._take(json.loads(line[len(EVENT) - 1 :])) or reason
        if reason is None:
            raise NotRunningError("the server ended the stream before the answer was complete; send the request again")
        self.end("length" if reason == "length" else "stop")

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the request, unless it is done."""
        if self.finish_reason is None:
            self.error, self.finish_reason = error, reason

    def _take(self, chunk: dict[str, Any]) -> str | None:
        """Add a chunk, and return the finish reason if it has one."""
        if "error" in chunk:
            raise _fault(chunk["error"])
        reason, before = None, 0 if self.metrics is None else self.metrics.tokens
        self.metrics = _metrics(chunk["usage"])
        self.replica = chunk["usage"]["metrics"].get("replica")
        for choice in chunk["choices"]:  # empty in the last chunk, which has the usage
            num_accepted = self._commit(self.metrics, self.metrics.tokens - before)
            self._pieces += _split(*_texts(choice), num_accepted)
            reason = choice["finish_reason"]
        return reason

    def _commit(self, now: RequestMetrics, num_new: int) -> int:
        """Add a commit of ``num_new`` tokens, if any, and return the number of accepted draft tokens among them."""
        if not num_new:
            return 0
        # The server's counts may be a step ahead of the chunk's tokens; the next chunk has the rest.
        num_accepted = min(now.accepted - self._num_accepted, num_new)
        num_nodes = now.drafted + now.steps + 1  # with a root for every step and for the prefill
        self._commits.append(Commit(now.tokens, clock(), num_nodes - self._num_nodes, num_accepted))
        self._num_nodes, self._num_accepted = num_nodes, self._num_accepted + num_accepted
        return num_accepted


class RemoteGenerator:
    """A running hf_slospec server, whose model and policy cannot be changed.

    A thread with an event loop reads all streams, so that a request can be cancelled at any time, also in the queue.
    """

    policy: str | None = None
    drafter: str | None = None

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model_name, self.is_chat = "", False  # known after the start
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT)
        except httpx.InvalidURL as error:
            raise InvalidInputError(f"--server {url}: {error}") from error
        if (port := self._client.base_url.port) is not None and not 0 < port <= MAX_PORT:
            raise InvalidInputError(f"--server {url}: the port must be within 1..{MAX_PORT}")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hf_slospec-demo-streams", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Read the name of the server's model and whether it has a chat template, which checks address and key, too."""
        self._run(self._describe()).result()

    def submit(self, prompt: str, **options: Any) -> RemoteHandle:
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "temperature": 0.0,
        }
        body |= {FIELDS.get(name, name): value for name, value in options.items() if name != "do_sample"}
        # Log probabilities come with the text of every token, which shows where accepted drafts end.
        if self.is_chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
        else:
            body |= {"prompt": prompt, "logprobs": 0}
        return RemoteHandle(lambda handle: self._run(self._read(handle, body)))

    def set_policy(self, name: str) -> None:
        """Raise UnsupportedOptionError: the policy is the server's."""
        raise UnsupportedOptionError("a server keeps the policy it was started with; restart it with another one")

    def stop(self) -> None:
        """Cancel the requests of this demo and disconnect."""
        self._run(self._disconnect()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- in the thread

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _describe(self) -> None:
        async with self._answer("/v1/models") as answer:
            self.model_name = json.loads(await answer.aread())["data"][0]["id"]
        try:
            async with self._answer("/tokenize", {"messages": [{"role": "user", "content": "x"}]}):
                self.is_chat = True
        except InvalidInputError:  # there is no chat template, or it refuses a single user message
            self.is_chat = False

    async def _read(self, handle: RemoteHandle, body: dict[str, Any]) -> None:
        try:
            async with self._answer("/v1/chat/completions" if self.is_chat else "/v1/completions", body) as answer:
                await handle.read(answer.aiter_lines())
        except Exception as error:  # noqa: BLE001  the stream shows it
            handle.end("error", error)
        finally:
            handle.end("cancelled")  # no effect if the request has ended

    @asynccontextmanager
    async def _answer(self, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """Send a request and yield its answer, with an unread body; an answer that is an error is raised."""
        try:
            async with self._client.stream("GET" if body is None else "POST", path, json=body) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _fault(_error(answer))
                yield answer
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise NotRunningError(f"the server at {self.url} does not answer: {reason}; check that it runs") from error

    async def _disconnect(self) -> None:
        reading = asyncio.all_tasks() - {asyncio.current_task()}
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await self._client.aclose()


def _error(answer: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer in OpenAI's form, also if a proxy wrote it in another."""
    try:
        error: dict[str, Any] = answer.json()["error"]
        return {"type": error["type"], "message": error["message"]}
    except (ValueError, LookupError, TypeError):
        kind = "service_unavailable_error" if answer.status_code >= 502 else ""
        return {"type": kind, "message": f"the server answered {answer.status_code} {answer.reason_phrase}"}


def _fault(error: dict[str, Any]) -> SLOSpecError:
    """Return the exception that a generator in this process would raise, from an error in OpenAI's form."""
    return FAULTS.get(error["type"], SLOSpecError)(error["message"])


def _metrics(usage: dict[str, Any]) -> RequestMetrics:
    """Return the measurements in a chunk's usage; those that the server does not send are empty."""
    measured, counts = usage["metrics"], usage["completion_tokens_details"]
    accepted, rejected = counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1e3

    return RequestMetrics(
        tpot_slo_s=measured["slo_tpot"],
        tpot_s=seconds(measured["mean_itl_ms"]),
        ttft_s=seconds(measured["time_to_first_token_ms"]),
        attained=measured["attained"],
        tokens=usage["completion_tokens"],
        steps=measured["speculative_decoding"]["num_spec_steps"],
        drafted=accepted + rejected,
        accepted=accepted,
        slack_s=None,
        worst_tpot_s=None,
        expected_tokens=0.0,
        phases=PhaseTimes(),
        ttft_slo_s=measured["slo_ttft"],
        guaranteed=measured["guaranteed"],
        reused=usage["prompt_tokens_details"]["cached_tokens"],
        resumed=measured.get("resumed_tokens", 0),
        window_guarantee=measured.get("window_guarantee"),
        windows_kept=measured.get("windows_kept"),
        e2e_slo_s=measured.get("slo_e2e"),
        e2e_s=seconds(measured.get("e2e_latency_ms")),
        acceptance_histogram=tuple(measured["speculative_decoding"].get("acceptance_histogram", ())),
    )


def _texts(choice: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the text of a chunk's choice, and that of each of its tokens."""
    if "text" in choice:
        return choice["text"], choice["logprobs"]["tokens"]
    delta = choice["delta"]
    text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    return text, [token["token"] for token in choice["logprobs"]["content"]]


def _split(text: str, tokens: list[str], num_accepted: int) -> list[TextPiece]:
    """Return the text before and after the end of its first ``num_accepted`` tokens.

    If the text does not end with the remaining tokens, all of it counts as drafted: the last token is then hidden or
    has part of a character.
    """
    rest = "".join(tokens[num_accepted:])
    end = len(text) - len(rest) if text.endswith(rest) else len(text)
    parts = ((text[:end], True), (text[end:], False)) if num_accepted else ((text, False),)
    return [TextPiece(part, is_draft) for part, is_draft in parts if part]
