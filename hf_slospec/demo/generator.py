"""The demo's generator, and texts split into drafted stretches and the target's own tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.texts import Detokenizer, TextStream, ToText
from hf_slospec.config import SLOSpecConfig
from hf_slospec.demo.personas import MAX_PROMPT_TOKENS
from hf_slospec.errors import InvalidInputError, NotRunningError


class TextPiece(NamedTuple):
    """A stretch of text whose tokens were all drafted, or all chosen by the target."""

    text: str
    is_draft: bool  # the tokens are accepted drafts; False: the target chose them


class HighlightedText:
    """A growing text, divided into accepted drafts and tokens that the target chose. A character
    that consists of several tokens belongs to the stretch of its last token.
    """

    def __init__(self, to_text: ToText):
        self._stream = TextStream(to_text)
        self._pieces = list[TextPiece]()
        self._num_tokens = 0

    def update(
        self, tokens: list[int], from_draft: list[bool], is_last: bool = False
    ) -> list[TextPiece]:
        """Return the stretches of the text of all tokens so far.

        Args:
            tokens: all tokens so far, those of earlier calls included.
            from_draft: True for accepted drafts, one per token.
            is_last: no further tokens will come, so an incomplete character is output, too.
        """
        fresh = list(zip(tokens, from_draft, strict=False))[self._num_tokens :]
        for is_draft, run in groupby(fresh, key=lambda pair: pair[1]):
            if text := self._stream.push([token for token, _ in run], is_last=False):
                self._pieces.append(TextPiece(text, is_draft))
        self._num_tokens += len(fresh)
        if is_last and from_draft and (rest := self._stream.push([], is_last=True)):
            self._pieces.append(TextPiece(rest, from_draft[-1]))
        return list(self._pieces)


FIXED = SLOSpecConfig(policy="fixed", max_depth=4, max_width=1)
POLICIES = {
    "auto": "drafts where it pays, users that miss their SLO first",
    "adaserve": "the whole token budget in every step",
    "fixed": "four draft tokens for every user",
    "none": "no drafts",
}


class DemoGenerator:
    """The generator that serves all users of the demo, and its policy. It must have a tokenizer."""

    def __init__(self, generator: SLOSpecGenerator):
        assert generator.tokenizer is not None
        self.generator = generator
        self.policy = "auto"
        self.drafter = generator.draft_method.kind
        self._tokenizer: Any = generator.tokenizer
        self.to_text = Detokenizer(self._tokenizer)
        self.is_chat = getattr(self._tokenizer, "chat_template", None) is not None

    def submit(self, prompt: str, **options: Any) -> RequestHandle:
        """Queue a request; ``options`` are those of ``SLOSpecGenerator.submit``."""
        num_tokens = len(self._tokenizer(prompt)["input_ids"])
        if num_tokens > MAX_PROMPT_TOKENS:
            raise InvalidInputError(
                f"the prompt has {num_tokens} tokens; shorten it, the limit is {MAX_PROMPT_TOKENS}"
            )
        inputs: Any = [{"role": "user", "content": prompt}] if self.is_chat else prompt
        try:
            return self.generator.submit(inputs, **options)
        except NotRunningError:  # an error stopped the engine; its running requests show it
            self.generator.start()
            return self.generator.submit(inputs, **options)

    def set_policy(self, name: str) -> None:
        """Change the policy, which the page shows, from the next step on."""
        self.use(name)
        self.policy = name

    def use(self, policy: str) -> None:
        """Decode with a policy from the next step on; the page goes on to show the chosen one."""
        if policy not in POLICIES:
            raise InvalidInputError(
                f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}"
            )
        self.generator.set_policy(FIXED if policy == "fixed" else policy)

    def stop(self) -> None:
        self.generator.stop(drain=False)
