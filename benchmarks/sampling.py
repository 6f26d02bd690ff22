"""Sampled text: coupled drafting against stock ``generate``, assisted generation and drafting
without the noise.

    python -m benchmarks.sampling speed --json benchmarks/results/sampling-speed-….json
    python -m benchmarks.sampling acceptance --json benchmarks/results/sampling-acceptance.json \
        --plot docs/images/coupling.png

``speed`` interleaves all methods in one process, batch 1 and 8, in the dtype that the CPU is fast
in. ``acceptance`` decodes in fp32 with trees of a constant shape, so that machines do not matter:
accepted tokens by depth, and how well the path probabilities predict them, for several temperatures
and values of the sharpness. """

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from benchmarks.acceptance_record import AcceptanceRecord
from hf_slospec import (
    Request,
    SLOSpecConfig,
    SLOSpecGenerator,
    StepCosts,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cli.benchmark import ASSISTED, OURS, PLAIN, Bench, Method, provenance, summarize
from hf_slospec.engine.acceptance import SHARPNESS, Acceptance
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.fixed import FixedPolicy
from hf_slospec.server.loading import load_pair
from hf_slospec.tree.tree import Forest, TokenTree

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": dict(temperature=1.0, top_k=0),
    "temperature 0.7, top-p 0.95": dict(temperature=0.7, top_p=0.95, top_k=0),
    "temperature 0.3": dict(temperature=0.3, top_k=0),
    "temperature 1.3": dict(temperature=1.3, top_k=0),
}
TEMPERATURES = (0.3, 0.7, 1.0, 1.3)
SHARPNESSES = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
SHAPES = ((5, 1), (5, 4))  # depth and width
BATCH = 8
ROUNDS = 4
UNCOUPLED = "hf_slospec, uncoupled"
app = typer.Typer(help=__doc__)


def speed_of(
    pair: Any, sampling: dict[str, Any], batches: list[int], new_tokens: int, repeats: int
) -> list[Any]:
    """Return rows per method and batch size, with the speed relative to drafting without the noise."""
    bench = Bench(*pair, tiny_prompts(), 64, new_tokens, sampling=sampling)
    ours = {name: bench.ours(SLOSpecConfig(coupling=name == OURS)) for name in (OURS, UNCOUPLED)}
    methods = []
    for batch in batches:
        methods.append(Method(PLAIN, batch, bench.stock()))
        if batch == 1:
            methods.append(Method(ASSISTED, batch, bench.stock(assistant_model=pair[1])))
        methods += [Method(name, batch, run) for name, run in ours.items()]
    samples = bench.run(methods, repeats)
    rows = summarize(samples, new_tokens)
    for row in rows:
        pairs = zip(
            samples[UNCOUPLED, row["batch"]], samples[row["name"], row["batch"]], strict=True
        )
        row["speedup_vs_uncoupled"] = round(median(u.seconds / s.seconds for u, s in pairs), 3)
    return rows


