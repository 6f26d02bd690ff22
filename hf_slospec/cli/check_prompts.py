"""The prompts that ``hf_slospec check`` decodes: texts from a file or built-in ones of many kinds,
and pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor

from hf_slospec.errors import InvalidInputError

SHORT = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The old lighthouse keeper climbed the stairs every evening, and",
    "Q: What is the capital of France?\nA:",
    "import os\n\n\nclass Cache:\n    def __init__(self, size):\n        self.size = size\n\n    def get(self, key):\n",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "friends": [',
    "Shopping list:\n- 2 apples\n- 1 loaf of bread\n- 3 eggs\n-",
    "1, 2, 4, 8, 16, 32, 64,",
    "<html>\n  <body>\n    <ul>\n      <li>One</li>\n      <li>Two</li>\n",
    "Translate into German: The weather is fine today. ->",
    "Il était une fois, dans un village de montagne, une petite fille qui",
    "Der Zug nach Hamburg hatte an diesem Morgen",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme,",
    "昔々、あるところに、おじいさんと",
    "从前有一座山，山里有一座庙，",  # noqa: RUF001  Chinese commas
    "Жили-были старик со старухой у самого",  # noqa: RUF001  Russian letters
    "كان يا ما كان في قديم الزمان",
    "the cat sat on the mat. " * 12,
    "Dear Ms Lovelace,\n\nthank you for your letter of 3 March. In reply to your questions:\n\n1.",
)
# Short texts, and a long one made of them.
BUILT_IN = (*SHORT, "\n\n".join(SHORT * 2))


def read_prompts(path: Path | None) -> list[str]:
    """Return the prompts of a file (one per line, or a list of texts in a ``.json`` file), or the
    built-in prompts if ``path`` is None.

    Raises:
        InvalidInputError: the file cannot be read, or has no prompts.
    """
    if path is None:
        return list(BUILT_IN)
    try:
        text = path.read_text(encoding="utf-8")
        prompts = (
            json.loads(text)
            if path.suffix == ".json"
            else [line for line in text.splitlines() if line.strip()]
        )
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, no JSON, or nested too deeply
        raise InvalidInputError(f"--prompts {path}: {error}") from error
    is_list = isinstance(prompts, list) and all(
        isinstance(prompt, str) and prompt for prompt in prompts
    )
    if not is_list or not prompts:
        raise InvalidInputError(
            f"--prompts {path} has no prompts; write one per line, or a list of texts into a .json file"
        )
    return prompts


def image_inputs(source: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the inputs of a prompt with one picture and of a prompt with two, made by the processor
    of the model ``source``.

    Raises:
        InvalidInputError: the model has no processor for pictures, or a package that it needs is
            not installed.
    """
    try:
        processor: Any = AutoProcessor.from_pretrained(source)
        for number in (1, 2):
            yield dict(_processed(processor, [_picture(seed) for seed in range(number)]).to(device))
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        raise InvalidInputError(
            f"--images: the processor of {source} takes no pictures here: {error}"
        ) from error


def _processed(processor: Any, pictures: list[Any]) -> Any:
    """Return the inputs of a prompt with pictures, in the model's chat format if it has one."""
    text = "Describe what you see."
    if getattr(processor, "chat_template", None) is not None:
        content = [
            *({"type": "image", "image": picture} for picture in pictures),
            {"type": "text", "text": text},
        ]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
    marked = processor.image_token * len(pictures) + text
    return processor(images=pictures, text=marked, return_tensors="pt")


def _picture(seed: int) -> Any:
    """Return a picture of coloured squares, 224 x 224 pixels."""
    from PIL import Image  # imported here: only processors for images install it

    squares = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(32, 0).repeat(32, 1))
