"""The embedded pair: a small trained target, draft and tokenizer that are part of the package."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "pair"


def load_tiny_pair(
    dtype: torch.dtype | str = torch.float32,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the embedded target, draft and tokenizer, without a download.

    Both models were trained on the source of Python's standard library and write Python-like text.

    Args:
        dtype: of the weights; ``torch.float32`` for exact identity with ``generate``, ``torch.bfloat16`` for speed.
    """
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=dtype)
    draft = LlamaForCausalLM.from_pretrained(FOLDER / "draft", dtype=dtype)
    return target, draft, PreTrainedTokenizerFast.from_pretrained(FOLDER / "tokenizer")


def tiny_prompts() -> list[str]:
    """Return prompts: lines of standard-library modules that the embedded pair was not trained on."""
    prompts: list[str] = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    return prompts
