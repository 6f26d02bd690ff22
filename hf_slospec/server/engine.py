"""Interface between the HTTP server and an engine, and the engine that is a generator in this
process; the one with replicas is in ``replicas/failover.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.generate.grammars import Grammars
from hf_slospec.generate.rows import model_end_tokens
from hf_slospec.model.properties import vocab_size
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.state import FinishReason
from hf_slospec.server.tool_calls import response_template
from hf_slospec.server.work import Work


@dataclass(frozen=True)
class Order:
    """One request for the engine: its prompt, and the arguments of ``submit``."""

    prompt: list[int]
    arguments: dict[str, Any] = field(default_factory=dict)
    json_schema: dict[str, Any] | None = None  # schema of the output; None: any text
    request_id: str = ""  # as the client sees it, for logs
    client: str = ""  # name of the client, for fair scheduling by Work


class Decoding(Protocol):
    """A request that is being decoded."""

    def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        """Yield newly committed tokens, and whether they are the last; raises the error that ends
        the request.
        """

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Return log probabilities of the new tokens so far; none unless requested."""

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None]:
        """Return log probabilities of the prompt's tokens, from the first step on; none unless
        requested.
        """

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return the reason why the request ended; None while it has not."""

    @property
    def metrics(self) -> RequestMetrics:
        """Return the request's measurements so far."""

    @property
    def replica(self) -> str | None:
        """Return the name of the replica that serves the request; None without replicas."""

    def cancel(self) -> None:
        """Cancel the request, unless it is done."""


class ServedEngine(Protocol):
    """A model behind the server: in this process, or replicas of it."""

    tokenizer: Any
    processor: Any  # for messages with images; None: images are refused
    max_len: int  # maximum tokens of prompt and output
    generation_config: Any
    vocab_size: int
    work: Work  # thread pool for preparing requests, in this process
    # separates reasoning and tool calls from content; None: all output is content
    response_template: dict[str, Any] | None

    async def submit(self, order: Order) -> Decoding:
        """Queue a request; raises the errors of ``SLOSpecGenerator.submit``."""

    async def families(self, prefix: str) -> list[Any]:
        """Return the metric families for Prometheus, with names that begin with ``prefix``."""

    def check_running(self) -> None:
        """Raise NotRunningError if the engine has stopped or failed, and takes no requests."""


class LocalEngine:
    """A ``ServedEngine`` on a generator in this process, started and with a tokenizer."""

    def __init__(
        self,
        generator: SLOSpecGenerator,
        template: dict[str, Any] | None = None,
        work: Work | None = None,
    ):
        """``template`` replaces the response template of the tokenizer or model type."""
        self.response_template = template or response_template(generator.model, generator.tokenizer)
        self.work = work or Work()
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.processor = generator.processor
        self.max_len = generator.max_len
        self.generation_config = generator.model.generation_config
        self.vocab_size = vocab_size(generator.model)
        self._grammars = Grammars(
            self.tokenizer, self.vocab_size, model_end_tokens(self.generation_config)
        )

    async def submit(self, order: Order) -> RequestHandle:
        return await self.work.run(order.client, self._submit, order, undo=RequestHandle.cancel)

    def _submit(self, order: Order) -> RequestHandle:
        arguments = dict(order.arguments)
        if order.json_schema is not None:
            constraint = self._grammars.processor(order.json_schema, len(order.prompt))
            arguments["logits_processor"] = [*arguments.get("logits_processor", ()), constraint]
        return self.generator.submit(order.prompt, **arguments)

    async def families(self, prefix: str) -> list[Any]:
        return list(self.generator.collector(prefix).collect())

    def check_running(self) -> None:
        self.generator.check_running()
