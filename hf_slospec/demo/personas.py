"""Who uses the demo: what they ask for, within limits, and the ones that are simulated."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hf_slospec.errors import InvalidInputError

MAX_PROMPT_CHARS = 2000
MAX_PROMPT_TOKENS = 768
MAX_NEW_TOKENS = 256
MAX_TPOT_SLO_MS = 10_000


class Wish(BaseModel):
    """What one user asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str = Field(max_length=MAX_PROMPT_CHARS)
    tpot_slo_ms: float | None = Field(gt=0, le=MAX_TPOT_SLO_MS, description="Per token; None: no promise is wanted.")
    temperature: float = Field(0.0, ge=0, le=2, description="0: always the most probable token.")
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(128, ge=2, le=MAX_NEW_TOKENS)

    @field_validator("prompt")
    @classmethod
    def _says_something(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return prompt

    @classmethod
    def of(cls, **fields: Any) -> Wish:
        """Raises InvalidInputError with words for the person who asked."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InvalidInputError("; ".join(_in_words(detail) for detail in error.errors())) from error

    @property
    def slo_tpot(self) -> float | None:
        return None if self.tpot_slo_ms is None else self.tpot_slo_ms / 1e3

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``submit``."""
        sampling = dict(do_sample=True, temperature=self.temperature, top_p=self.top_p) if self.temperature else {}
        is_spare = self.tpot_slo_ms is None
        return dict(slo_tpot=self.slo_tpot, best_effort=is_spare, max_new_tokens=self.max_new_tokens, **sampling)


def _in_words(detail: Any) -> str:
    name, message = str(detail["loc"][-1]).replace("_", " "), detail["msg"].removeprefix("Value error, ")
    return message if name in message else f"{name}: {message[0].lower()}{message[1:]}"


class Person(BaseModel):
    """A simulated user."""

    model_config = ConfigDict(frozen=True)

    name: str
    wants: str  # in a few words
    code: str  # the prompt for the embedded pair, which knows nothing but Python source
    question: str  # the prompt for other models
    target: float | None  # its target as a multiple of plain decoding's time per token; None: no promise
    temperature: float = 0.0
    max_new_tokens: int = 160

    def wish(self, plain_s: float, is_embedded: bool) -> Wish:
        """What it asks for where plain decoding of a few streams takes ``plain_s`` per token."""
        tpot_slo_ms = None if self.target is None else max(round(1e3 * self.target * plain_s), 1)
        return Wish.of(
            prompt=self.code if is_embedded else self.question,
            tpot_slo_ms=tpot_slo_ms,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
        )


PERSONAS = (
    Person(
        name="Coding copilot",
        wants="completes while you type: every token is waited for",
        code='def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as f:\n'
        "        return f.readlines()\n\n\ndef write_lines(path, lines):\n",
        question="Write a Python function that returns the lines of a file, and one that writes them.",
        target=0.9,
        temperature=0.4,
    ),
    Person(
        name="Chat",
        wants="is read as it is written: reading speed is enough",
        code='"""How do I read a file line by line in Python?\n\nThe simplest way is to\n',
        question="How do I read a file line by line in Python, and why does it matter for large files?",
        target=1.5,
        temperature=0.6,
    ),
    Person(
        name="Summary",
        wants="is looked at when it is done",
        code='"""Summary of this module.\n\nThis module provides a class for reading and writing\n'
        "configuration files. The main class is ConfigParser.\n\nFunctions:\n\n",
        question="Summarise what a configuration file parser does, section by section.",
        target=3.0,
        temperature=0.4,
    ),
    Person(
        name="Batch job",
        wants="nobody waits: it takes what the others leave",
        code="class TestStack(unittest.TestCase):\n    def test_push(self):\n        stack = Stack()\n"
        "        stack.push(1)\n"
        "        self.assertEqual(stack.size(), 1)\n\n    def test_pop(self):\n",
        question="List fifty ideas for unit tests of a stack, one per line.",
        target=None,
        temperature=0.4,
    ),
)
