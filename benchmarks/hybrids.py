"""Targets with recurrent states: cost of verifying, memory, and speed beside stock ``generate``.

    python benchmarks/hybrids.py [--families Qwen3_5 Lfm2] [--dtype bfloat16] [--repeats 5] [--json FILE]

The models have published shapes of about 0.6 B parameters and random weights, as no checkpoint can
be loaded here. The drafter knows the text that stock writes, is right with a given probability per
token, and costs nothing: the speeds are upper bounds for a draft of that acceptance, and what they
compare is the verification. Runs of stock and ours alternate; figures are medians of ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from hf_slospec import Plan, Request, SLOSpecConfig, SLOSpecGenerator, TokenTree, disable
from hf_slospec.cli.benchmark import provenance
from hf_slospec.families.states import RecurrentStates
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import cache_option
from hf_slospec.model.tree_mask import chain

VOCAB = 32_000
PROMPT = 64
NEW = 24
KEYS = 128
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3.5-0.8B: three gated delta nets for each attention layer.
    "Qwen3_5": dict(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    # LFM2-700M: short convolutions, and six attention layers.
    "Lfm2": dict(
        hidden_size=1536, intermediate_size=6912, num_hidden_layers=16, num_attention_heads=24, num_key_value_heads=8,
        layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    ),
}  # fmt: skip


class KnownText:
    """Drafter that knows how texts go on, and is right with a given probability per token."""

    def __init__(self, texts: Sequence[Sequence[int]], acceptance: float):
        self.texts = texts
        self.acceptance = acceptance

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        """Return a chain for each request."""
        return [
            TokenTree.chain(
                own.tokens[-1], self._guess(own)[: plan.depth], conditional=self.acceptance
            )
            for own in requests
        ]

    def _guess(self, request: Request) -> list[int]:
        text = self.texts[request.index]
        begin = len(request.tokens)
        draws = (
            random.Random(f"{request.index} {begin} {place}") for place in range(begin, len(text))
        )
        return [
            token if draw.random() < self.acceptance else (token + 1) % VOCAB
            for token, draw in zip(text[begin:], draws, strict=True)
        ]

    def release(self, request: Request) -> None:
        """Forget a request, of which nothing is kept."""


def build(family: str, dtype: torch.dtype) -> Any:
    """Return a model of a family.

    Of purely random models every second token is a near tie in bf16, so that texts of any two runs
    part."""
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config_class = getattr(transformers, f"{family}TextConfig", None) or model_class.config_class
    shape = SHAPES[family] | dict(
        vocab_size=VOCAB, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None
    )
    model = model_class(config_class(**shape))
    return follow_permutation(model).to(dtype).eval()


def follow_permutation(model: Any) -> Any:
    """Give a random model an output that follows a permutation of its vocabulary, whatever its
    layers add.
    """
    embedding = model.get_input_embeddings().weight.data.normal_()
    model.get_output_embeddings().weight.data.copy_(embedding[torch.randperm(VOCAB)])
    return model


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


@torch.no_grad()
def verify_costs(model: Any, repeats: int) -> dict[str, Any]:
    """Return the cost of verifying chains of tokens, as multiples of stock's forward of one token."""
    packed = PackedModel(model)
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, KEYS, dtype=torch.int64), **cache_option(cache), use_cache=True)
    sizes = (1, 2, 4, 6, 8, 16, 32)

    def packed_forward(num_tokens: int) -> None:
        with packed.kv_cache.temporary([KEYS + num_tokens]) as (own,):
            own.length = KEYS
            own.states = RecurrentStates(KEYS)
            packed.forward(
                packed.kv_cache.pool,
                [chain(packed, own, [5] * num_tokens)],
                torch.arange(num_tokens),
            )

    def stock() -> None:
        model(torch.zeros(1, 1, dtype=torch.int64), **cache_option(cache), use_cache=True)

    for size in sizes:
        packed_forward(size)
    rounds = [
        {0: seconds(stock)} | {size: seconds(lambda: packed_forward(size)) for size in sizes}  # noqa: B023 - run at once
        for _ in range(4 * repeats)
    ]
    return {
        "stock_ms": round(1e3 * median(own[0] for own in rounds), 2),
        "verify": {size: round(median(own[size] / own[0] for own in rounds), 3) for size in sizes},
        "state_mb_per_request": round(packed.family.state_bytes / 2**20, 2),
        "kv_kb_per_token": round(packed.kv_bytes_per_token / 2**10, 2),
    }


def speeds(model: Any, batch: int, acceptance: float, repeats: int) -> dict[str, Any]:
    """Return tokens per step and the speed beside stock of one batch size."""
    inputs = {
        "input_ids": torch.randint(
            3, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)
        )
    }
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options: Any = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    stock = type(model).generate
    texts = stock(model, **inputs, **options).tolist()
    generator = SLOSpecGenerator(
        model, drafter=KnownText(texts, acceptance), config=SLOSpecConfig(policy="auto")
    )
    options |= {"return_dict_in_generate": True}
    ours = generator.generate(**inputs, **options)
    ratios = []
    steps = []
    for _ in range(repeats):
        stock_s = seconds(lambda: stock(model, **inputs, **options))
        begun_s = time.perf_counter()
        ours = generator.generate(**inputs, **options)
        ratios.append(stock_s / (time.perf_counter() - begun_s))
        steps.append(batch * NEW / sum(step.num_decoding for step in ours.steps))
    same = sum(
        a == b
        for row, text in zip(ours.sequences.tolist(), texts, strict=True)
        for a, b in zip(row, text, strict=True)
    )
    disable(model)
    return {
        "batch": batch,
        "acceptance": acceptance,
        "tokens_per_request_and_step": round(median(steps), 2),
        "speed_of_stock": round(median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "same_tokens": round(same / sum(map(len, texts)), 4),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for family in arguments.families:
        model = build(family, getattr(torch, arguments.dtype))
        found = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        found |= verify_costs(model, arguments.repeats)
        print(family, found, flush=True)
        found["speed"] = []
        for batch in (1, 8):
            for acceptance in (0.6, 0.8)[-1 if batch > 1 else 0 :]:
                found["speed"].append(speeds(model, batch, acceptance, arguments.repeats))
                print(found["speed"][-1], flush=True)
        results[family] = found
        if arguments.json is not None:
            arguments.json.write_text(
                json.dumps(
                    {"provenance": provenance(), "dtype": arguments.dtype} | results, indent=2
                )
            )


if __name__ == "__main__":
    main()
