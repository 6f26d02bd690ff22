"""Policies on a batch with tight, middling and relaxed TPOT SLOs: attainment, throughput, accuracy
of predictions.

    python benchmarks/slo.py --json benchmarks/results/slo-cpu-2core.json           # the embedded pair at 0.6 B, bf16
    python benchmarks/slo.py --draft random --json ...                              # a useless draft
    python benchmarks/slo.py --draft random --dtype float32 --size 0.1B --json ...

The SLOs are 0.6, 1.0 and 2.0 times the time per token of plain decoding at this batch size,
measured first. Policies take turns with the same prompts in one process; figures are medians over
repeats."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PLAIN = "no speculation"
OURS = "auto"
POLICIES: dict[str, dict[str, Any]] = {
    PLAIN: dict(policy="fixed", max_depth=0),
    OURS: dict(policy="auto"),
    "adaserve": dict(policy="adaserve"),
    "chain of 2": dict(policy="fixed", max_depth=2, max_width=1),
    "chain of 4": dict(policy="fixed", max_depth=4, max_width=1),
    "chain of 6": dict(policy="fixed", max_depth=6, max_width=1),
    "static tree": dict(policy="static"),
}
SLO_FACTORS = (0.6, 1.0, 2.0)  # multiples of the time per token of plain decoding


def encoded(tokenizer: Any, batch: int, repeat: int, prompt_tokens: int) -> dict[str, torch.Tensor]:
    """Return a batch of the repeat's prompts."""
    texts = [tiny_prompts()[(repeat * batch + row) % len(tiny_prompts())] for row in range(batch)]
    options = {
        "padding": True,
        "padding_side": "left",
        "truncation": True,
        "max_length": prompt_tokens,
    }
    inputs = tokenizer(texts, return_tensors="pt", **options)
    inputs.pop("token_type_ids", None)
    return dict(inputs)


def summary(runs: list[Any]) -> dict[str, Any]:
    """Return the figures of one policy; ``runs`` are outputs with the seconds of their decoding."""
    rows = [metrics for out, _ in runs for metrics in out.slo]
    steps = [step for out, _ in runs for step in out.steps if not step.is_prefill]
    predicted = [step for step in steps if step.predicted_s > 0.0]
    by_class = defaultdict(list)
    for out, _ in runs:
        for metrics, factor in zip(out.slo, sorted_factors(len(out.slo)), strict=True):
            by_class[factor].append(metrics)
    errors = [
        abs(step.predicted_s - step.phases.total_s) / step.phases.total_s for step in predicted
    ]
    expected, committed = (
        sum(getattr(r, name) for s in steps for r in s.requests)
        for name in ("expected", "committed")
    )
    return {
        "attained": sum(bool(metrics.attained) for metrics in rows) / len(rows),
        "tokens_per_s": median(
            sum(m.tokens - 1 for m in out.slo) / seconds for out, seconds in runs
        ),
        "tpot_ms": {
            str(f): round(1e3 * median(m.tpot_s for m in own), 2) for f, own in by_class.items()
        },
        "attained_by_target": {
            str(f): sum(m.attained for m in own) / len(own) for f, own in by_class.items()
        },
        "tokens_per_step": committed / sum(len(step.requests) for step in steps),
        "nodes_per_step": sum(step.nodes for step in steps) / len(steps),
        "steps_without_draft": sum(step.depth == 0 for step in steps) / len(steps),
        "step_time_error": sum(errors) / len(errors) if errors else None,  # mean relative error
        "expected_over_committed": expected / committed,
        "select_ms": 1e3 * median(step.phases.select_s for step in steps),
    }


