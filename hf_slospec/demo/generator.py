"""Generator interface of the demo, and its implementation by a generator in this process."""

from __future__ import annotations

from typing import Any, Protocol

from hf_slospec.config import SLOSpecConfig
from hf_slospec.demo.highlight import HighlightedText, TextPiece
from hf_slospec.demo.personas import MAX_PROMPT_TOKENS
from hf_slospec.engine.events import Commit
from hf_slospec.engine.request import FinishReason, RequestMetrics
from hf_slospec.errors import InvalidInputError, NotRunningError, RequestCancelledError
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.handle import RequestHandle
from hf_slospec.serving.texts import Detokenizer, ToText

POLICIES = {
    "none": SLOSpecConfig(policy="none"),
    "fixed": SLOSpecConfig(policy="fixed", max_depth=4, max_width=1),
    "adaserve": SLOSpecConfig(policy="adaserve"),
    "auto": SLOSpecConfig(policy="auto"),
}


class DemoHandle(Protocol):
    """A request that is being decoded."""

    @property
    def commits(self) -> list[Commit]:
        """Return the tokens that each step so far added, with its time."""

    @property
    def pieces(self) -> list[TextPiece]:
        """Return the text so far, by the origin of its tokens."""

    @property
    def metrics(self) -> RequestMetrics | None:
        """Return measurements so far; None before there are any."""

    @property
    def replica(self) -> str | None:
        """Return the name of the replica that serves the request; None without replicas."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return the reason why the request ended; None before."""

    @property
    def error(self) -> BaseException | None:
        """Return the error that ended the request, if any."""

    def cancel(self) -> None:
        """Cancel the request, unless it is done."""

    def result(self) -> RequestMetrics:
        """Wait for the end of the request and return its measurements; raises its error."""


class DemoGenerator(Protocol):
    """A model that serves the users of the demo: in this process, or behind a server."""

    policy: str | None  # name of the current policy; None: it cannot be changed
    drafter: str | None  # kind of drafter; None: unknown
    is_chat: bool  # True: prompts are put into a chat template; False: the model continues them

    def start(self) -> None:
        """Start to take requests, or raise the error that prevents it."""

    def submit(self, prompt: str, **options: Any) -> DemoHandle:
        """Queue a request; ``options`` are those of ``SLOSpecGenerator.submit``."""

    def set_policy(self, name: str) -> None:
        """Change the policy from the next step on."""

    def stop(self) -> None:
        """End all requests."""


class LocalHandle:
    """A request in this process."""

    def __init__(self, handle: RequestHandle, to_text: ToText):
        self._handle, self._text = handle, HighlightedText(to_text)

    @property
    def commits(self) -> list[Commit]:
        return self._handle.commits

    @property
    def pieces(self) -> list[TextPiece]:
        return self._text.update(self._handle.token_ids, self._handle.from_draft)

    @property
    def metrics(self) -> RequestMetrics:
        return self._handle.metrics

    @property
    def replica(self) -> str | None:
        return self._handle.replica

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._handle.finish_reason

    @property
    def error(self) -> BaseException | None:
        error = self._handle.request.error if self._handle.done() else None
        return None if isinstance(error, RequestCancelledError) else error

    def cancel(self) -> None:
        self._handle.cancel()

    def result(self) -> RequestMetrics:
        return self._handle.result().metrics


class LocalGenerator:
    """A generator in this process, which must have a tokenizer."""

    def __init__(self, generator: SLOSpecGenerator):
        assert generator.tokenizer is not None
        self.generator = generator
        self.policy: str | None = "auto"
        self.drafter: str | None = generator.decoder.speculator.method.kind
        self._tokenizer: Any = generator.tokenizer
        self.is_chat = getattr(self._tokenizer, "chat_template", None) is not None

    def start(self) -> None:
        self.generator.start()

    def submit(self, prompt: str, **options: Any) -> LocalHandle:
        num_tokens = len(self._tokenizer(prompt)["input_ids"])
        if num_tokens > MAX_PROMPT_TOKENS:
            raise InvalidInputError(f"the prompt has {num_tokens} tokens; shorten it, the limit is {MAX_PROMPT_TOKENS}")
        inputs: Any = [{"role": "user", "content": prompt}] if self.is_chat else prompt
        try:
            handle = self.generator.submit(inputs, **options)
        except NotRunningError:  # an error stopped the engine; the streams of that step show it
            self.generator.start()
            handle = self.generator.submit(inputs, **options)
        return LocalHandle(handle, Detokenizer(self._tokenizer))

    def set_policy(self, name: str) -> None:
        if name not in POLICIES:
            raise InvalidInputError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
        self.generator.set_policy(POLICIES[name])
        self.policy = name

    def stop(self) -> None:
        self.generator.stop(drain=False)
