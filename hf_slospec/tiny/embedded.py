"""The embedded pair: a small trained target, draft and tokenizer that are part of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_slospec.drafters.head import HeadMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError
from hf_slospec.tiny.shapes import HEAD_SHAPES, SHAPES, Shape

FOLDER = Path(__file__).parent / "pair"
HIDDEN = 256  # hidden size of the embedded target
HEADS = ("eagle3", "mtp")


def load_tiny_pair(
    dtype: torch.dtype | str = torch.float32,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the embedded target, draft and tokenizer, without a download.

    Both models were trained on the source of Python's standard library and write Python-like text.

    Args:
        dtype: of the weights; ``torch.float32`` for exact identity with ``generate``,
            ``torch.bfloat16`` for speed.
    """
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=dtype)
    draft = LlamaForCausalLM.from_pretrained(FOLDER / "draft", dtype=dtype)
    return target, draft, PreTrainedTokenizerFast.from_pretrained(FOLDER / "tokenizer")


def load_tiny_drafter(kind: str, target: LlamaForCausalLM) -> DraftMethod:
    """Return the embedded target's trained EAGLE-3 head or MTP layer, to be passed as ``drafter=``.

    It is part of the package, so nothing is downloaded. For a target of the shape of Llama-3.1-8B, an
    EAGLE-3 head has the shape of published ones for it, and accepts as the small head does.

    Args:
        kind: ``"eagle3"`` or ``"mtp"``.
        target: the embedded target, or an inflated one (the commands' ``--size``).

    Raises:
        InvalidInputError: ``kind`` is neither of them.
    """
    from hf_slospec.heads.loading import load_head
    from hf_slospec.tiny.inflate import inflate_head

    if kind not in HEADS:
        raise InvalidInputError(f"kind must be one of {', '.join(HEADS)}, got {kind!r}")
    plain: Any = target
    if target.config.hidden_size != HIDDEN:
        plain = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=target.dtype)
        plain.to(target.device)
    head: Any = load_head(str(FOLDER / kind), plain)
    if plain is target:
        return HeadMethod(head)
    size = next((name for name in HEAD_SHAPES if _has_shape(target, SHAPES[name])), None)
    shape = HEAD_SHAPES[size] if size is not None and kind == "eagle3" else None
    return HeadMethod(inflate_head(head, plain, target, shape))


def _has_shape(model: LlamaForCausalLM, shape: Shape) -> bool:
    sizes = {name: size for name, size in shape._asdict().items() if size is not None}
    return all(getattr(model.config, name) == size for name, size in sizes.items())


def tiny_prompts() -> list[str]:
    """Return lines of standard-library modules that the embedded pair was not trained on."""
    prompts: list[str] = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    return prompts