def sorted_factors(batch: int) -> list[float]:
    """Return the SLO factor of each row: a third of the rows for each factor."""
    return [SLO_FACTORS[row * len(SLO_FACTORS) // batch] for row in range(batch)]


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "0.6B",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    draft: Annotated[
        str, typer.Option(help="embedded, or random: the same model with random weights.")
    ] = "embedded",
    batch: Annotated[int, typer.Option()] = 8,
    new_tokens: Annotated[int, typer.Option()] = 64,
    prompt_tokens: Annotated[int, typer.Option()] = 64,
    repeats: Annotated[int, typer.Option()] = 5,
    policies: Annotated[str, typer.Option(help="Comma-separated; default all.")] = ",".join(
        POLICIES
    ),
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Run every policy once per repeat with the repeat's prompts."""
    target, assistant, tokenizer = load_tiny_pair(getattr(torch, dtype))
    target = inflate(target, SHAPES[size])
    if draft == "random":
        torch.manual_seed(0)
        assistant = AutoModelForCausalLM.from_config(assistant.config).to(assistant.dtype).eval()
    generators = {
        name: SLOSpecGenerator(target, assistant, tokenizer, SLOSpecConfig(**POLICIES[name]))
        for name in policies.split(",")
    }
    options = dict(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, return_dict_in_generate=True
    )

    def run(name: str, repeat: int, tpot_slos_s: list[float] | None) -> tuple[Any, float]:
        inputs = encoded(tokenizer, batch, repeat, prompt_tokens)
        out = generators[name].generate(**inputs, slo_tpot=tpot_slos_s, **options)
        first = out.steps[1].begun_s  # without the prefill, which does not depend on the policy
        last = out.steps[-1]
        return out, last.begun_s + last.phases.total_s - first

    for name in generators:
        run(name, 0, None)  # warm-up; measures step times that are not stored yet
    plain_s = median(
        metrics.tpot_s for repeat in range(2) for metrics in run(PLAIN, repeat, None)[0].slo
    )
    tpot_slos_s = [factor * plain_s for factor in sorted_factors(batch)]
    runs: dict[str, list[Any]] = defaultdict(list)
    turns = [(repeat, name) for repeat in range(repeats) for name in generators]
    for repeat, name in tqdm(turns, desc="slo", disable=not sys.stderr.isatty()):
        order = list(generators)
        shifted = order[
            (order.index(name) + repeat) % len(order)
        ]  # each policy runs first in some repeat
        runs[shifted].append(run(shifted, repeat + 1, tpot_slos_s))
        time.sleep(0.05)

    results = {name: summary(own) for name, own in runs.items()}
    base = [seconds for _, seconds in runs[PLAIN]]
    for name, own in runs.items():
        results[name]["speedup_vs_plain"] = median(
            b / s for b, (_, s) in zip(base, own, strict=True)
        )
    table = Table(
        title=f"{size} {dtype}, {draft} draft, batch {batch}; plain decoding {1e3 * plain_s:.1f} ms/token"
    )
    figures = ("speed-up", "tokens/step", "nodes", "no draft", "time error", "expected")
    for heading in ("policy", "attained", *(f"{f}x: ms" for f in SLO_FACTORS), *figures):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, r in results.items():
        classes = [
            f"{r['tpot_ms'][str(f)]:.0f} ({r['attained_by_target'][str(f)]:.0%})"
            for f in SLO_FACTORS
        ]
        error = "" if r["step_time_error"] is None else f"{r['step_time_error']:.1%}"
        table.add_row(
            name, f"{r['attained']:.0%}", *classes, f"{r['speedup_vs_plain']:.3f}x", f"{r['tokens_per_step']:.2f}",
            f"{r['nodes_per_step']:.1f}", f"{r['steps_without_draft']:.0%}", error,
            f"{r['expected_over_committed']:.3f}",
        )  # fmt: skip
    Console(width=150).print(table)
    if json_path is not None:
        facts = provenance(size=size, dtype=dtype, draft=draft, batch=batch, new_tokens=new_tokens, repeats=repeats,
                           plain_tpot_ms=1e3 * plain_s, targets=SLO_FACTORS)  # fmt: skip
        json_path.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