@app.command()
def speed(
    size: str = "0.6B",
    new_tokens: int = 64,
    repeats: int = 5,
    batch: list[int] = [1, 8],  # noqa: B006  read only
    setting: list[str] = list(SETTINGS)[:2],
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare speeds; the file is rewritten after every setting."""
    pair = load_pair(None, None, size, "fast", "cpu")
    facts = provenance(
        size=size,
        dtype=str(pair[0].dtype),
        new_tokens=new_tokens,
        repeats=repeats,
        prompt_tokens=64,
    )
    results: dict[str, Any] = {}
    for name in setting:
        results[name] = speed_of(pair, SETTINGS[name], batch, new_tokens, repeats)
        for row in results[name]:
            print(
                f"{name}, batch {row['batch']}, {row['name']}: {row['speedup_vs_generate']:.2f}x stock, "
                f"{row['speedup_vs_uncoupled']:.2f}x uncoupled, {row['acceptance_length'] or 1:.2f} tokens/step, "
                f"equal {row['rows_equal_to_generate']}",
                flush=True,
            )
        if json_path is not None:
            json_path.write_text(
                json.dumps({"provenance": facts, "results": results}, indent=1) + "\n"
            )


class Observed(FixedPolicy):
    """Policy of constant shape that also predicts what is accepted."""

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, acceptance: Acceptance):
        super().__init__(config, costs)
        self.acceptance = acceptance

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        forest = Forest.of(candidates)
        is_verified = np.ones(len(forest.depths), dtype=np.bool_)
        prediction = self.acceptance.predict(requests, forest)
        self._predicted = prediction, is_verified
        return Selection(candidates, prediction.expected_tokens(is_verified).tolist())

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        prediction, is_verified = self._predicted
        indices = prediction.forest.indices(accepted)
        self.acceptance.observe(requests, prediction, is_verified, indices)


def study(
    pair: Any, temperature: float, sharpness: float | None, depth: int, width: int, new_tokens: int
) -> dict[str, Any]:
    """Return figures of acceptance at a temperature; ``sharpness`` None: without coupling."""
    target, draft, tokenizer = pair
    acceptance = Acceptance()
    record = AcceptanceRecord(acceptance)
    generator = SLOSpecGenerator(
        target, draft, tokenizer, SLOSpecConfig(max_depth=depth, max_width=width, coupling=sharpness is not None),
        make_policy=partial(Observed, acceptance=acceptance),
    )  # fmt: skip
    expected = 0.0
    steps = list[int]()
    with patch("hf_slospec.model.coupling.SHARPNESS", sharpness or SHARPNESS):
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
            torch.manual_seed(repeat)
            out = generator.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True, top_k=0,
                temperature=temperature, max_new_tokens=new_tokens, eos_token_id=None, return_dict_in_generate=True,
            )  # fmt: skip
            for step in out.steps:
                if step.depth == depth:  # not the last ones, which draft no further than the end
                    steps += [request.committed for request in step.requests]
                    expected += sum(request.expected for request in step.requests)
    accepted = np.array(steps) - 1
    figures = record.figures(depth)
    scores = [figures[when] for when in ("before", "after")]  # calibration
    return {
        "tokens_per_step": round(float(np.mean(steps)), 3),
        "expected_over_committed": round(expected / sum(steps), 4),
        "ece": [round(score["ece"], 4) for score in scores],
        "brier": [round(score["brier"], 4) for score in scores],
        "share_accepted": [
            round(float((accepted >= d).mean()), 4) for d in range(depth + 1)
        ],  # by depth
    }


@app.command()
def acceptance(
    new_tokens: int = 96,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measure acceptance, calibration and the best sharpness."""
    pair = load_tiny_pair(torch.float32)
    rows = []
    for (depth, width), temperature in itertools.product(SHAPES, TEMPERATURES):
        for sharpness in (None, *(SHARPNESSES if width > 1 else (SHARPNESS,))):  # None: uncoupled
            row = {
                "depth": depth,
                "width": width,
                "temperature": temperature,
                "sharpness": sharpness,
            }
            rows.append(row | study(pair, temperature, sharpness, depth, width, new_tokens))
            print(rows[-1], flush=True)
    if json_path is not None:
        facts = provenance(
            batch=BATCH, rounds=ROUNDS, new_tokens=new_tokens, dtype="float32", sharpness=SHARPNESS
        )
        json_path.write_text(json.dumps({"provenance": facts, "results": rows}, indent=1) + "\n")
    if plot is not None:
        draw(rows, plot)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the share of steps that accept a path of each depth, one panel per temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(TEMPERATURES), figsize=(11, 3.4), sharey=True, layout="constrained"
    )
    for panel, temperature in zip(panels, TEMPERATURES, strict=True):
        for (depth, width), style in zip(SHAPES, ("--", "-"), strict=True):
            for sharpness, colour, label in (
                (None, "#D55E00", "uncoupled"),
                (SHARPNESS, "#0072B2", "coupled"),
            ):
                wanted = (depth, width, temperature, sharpness)
                (row,) = [
                    r
                    for r in rows
                    if tuple(r[k] for k in ("depth", "width", "temperature", "sharpness")) == wanted
                ]
                shares = row["share_accepted"]
                panel.plot(range(len(shares)), shares, style, color=colour, marker="o", ms=4,
                           label=f"{label}, width {width}")  # fmt: skip
        panel.set(title=f"temperature {temperature:g}", xlabel="depth", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of steps that accept\na path of this depth")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app()
