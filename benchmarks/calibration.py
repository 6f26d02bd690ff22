"""Predicted and actual acceptance on the embedded pair, unchanged and with an over-confident draft.

    python -m benchmarks.calibration --json benchmarks/results/calibration.json --plot docs/images/reliability.png

Held-out prompts, greedy, fp32, decoded by policy ``auto``. The figures compare the draft's
conditional probabilities (before) and the policy's calibrated ones (after), over all children whose
parent was committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.acceptance_record import AcceptanceRecord
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.cli.benchmark import provenance

SHARPENING = 3.0  # factor on the over-confident draft's logits
BATCH = 4
NEW_TOKENS = 96
ROUNDS = 8


def study(sharpening: float) -> dict[str, Any]:
    """Decode with the draft's logits multiplied by ``sharpening``.  -> figures of its predictions"""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    if sharpening != 1.0:  # the last norm scales all logits and nothing else
        draft.model.norm.weight.data.mul_(sharpening)
    # Wide and deep trees whatever their cost, because only predictions are evaluated.
    generator = SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(max_depth=6, max_width=3))
    record = AcceptanceRecord(generator.decoder.speculator.history.acceptance)
    expected = committed = steps = 0.0
    for repeat in range(ROUNDS):
        texts = [
            tiny_prompts()[(repeat * BATCH + row) % len(tiny_prompts())] for row in range(BATCH)
        ]
        inputs = tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=48,
            padding_side="left",
        )
        out = generator.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
            max_new_tokens=NEW_TOKENS, eos_token_id=None, return_dict_in_generate=True,
        )  # fmt: skip
        for step in out.steps:
            if not step.is_prefill and step.depth:
                steps += 1
                expected += sum(request.expected for request in step.requests)
                committed += step.committed
    return {
        "steps": steps,
        "expected_over_committed": expected / committed,
        **record.figures(generator.config.max_depth),
    }


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot reliability diagrams, one panel per draft."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(9, 4.2), sharey=True, layout="constrained"
    )
    for panel, (name, result) in zip(panels, results.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="0.6", lw=1)
        for when, colour, marker in (("before", "#D55E00", "^"), ("after", "#0072B2", "o")):
            predicted, accepted, count = result[when]["bins"]
            points = [
                (p / n, a / n)
                for p, a, n in zip(predicted, accepted, count, strict=True)
                if n >= 20
            ]
            panel.plot(*zip(*points, strict=True), marker=marker, color=colour,
                       label=f"{when} calibration, ECE {result[when]['ece']:.3f}")  # fmt: skip
        panel.set(
            title=name,
            xlabel="predicted probability that a child is accepted",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        panel.legend()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share accepted")
    figure.savefig(path, dpi=120)


def main(
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Run both studies."""
    results = {
        "embedded draft": study(1.0),
        f"over-confident draft (logits x {SHARPENING:g})": study(SHARPENING),
    }
    for name, result in results.items():
        before = result["before"]
        after = result["after"]
        print(
            f"{name}: {result['steps']:.0f} steps, expected/committed {result['expected_over_committed']:.3f}; "
            f"Brier {before['brier']:.4f} -> {after['brier']:.4f}, ECE {before['ece']:.4f} -> {after['ece']:.4f}"
        )
    if plot is not None:
        draw(results, plot)
    if json_path is not None:
        facts = provenance(
            batch=BATCH, new_tokens=NEW_TOKENS, rounds=ROUNDS, dtype="float32", decoding="greedy"
        )
        json_path.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
