"""Whether ``exact="self"`` gives the same outputs whatever runs beside a request, and what it costs.

    python -m benchmarks.gpu.repeatable --json repeatable.json

Every prompt is decoded without drafts in batches of 8, greedy and sampled; then with drafts, in other
batches, with prompts in chunks, with too little room, so that requests are preempted, and, some of them,
alone. Outputs that differ are counted. The default mode's are counted, too, as they show what there is
to differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.gpu.failures import outcome_of, release_memory
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, tiny_prompts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.server.loading import draft_method, load_models
from hf_slospec.server.model_options import ModelOptions, only_errors_logged
from hf_slospec.tiny.shapes import SIZES

PROMPT_TOKENS = 96
SAMPLED = dict(do_sample=True, temperature=0.8, top_p=0.95)
DRAFTS = dict(policy="fixed", max_depth=4, max_width=2)


class Condition(NamedTuple):
    """How requests are decoded."""

    name: str
    settings: dict[str, Any]
    batch: int
    room: float | None = None  # tokens of K/V, as a share of what the batch needs
    most: int = 10**6  # prompts


REFERENCE = Condition("batch 8, no drafts", dict(policy="none"), 8)
CONDITIONS = (
    Condition("batch 64", DRAFTS, 64),
    Condition("batch 8", DRAFTS, 8),
    Condition("batch 64, no drafts", dict(policy="none"), 64),
    Condition("batch 16, auto, prompts in chunks of 16", dict(policy="auto", prefill_chunk=16), 16),
    Condition("batch 16, preempted", DRAFTS, 16, room=0.4),
    Condition("alone", DRAFTS, 1, most=10),
)


def decoded(
    pair: Any,
    method: Any,
    condition: Condition,
    exact: str | None,
    prompts: list[list[int]],
    new_tokens: int,
) -> dict[str, Any]:
    """Return the outputs of all prompts, greedy and then sampled, the seconds, and how often
    requests were preempted.
    """  # fmt: skip
    settings = dict(
        condition.settings, exact=exact, max_batch=condition.batch, kept_tokens=0, compile=False
    )
    if condition.room is not None:
        longest = max(map(len, prompts)) + new_tokens
        least = 2 * longest + 64  # a request alone, with its trees
        settings["kv_tokens"] = max(int(condition.room * condition.batch * longest), least)
    config = SLOSpecConfig(**settings)
    generator = SLOSpecGenerator(pair.target, None, pair.tokenizer, config, drafter=method)
    outputs: dict[tuple[bool, int], list[int]] = {}  # by whether they were sampled, and prompt
    preempted = 0
    with generator:
        generator.submit(prompts[0], max_new_tokens=new_tokens, eos_token_id=None).result()
        begun_s = time.perf_counter()
        for options in ({}, SAMPLED):
            handles = [
                generator.submit(
                    ids, max_new_tokens=new_tokens, eos_token_id=None, seed=index, **options
                )
                for index, ids in enumerate(prompts[: condition.most])
            ]
            results = [handle.result() for handle in handles]
            outputs |= {
                (bool(options), index): list(result.token_ids)
                for index, result in enumerate(results)
            }
            preempted += sum(result.metrics.preempted for result in results)
        seconds = time.perf_counter() - begun_s
    return {"outputs": outputs, "seconds": seconds, "preempted": preempted}


def compared(runs: Sequence[tuple[str, dict[str, Any]]], expected: Any) -> list[dict[str, Any]]:
    """Return a record of each run: how many of its outputs differ from the expected ones."""
    return [
        {
            "name": name,
            "outputs": len(run["outputs"]),
            "differ": sum(expected[key] != output for key, output in run["outputs"].items()),
            "preempted": run["preempted"],
            "tokens_per_s": round(sum(map(len, run["outputs"].values())) / run["seconds"], 2),
        }
        for name, run in runs
    ]


@only_errors_logged()
def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "1B",
    number: Annotated[int, typer.Option(min=1, help="Prompts; each is decoded twice.")] = 50,
    new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    device: Annotated[str, typer.Option()] = "cuda",
    minutes: Annotated[float, typer.Option(help="Begin no condition after so long.")] = 1.5,
    json_path: Annotated[Path, typer.Option("--json")] = Path("repeatable.json"),
) -> None:
    """Count outputs that differ; exit code 1: some of ``exact="self"`` do."""
    ends_s = time.monotonic() + 60.0 * minutes
    options = ModelOptions(size=size, dtype="bfloat16", device=device, drafter="eagle3")
    pair = load_models(options)
    method = draft_method(options, pair)
    texts = tiny_prompts()
    prompts = [
        pair.tokenizer(texts[index % len(texts)])["input_ids"][index // len(texts) :][
            :PROMPT_TOKENS
        ]
        for index in range(number)
    ]
    facts = provenance(size=size, number=number, new_tokens=new_tokens, device=device)
    results: dict[str, Any] = {}
    for mode in ("self", None):
        found: list[tuple[str, dict[str, Any]]] = []
        results[str(mode or "default")] = record = {"status": "measured", "conditions": []}
        try:
            for condition in (REFERENCE, *CONDITIONS):
                if time.monotonic() > ends_s:
                    record["status"] = "cut off"
                    break
                run = decoded(pair, method, condition, mode, prompts, new_tokens)
                found.append((condition.name, run))
                record["conditions"] = compared(found, found[0][1]["outputs"])
        except Exception as error:  # noqa: BLE001  recorded
            record |= outcome_of(error)
        release_memory()
        content = {"provenance": facts, "results": results}
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for each in record["conditions"]:
            print(mode or "default", each)
    ours = results["self"]
    differ = sum(each["differ"] for each in ours["conditions"])
    if ours["status"] == "failed" or differ:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
