"""Contestants, in groups that fit into 24 GB together with the transformers workers that every group has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STOCK = "stock generate fp32"
OURS_FP32 = "hf_slospec fp32"
OURS_BF16 = "hf_slospec bf16"
NO_DRAFTS = "hf_slospec bf16, no drafts"  # packed weights alone


@dataclass(frozen=True)
class Contestant:
    """A way of decoding: a worker and the options of its requests."""

    name: str
    worker: tuple[str, ...]  # engine and arguments; contestants with equal workers share the process
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 8)


def _transformers(name: str, dtype: str, batches: tuple[int, ...] = (1, 8), **options: Any) -> Contestant:
    return Contestant(name, ("transformers", dtype), options, batches)


def _assisted(tokens: int | None) -> Contestant:
    name = f"assisted fp32, {f'{tokens} constant' if tokens else 'defaults'}"
    return _transformers(name, "fp32", (1,), method="assisted", assistant_tokens=tokens)  # refuses larger batches


def _llama(kind: str) -> list[Contestant]:
    plain = Contestant(f"llama.cpp {kind}", ("llama", kind, "0"))
    return [plain] + [
        Contestant(f"llama.cpp {kind}, draft {k}", ("llama", kind, str(k)), batches=(1, 8) if k < 7 else (1,))
        for k in (2, 4, 7)
    ]


def _openvino(dtype: str, draft_tokens: tuple[int, ...]) -> list[Contestant]:
    worker = ("openvino", dtype)
    return [Contestant(f"OpenVINO {dtype}", worker)] + [
        Contestant(f"OpenVINO {dtype}, draft {k}", worker, {"draft_tokens": k}, (1, 8) if k < 6 else (1,))
        for k in draft_tokens
    ]


def _vllm(dtype: str) -> list[Contestant]:
    plain = Contestant(f"vLLM {dtype}", ("vllm", dtype, "0"))
    return [plain, Contestant(f"vLLM {dtype}, draft 3", ("vllm", dtype, "3"))]


ANCHORS = [  # in every group, the reference of its ratios; stock generate comes first, as the reference of tokens
    _transformers(STOCK, "fp32", method="stock"),
    _transformers(OURS_FP32, "fp32", method="hf_slospec"),
    _transformers(OURS_BF16, "bf16", method="hf_slospec"),
    _transformers(NO_DRAFTS, "bf16", method="hf_slospec, no drafts"),
]
GROUPS = {
    "transformers": [
        *ANCHORS,
        _transformers("stock generate bf16", "bf16", method="stock"),
        *(_assisted(tokens) for tokens in (None, 3, 5, 7)),
    ],
    "llama-f32": ANCHORS + _llama("f32"),
    "llama-f16": ANCHORS + _llama("f16"),
    "llama-bf16": ANCHORS + _llama("bf16"),
    "openvino-fp32": ANCHORS + _openvino("fp32", (2, 4, 6)),
    "openvino-bf16": ANCHORS + _openvino("bf16", (4,)),
    "vllm-fp32": ANCHORS + _vllm("fp32"),
    "vllm-bf16": ANCHORS + _vllm("bf16"),
}
