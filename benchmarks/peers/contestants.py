"""Contestants, in groups that fit into 24 GB together with the transformers workers that every
group has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STOCK = "stock generate fp32"  # the reference of tokens
OURS_FP32 = "hf_slospec fp32"
OURS_BF16 = "hf_slospec bf16"
NO_DRAFTS = "hf_slospec bf16, no drafts"  # packed weights alone
STOCK_BF16 = "stock generate bf16"  # on a checkpoint, the reference of speed
OTHER_WEIGHTS = " (other weights)"
WITH_HEAD = ", EAGLE-3 head"  # contestants for which a head must have been exported
LLAMA_NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@dataclass(frozen=True)
class Contestant:
    """A way of decoding: a worker and the options of its requests."""

    name: str
    worker: tuple[
        str, ...
    ]  # engine and arguments; contestants with equal workers share the process
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 8)


def _transformers(
    name: str, dtype: str, batches: tuple[int, ...] = (1, 8), **options: Any
) -> Contestant:
    return Contestant(name, ("transformers", dtype), options, batches)


def _ours(name: str, dtype: str, drafter: str) -> Contestant:
    return _transformers(name, dtype, drafter=drafter)


def _assisted(tokens: int | None) -> Contestant:
    name = f"assisted fp32, {f'{tokens} constant' if tokens else 'defaults'}"
    return _transformers(name, "fp32", (1,), assistant_tokens=tokens)  # refuses larger batches


def _llama(kind: str) -> list[Contestant]:
    plain = Contestant(f"llama.cpp {kind}", ("llama", kind, "none"))
    return [plain] + [
        Contestant(
            f"llama.cpp {kind}, draft {k}",
            ("llama", kind, f"draft-simple:{k}"),
            {},
            (1, 8) if k < 7 else (1,),
        )
        for k in (2, 4, 7)
    ]


def _openvino(dtype: str, draft_tokens: tuple[int, ...]) -> list[Contestant]:
    drafting = ("openvino", dtype, "draft")
    return [Contestant(f"OpenVINO {dtype}", ("openvino", dtype, "none"))] + [
        Contestant(
            f"OpenVINO {dtype}, draft {k}",
            drafting,
            {"num_assistant_tokens": k},
            (1, 8) if k < 6 else (1,),
        )
        for k in draft_tokens
    ]


def _openvino_lookup(kind: str, mark: str = "") -> list[Contestant]:
    lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    return [
        Contestant(f"OpenVINO {kind}{mark}", ("openvino", kind, "none")),
        Contestant(
            f"OpenVINO {kind}, prompt lookup 5{mark}", ("openvino", kind, "prompt_lookup"), lookup
        ),
    ]


def _vllm(dtype: str, **modes: str) -> list[Contestant]:
    plain = Contestant(f"vLLM {dtype}", ("vllm", dtype, "none"))
    return [plain] + [
        Contestant(f"vLLM {dtype}, {name}", ("vllm", dtype, mode)) for name, mode in modes.items()
    ]


# In every group, the reference of its ratios; stock generate comes first, as the reference of
# tokens
ANCHORS = [
    _transformers(STOCK, "fp32"),
    _ours(OURS_FP32, "fp32", "assistant"),
    _ours(OURS_BF16, "bf16", "assistant"),
    _ours(NO_DRAFTS, "bf16", "none"),
]
PAIR_GROUPS = {
    "transformers": [
        *ANCHORS,
        _transformers(STOCK_BF16, "bf16"),
        *(_assisted(tokens) for tokens in (None, 3, 5, 7)),
    ],
    "llama-f32": ANCHORS + _llama("f32"),
    "llama-f16": ANCHORS + _llama("f16"),
    "llama-bf16": ANCHORS + _llama("bf16"),
    "openvino-fp32": ANCHORS + _openvino("fp32", (2, 4, 6)),
    "openvino-bf16": ANCHORS + _openvino("bf16", (4,)),
    "vllm-fp32": ANCHORS + _vllm("fp32", **{"draft 3": "draft_model:3"}),
    "vllm-bf16": ANCHORS + _vllm("bf16", **{"draft 3": "draft_model:3"}),
}

CHECKPOINT_ANCHORS = [
    _transformers(STOCK, "fp32"),
    _transformers(STOCK_BF16, "bf16"),
    *(_ours(f"{OURS_BF16}, {drafter}", "bf16", drafter) for drafter in ("none", "lookup")),
]
CHECKPOINT_GROUPS = {
    "transformers": [
        *CHECKPOINT_ANCHORS,
        _transformers("stock prompt lookup 10 bf16", "bf16", prompt_lookup_num_tokens=10),
        *(
            _ours(f"{OURS_BF16}, {drafter}", "bf16", drafter)
            for drafter in ("suffix", "lookup+suffix")
        ),
    ],
    **{
        f"llama-{kind}": [
            *CHECKPOINT_ANCHORS,
            *(
                Contestant(
                    f"llama.cpp {kind}{'' if mode == 'none' else f', {mode}'}",
                    ("llama", kind, mode),
                )
                for mode in ("none", *LLAMA_NGRAMS)
            ),
        ]
        for kind in ("f16", "bf16")
    },
    "openvino-bf16": [
        *CHECKPOINT_ANCHORS,
        *_openvino_lookup("bf16"),
        _ours(f"{OURS_BF16}{WITH_HEAD}", "bf16", "head"),
        *(
            Contestant(
                f"OpenVINO bf16{WITH_HEAD}, {tokens}",
                ("openvino", "bf16", "eagle3"),
                {"num_assistant_tokens": tokens},
            )
            for tokens in (3, 5)
        ),
    ],
    "vllm-bf16": CHECKPOINT_ANCHORS + _vllm("bf16", ngram="ngram:5", suffix="suffix"),
    "quantised": [
        *CHECKPOINT_ANCHORS,
        *(
            Contestant(
                f"hf_slospec {kind}, {drafter}{OTHER_WEIGHTS}",
                ("transformers", "bf16", kind),
                {"drafter": drafter},
            )
            for kind in ("Q8_0", "Q4_0", "int8", "int4")
            for drafter in ("none", "lookup")
        ),
        *(
            Contestant(f"llama.cpp {kind}{OTHER_WEIGHTS}", ("llama", kind, "none"))
            for kind in ("Q8_0", "Q4_0", "Q4_K_M")
        ),
        *(
            contestant
            for kind in ("int8", "int4")
            for contestant in _openvino_lookup(kind, OTHER_WEIGHTS)
        ),
    ],
}
