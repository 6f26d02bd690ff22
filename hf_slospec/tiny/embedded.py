"""The embedded pair: a small trained target, draft and tokenizer that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "pair"


def load_tiny_pair(
    dtype: torch.dtype | str = torch.float32,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The embedded target, draft and tokenizer; nothing is downloaded.

    Both models were trained on the Python standard library's source and write Python-looking text.

    Args:
        dtype: of the weights; ``torch.float32`` for exact identity with ``generate``, ``torch.bfloat16`` for speed.
    """
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=dtype)
    draft = LlamaForCausalLM.from_pretrained(FOLDER / "draft", dtype=dtype)
    return target, draft, PreTrainedTokenizerFast.from_pretrained(FOLDER / "tokenizer")


def tiny_prompts() -> list[str]:
    """Runs of source lines from standard-library modules that the embedded pair was not trained on."""
    return json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
