"""Requests of the demo's users, the limits on them, and the simulated users (personas)."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hf_slospec.errors import InputModel

MAX_PROMPT_CHARS = 2000
MAX_PROMPT_TOKENS = 768
MAX_NEW_TOKENS = 256
MAX_TPOT_SLO_MS = 10_000
TIGHTEST = 1.15  # tightest SLO of a persona / its measured TPOT with drafts


class UserRequest(InputModel):
    """Settings of one user's request. Values beyond the demo's limits raise InvalidInputError."""

    prompt: str = Field(max_length=MAX_PROMPT_CHARS)
    tpot_slo_ms: float | None = Field(gt=0, le=MAX_TPOT_SLO_MS, description="None: no SLO.")
    temperature: float = Field(0.0, ge=0, le=2, description="0: always the most probable token.")
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(128, ge=2, le=MAX_NEW_TOKENS)

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("must not be empty")
        return prompt

    @property
    def options(self) -> dict[str, Any]:
        sampling = (
            dict(do_sample=True, temperature=self.temperature, top_p=self.top_p)
            if self.temperature
            else {}
        )
        slo_tpot = None if self.tpot_slo_ms is None else self.tpot_slo_ms / 1e3
        return dict(
            slo_tpot=slo_tpot,
            best_effort=slo_tpot is None,
            max_new_tokens=self.max_new_tokens,
            **sampling,
        )


class Persona(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    description: str
    # For models without a chat template, such as the embedded pair, which was trained on Python
    code_prompt: str
    chat_prompt: str  # for models with a chat template
    # TPOT SLO / TPOT without drafts; None: no SLO; 0: between the TPOTs with and without drafts
    slo_factor: float | None
    temperature: float = 0.0
    max_new_tokens: int = 160

    def request(self, plain_tpot_s: float, drafted_tpot_s: float, is_chat: bool) -> UserRequest:
        """Return the persona's request.

        Args:
            plain_tpot_s: seconds per token without drafts, measured here with all personas.
            drafted_tpot_s: the persona's seconds per token with drafts, measured likewise.
            is_chat: whether the model has a chat template.
        """
        tpot_slo_ms = None
        if self.slo_factor is not None:
            between_s = max(math.sqrt(plain_tpot_s * drafted_tpot_s), TIGHTEST * drafted_tpot_s)
            slo_s = self.slo_factor * plain_tpot_s or between_s
            tpot_slo_ms = min(max(round(1e3 * slo_s), 1), MAX_TPOT_SLO_MS)
        return UserRequest(
            prompt=self.chat_prompt if is_chat else self.code_prompt,
            tpot_slo_ms=tpot_slo_ms,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
        )


CHAT_CODE = """Add type hints and docstrings to this code:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def size(self):
        return len(self.items)
```"""
CHAT_TEXT = """Explain how bees tell each other where to find food, by this text:

Honey bees tell each other where to find food by dancing. A bee that has found flowers returns to the hive and runs in
a straight line on the comb while it shakes its body, turns back and runs again. The direction of the run shows the
direction of the flowers, measured from the sun: if the bee runs straight up, the flowers are in the direction of the
sun. The duration of the run shows the distance: one second of dancing stands for about one kilometre of flight. Other
bees follow the dancer closely, because the hive is dark, and feel the dance with their antennae. Karl von Frisch
described the dance in the 1920s and was awarded the Nobel Prize in 1973. Young bees learn to dance from older ones."""
CHAT_LIST = """Correct the spelling of these sentences. Write each corrected sentence on its own line.

1. The meeting has been moved to Wensday afternoon.
2. Please send the recipt to the adress below.
3. We recieved your order yesterday and will ship it tommorow.
4. The goverment announced new rules for the enviroment.
5. It is neccessary to sign the document seperately.
6. He definately beleives that the libary is open."""
PERSONAS = (
    Persona(
        name="Coding copilot",
        description="types along: the tightest SLO",
        code_prompt='def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as f:\n'
        "        return f.readlines()\n\n\ndef write_lines(path, lines):\n",
        chat_prompt=CHAT_CODE,
        slo_factor=0.0,
        max_new_tokens=96,
    ),
    Persona(
        name="Chat",
        description="read while it is written",
        code_prompt='"""How do I read a file line by line in Python?\n\nThe simplest way is to\n',
        chat_prompt="Why is the sky blue, and why is it red in the evening?",
        slo_factor=1.5,
        temperature=0.6,
    ),
    Persona(
        name="Summary",
        description="read when it is complete",
        code_prompt='"""Summary of this module.\n\nThis module provides a class for reading and writing\n'
        "configuration files. The main class is ConfigParser.\n\nFunctions:\n\n",
        chat_prompt=CHAT_TEXT,
        slo_factor=3.0,
        temperature=0.4,
    ),
    Persona(
        name="Batch job",
        description="no SLO: takes what others leave",
        code_prompt="class TestStack(unittest.TestCase):\n    def test_push(self):\n        stack = Stack()\n"
        "        stack.push(1)\n"
        "        self.assertEqual(stack.size(), 1)\n\n    def test_pop(self):\n",
        chat_prompt=CHAT_LIST,
        slo_factor=None,
        temperature=0.4,
    ),
)
