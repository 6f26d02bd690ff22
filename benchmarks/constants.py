"""``auto`` beside constant shapes on recorded answers: real prompt lookup, simulated times.

    python -m benchmarks.constants record --target build/checkpoints/SmolLM2-135M-Instruct --to
    answers.json python -m benchmarks.constants replay --recording answers.json --name after --json
    benchmarks/results/constants.json

``record`` keeps the target's greedy answers to Spec-Bench's questions. ``replay`` decodes them by
the engine with the package's drafter on a virtual clock, so that two runs give the same numbers on
a busy machine. The best constant shape of a task is known afterwards only. Run ``replay`` on
checkouts of several versions (``PYTHONPATH``), each under a name of its own, to compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pydantic import BaseModel
from tqdm import tqdm
from transformers.utils import logging

from benchmarks.spec_bench import QUESTIONS, encoded_chats, questions_of
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.drafters.lookup import PromptLookupDrafter
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.interfaces import Plan
from hf_slospec.engine.step import Engine
from hf_slospec.generate.speculator import HOST_LEVEL
from hf_slospec.lab.hardware import HARDWARE, Hardware, curve, hardware_of
from hf_slospec.lab.models import SimulatedTarget, VirtualClock
from hf_slospec.lab.texts import Library, SimulatedText
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.server.loading import load_pair
from hf_slospec.tree.tree import TokenTree

RESULTS = Path(__file__).parent / "results"
COMPILED = RESULTS / "cpu-forwards-2core-0.3B-bf16.json"
PROFILE = RESULTS / "profile-cpu-2core-0.6B-bf16.json"
MAX_PROMPT = 1024  # tokens
NOISE = 0.05  # standard deviation of the logarithm of a forward's seconds
OVERALL = "overall"
OURS = "auto"
POLICIES: dict[str, dict[str, Any]] = {
    OURS: dict(policy="auto"),
    "none": dict(policy="none"),
    **{str(depth): dict(policy="fixed", max_depth=depth, max_width=1) for depth in (1, 2, 3, 5, 8)},
    "4x2": dict(policy="fixed", max_depth=4, max_width=2),
}
app = typer.Typer(help=__doc__, rich_markup_mode=None)


class Recorded(BaseModel):
    """A question of a task and the target's answer, as token ids."""

    task: str
    prompt: list[int]
    answer: list[int]


class Recording(BaseModel):
    """Answers of one target."""

    provenance: dict[str, Any]
    answers: list[Recorded]


def machines() -> dict[str, Hardware]:
    """Return latencies that were measured on machines, by name."""
    rows = json.loads(COMPILED.read_text(encoding="utf-8"))["ms"]
    # a forward of one token was measured slower than one of four
    fastest = np.minimum.accumulate([row["compiled"] for row in rows][::-1])[::-1].tolist()
    compiled = curve(dict(zip([row["tokens"] for row in rows], fastest, strict=True)))
    named = {
        "0.3 B, compiled, 2 cores": Hardware(compiled, HOST_LEVEL),
        "0.6 B, 2 cores": hardware_of(str(PROFILE)),
        "8 B, H100": HARDWARE["llama-8b-h100"],
    }
    return {name: replace(hardware, draft=HOST_LEVEL) for name, hardware in named.items()}


class RecordedTarget(SimulatedTarget):
    """Target that gives recorded answers."""

    def __init__(
        self, answers: Sequence[Recorded], hardware: Hardware, clock: VirtualClock, seed: int
    ):
        super().__init__(Library([SimulatedText(np.ones((1, 1)), np.zeros(1))]), hardware, clock)
        self._answers = answers
        self._rng = np.random.default_rng(seed)

    def verify(self, *step: Any) -> Any:
        begun_s = self.clock.now_s
        choosers = super().verify(*step)
        self.clock.now_s += (self.clock.now_s - begun_s) * (
            float(np.exp(NOISE * self._rng.standard_normal())) - 1.0
        )
        return choosers

    def _choose(self, request: Request, node: int) -> int:
        return self._answers[request.index].answer[request.num_emitted]


class TimedLookup(PromptLookupDrafter):
    """Prompt lookup that advances a virtual clock."""

    clock: VirtualClock

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self.clock.now_s += HOST_LEVEL(len(requests), len(requests)) * plan.depth
        return super().draft(requests, plan)


def decoded(
    batches: Sequence[Sequence[Recorded]], hardware: Hardware, options: dict[str, Any], seed: int
) -> list[list[StepEvent]]:
    """Decode batches one after the other, and return the steps of each; what a policy has learned
    is kept.
    """
    config = SLOSpecConfig(**options)
    costs = hardware.costs()
    history = SpeculationHistory(config)
    clock = VirtualClock()
    found = []
    for number, rows in enumerate(batches):
        requests = [
            Request(index, RequestParams(row.prompt, len(row.answer)))
            for index, row in enumerate(rows)
        ]
        drafter = TimedLookup()
        drafter.clock = clock
        scheduler = ContinuousScheduler.of_call(requests, costs)
        target = RecordedTarget(rows, hardware, clock, seed + number)
        engine = Engine(
            target, drafter, new_policy(config, costs, history), scheduler, costs, clock
        )
        steps = []
        while engine.scheduler.running:
            steps.append(engine.step())
        found.append([step for step in steps if not step.is_prefill])
    return found


