"""Drafters of every kind for the embedded target, beside those of stock ``generate``, interleaved
in one process.

    python benchmarks/drafters.py acceptance --json benchmarks/results/drafters-acceptance.json
    python benchmarks/drafters.py speed --json benchmarks/results/drafters-speed-….json

``acceptance`` decodes in fp32 with trees of a constant shape, so that all drafters have the same
budget of nodes and machines do not matter. ``speed`` runs policy ``auto`` in the dtype that the CPU
is fast in, on an inflated target. Texts: held-out prompts of the package, and repetitive ones, in
which a stretch of a prompt occurs several times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from transformers.modeling_layers import MtpModel

from hf_slospec import (
    DraftMethod,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_drafter,
    load_tiny_drafter,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cli.benchmark import ASSISTED, PLAIN, Bench, Method, provenance, summarize
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.heads.translated import TranslatedMethod
from hf_slospec.heads.translation import TokenTranslation
from hf_slospec.server.loading import load_pair
from hf_slospec.tiny.embedded import HEADS

SHAPES = ((4, 1), (5, 3))  # depth and width
SAMPLING: dict[str, dict[str, Any] | None] = {"greedy": None, "T=1": dict(temperature=1.0, top_k=0)}
PROMPT_TOKENS = 96
STRETCH = 24
BATCH = 8
ROUNDS = 4
app = typer.Typer(help=__doc__)


def texts_of(tokenizer: Any) -> dict[str, list[str]]:
    """Return the prompts of each set."""
    prompts = tiny_prompts()
    stretches = [tokenizer.decode(tokenizer(prompt)["input_ids"][:STRETCH]) for prompt in prompts]
    return {
        "prompts": prompts,
        "repetitive": [stretch * (PROMPT_TOKENS // STRETCH) for stretch in stretches],
    }


def methods_of(pair: Any) -> dict[str, DraftMethod]:
    """Return the ways to draft by name."""
    target, draft, _ = pair
    assistant = AssistantMethod(draft)
    heads = {kind: load_tiny_drafter(kind, target) for kind in HEADS}
    single = {
        "lookup": load_drafter("lookup", target),
        "suffix": load_drafter("suffix", target),
        "assistant": assistant,
        **heads,
    }
    pairs = itertools.product(("lookup", "suffix"), ("assistant", "mtp"))
    sums = {f"{cheap}+{name}": [single[cheap], single[name]] for cheap, name in pairs}
    return single | {name: load_drafter(parts, target) for name, parts in sums.items()}


def translated(pair: Any) -> DraftMethod:
    """Return the draft behind a translation between equal tokenizers, whose cost is all that it
    adds.
    """
    _, draft, tokenizer = pair
    size = tokenizer.vocab_size
    return TranslatedMethod(draft, TokenTranslation(tokenizer, tokenizer, size, size))


@contextlib.contextmanager
def stock_mtp(target: Any, head: Any) -> Iterator[None]:
    """Let stock ``generate(use_mtp=True)`` find the trained layer, as if transformers had loaded it
    with the target.
    """
    target.config.num_mtp_layers = 1
    model = MtpModel(target, 1).to(target.device, target.dtype).eval()
    own = head.state_dict()
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "post_norm": "norm",
    }
    for mine, theirs in names.items():
        getattr(model.layers[0], mine).load_state_dict({"weight": own[f"{theirs}.weight"]})
    model.layers[0].mtp_block.load_state_dict(head.layers[0].state_dict())
    try:
        with patch.object(MtpModel, "from_pretrained", lambda *_, **__: model):
            yield
    finally:
        del target.config.num_mtp_layers


def tokens_per_step(
    pair: Any, method: DraftMethod, texts: list[str], shape: tuple[int, int], sampling: Any
) -> float:
    """Return the tokens that a verify step commits, over all rows, with trees of a constant shape."""
    target, _, tokenizer = pair
    config = SLOSpecConfig(policy="fixed", max_depth=shape[0], max_width=shape[1])
    generator = SLOSpecGenerator(target, drafter=method, config=config)
    tokens = 0
    steps = 0
    options = {"do_sample": False} if sampling is None else {"do_sample": True} | sampling
    for repeat in range(ROUNDS):
        own = [texts[(repeat * BATCH + row) % len(texts)] for row in range(BATCH)]
        inputs = tokenizer(
            own, return_tensors="pt", padding=True, truncation=True, max_length=PROMPT_TOKENS
        )
        torch.manual_seed(repeat)
        out: Any = generator.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=64,
            eos_token_id=None, return_dict_in_generate=True, **options,
        )  # fmt: skip
        tokens += sum(metrics.tokens - 1 for metrics in out.slo)
        steps += sum(metrics.steps for metrics in out.slo)
    return round(tokens / steps, 3)


@app.command()
def acceptance(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    """Compare tokens per step at an equal budget of nodes; the file is rewritten after every
    setting.
    """
    pair = load_tiny_pair()
    methods = methods_of(pair)
    results = list[dict[str, Any]]()
    facts = provenance(
        dtype="float32", new_tokens=64, rows=BATCH * ROUNDS, prompt_tokens=PROMPT_TOKENS
    )
    for name, texts in texts_of(pair[2]).items():
        for sampled, sampling in SAMPLING.items():
            for shape in SHAPES:
                found = {
                    own: tokens_per_step(pair, method, texts, shape, sampling)
                    for own, method in methods.items()
                }
                results.append(
                    {
                        "texts": name,
                        "sampling": sampled,
                        "depth": shape[0],
                        "width": shape[1],
                        **found,
                    }
                )
                print(json.dumps(results[-1]), flush=True)
                if json_path is not None:
                    json_path.write_text(
                        json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
                    )


@app.command()
def speed(
    size: str = "0.6B",
    new_tokens: int = 48,
    repeats: int = 5,
    batch: list[int] = [1, 8],  # noqa: B006  read only
    texts: list[str] = ["prompts", "repetitive"],  # noqa: B006
    sampling: list[str] = ["greedy", "T=1"],  # noqa: B006
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare speeds with policy ``auto``; the file is rewritten after every setting."""
    pair = load_pair(None, None, size, "fast", "cpu")
    target, draft, tokenizer = pair
    methods = methods_of(pair)
    facts = provenance(
        size=size,
        dtype=str(target.dtype),
        new_tokens=new_tokens,
        repeats=repeats,
        prompt_tokens=PROMPT_TOKENS,
    )
    results: dict[str, Any] = {}
    for kind in texts:
        for sampled in sampling:
            bench = Bench(
                target, draft, tokenizer, texts_of(tokenizer)[kind], PROMPT_TOKENS, new_tokens,
                sampling=SAMPLING[sampled],
            )  # fmt: skip
            runs = {name: bench.ours(None, method) for name, method in methods.items()}
            runs["no drafts"] = bench.ours(SLOSpecConfig(policy="none"))
            runs["other tokenizer"] = bench.ours(None, translated(pair))
            entries = list[Method]()
            for number in batch:
                entries.append(Method(PLAIN, number, bench.stock()))
                if number == 1:
                    entries.append(Method(ASSISTED, 1, bench.stock(assistant_model=draft)))
                    entries.append(
                        Method("prompt lookup, 10", 1, bench.stock(prompt_lookup_num_tokens=10))
                    )
                    around = partial(stock_mtp, target, methods["mtp"].model)
                    entries.append(Method("use_mtp", 1, bench.stock(use_mtp=True), around))
                entries += [Method(name, number, run) for name, run in runs.items()]
            samples = bench.run(entries, repeats)
            rows = summarize(samples, new_tokens)
            for row in rows:
                pairs = zip(
                    samples["assistant", row["batch"]],
                    samples[row["name"], row["batch"]],
                    strict=True,
                )
                row["speedup_vs_assistant"] = round(
                    median(a.seconds / s.seconds for a, s in pairs), 3
                )
                print(
                    f"{kind}, {sampled}, batch {row['batch']}, {row['name']}: {row['speedup_vs_generate']:.2f}x stock, "
                    f"{row['speedup_vs_assistant']:.2f}x assistant, {row['acceptance_length'] or 1:.2f} tokens/step, "
                    f"equal {row['rows_equal_to_generate']}",
                    flush=True,
                )
            results[f"{kind}, {sampled}"] = rows
            if json_path is not None:
                json_path.write_text(
                    json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
                )


if __name__ == "__main__":
    app()