def row_of(batches: Sequence[Sequence[StepEvent]]) -> dict[str, float]:
    """Return the figures of batches of one task or of all."""
    steps = [step for batch in batches for step in batch]
    drafted = [step for step in steps if step.depth]
    committed = sum(step.committed for step in drafted)
    expected = sum(request.expected for step in drafted for request in step.decoding)
    tokens = sum(step.committed for step in steps)
    return {
        "tokens_per_s": tokens / sum(step.phases.total_s for step in steps),
        "tokens_per_step": tokens / sum(step.num_decoding for step in steps),
        "expected_over_committed": expected / committed if committed else 1.0,
    }


@app.command()
def record(
    target: Annotated[str, typer.Option(help="A folder or a repository of the Hub.")],
    to: Annotated[Path, typer.Option(help="The file to write.")],
    per_task: Annotated[int, typer.Option(help="Questions per task.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Maximum length of an answer.")] = 128,
) -> None:
    """Record the target's greedy answers, in fp32."""
    logging.set_verbosity_error()
    pair = load_pair(target, None, "tiny", "float32", "cpu")
    with SLOSpecGenerator(
        pair.target, config=SLOSpecConfig(policy="none", compile=False)
    ) as generator:
        asked = []
        for question in questions_of(QUESTIONS, per_task):
            encoded = encoded_chats(
                pair.tokenizer, [question.turns[:1]], MAX_PROMPT, torch.device("cpu")
            )
            prompt = encoded["input_ids"][0].tolist()
            handle = generator.submit(prompt, do_sample=False, max_new_tokens=new_tokens)
            asked.append((question.task, prompt, handle))
        answers = [
            Recorded(task=task, prompt=prompt, answer=handle.result().token_ids)
            for task, prompt, handle in tqdm(asked)
        ]
    facts = provenance(target=Path(target).name, per_task=per_task, new_tokens=new_tokens)
    to.write_text(
        Recording(provenance=facts, answers=answers).model_dump_json() + "\n", encoding="utf-8"
    )


@app.command()
def replay(
    recording: Annotated[Path, typer.Option(help="A file of record.")],
    name: Annotated[str, typer.Option(help="Of this version in the file.")],
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    seeds: Annotated[int, typer.Option(help="Runs with different noise.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Decode the recorded answers by all policies, on each machine."""
    texts = Recording.model_validate_json(recording.read_text(encoding="utf-8"))
    tasks = list(dict.fromkeys(each.task for each in texts.answers))
    rows: list[dict[str, Any]] = []
    for machine, hardware in machines().items():
        for batch in map(int, batches.split(",")):
            by_task = [[each for each in texts.answers if each.task == task] for task in tasks]
            # batches of one task each, the tasks in turn
            order = [
                (task, own[first : first + batch])
                for first in range(0, max(map(len, by_task)), batch)
                for task, own in zip(tasks, by_task, strict=True)
                if own[first : first + batch]
            ]
            figures: dict[str, dict[str, list[dict[str, float]]]] = {}
            for policy, options in POLICIES.items():
                for seed in range(seeds):
                    found = decoded([part for _, part in order], hardware, options, seed)
                    for task in (*tasks, OVERALL):
                        own_steps = [
                            steps
                            for (of_task, _), steps in zip(order, found, strict=True)
                            if task in (of_task, OVERALL)
                        ]
                        figures.setdefault(task, {}).setdefault(policy, []).append(
                            row_of(own_steps)
                        )
            for task, by_policy in figures.items():
                means = {
                    policy: {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
                    for policy, runs in by_policy.items()
                }
                speed = {policy: each["tokens_per_s"] for policy, each in means.items()}
                best = max((each for each in speed if each != OURS), key=lambda each: speed[each])
                rows.append(
                    dict(machine=machine, batch=batch, task=task, best=best, policies=means)
                    | {"auto_to_best": speed[OURS] / speed[best]}
                )
                ours = means[OURS]
                print(
                    f"{machine}, batch {batch}, {task:14} auto {speed[OURS] / speed['none']:.2f} of none, "
                    f"{speed[OURS] / speed[best]:.3f} of {best}, {ours['tokens_per_step']:.2f} tokens "
                    f"a step, expected/committed {ours['expected_over_committed']:.3f}",
                    flush=True,
                )
    if json_path is not None:
        kept = json.loads(json_path.read_text()) if json_path.exists() else {}
        facts = provenance(seeds=seeds, noise=NOISE, recorded=texts.provenance)
        kept.setdefault("provenance", {})[name] = facts
        kept.setdefault("results", {})[name] = rows
        json_path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
