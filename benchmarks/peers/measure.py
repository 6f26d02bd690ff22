"""Compare hf_slospec on a CPU with llama.cpp, OpenVINO GenAI and vLLM, on the same models and
prompts.

    python -m benchmarks.peers.measure FOLDER [--groups llama-f32 vllm-fp32] [--repeats 5] [--isa
    avx2] [--json FILE] python -m benchmarks.peers.measure FOLDER --target CHECKPOINT [--per-task
    10] [--batches 1,8] [--json FILE]

Every contestant of a group runs once per batch size and repeat, or question, with the same prompts,
so that drift affects all alike; ratios are taken within it. The file is written after each, and the
same command continues it.

Without ``--target``, prompts are the held-out texts of the embedded pair, and every row gets its
full length. With it, they are the first turns of Spec-Bench's questions with the checkpoint's chat
template, a batch has questions of one task, and rows end where the checkpoint ends them.
``--isa avx2`` restricts the contestants to AVX2, so that a machine with AVX-512 can stand in for
one without."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GenerationConfig

from benchmarks.peers.contestants import (
    CHECKPOINT_GROUPS,
    PAIR_GROUPS,
    STOCK,
    STOCK_BF16,
    WITH_HEAD,
    Contestant,
)
from benchmarks.peers.export import PROMPT_TOKENS, models_folder
from benchmarks.peers.protocol import Settings
from benchmarks.peers.summary import (
    Record,
    different_at,
    summarize,
    summarize_tasks,
    table,
    task_table,
)
from benchmarks.peers.workers import ISAS, UNRESTRICTED, Worker, WorkerError
from benchmarks.spec_bench import QUESTIONS, encoded_chats, groups_of, questions_of
from hf_slospec.generate.rows import model_end_tokens, until_end

PAUSE_S = 0.25  # before a call, so that the idle threads of the last one have stopped spinning


class Trial(NamedTuple):
    """Prompts that all contestants answer in turn."""

    task: str
    question: str
    ids: list[list[int]]


class OutOfTimeError(Exception):
    """The time given by ``--total`` is used up."""


@dataclass
class Results:
    """Contents of the JSON file."""

    settings: dict[str, Any]
    workers: dict[str, dict[str, Record]] = field(
        default_factory=dict
    )  # facts by group and contestant
    provenance: dict[str, Any] = field(default_factory=dict)  # by group
    samples: list[Record] = field(default_factory=list)

    def has(self, **key: Any) -> bool:
        """Return whether a trial was recorded."""
        return any(key.items() <= sample.items() for sample in self.samples)

    def has_tasks(self) -> bool:
        """Return whether prompts are those of tasks."""
        return "prompts" in self.settings

    def summary(self) -> list[Record]:
        """Return figures per group, batch and contestant, and per task if there are tasks."""
        if self.has_tasks():
            return summarize_tasks(self.samples)
        return summarize(self.samples, self.settings["new_tokens"])

    def table(self) -> str:
        """Return the summary as a Markdown table."""
        return (task_table if self.has_tasks() else table)(self.summary(), self.workers)

    def write(self, file: Path) -> None:
        """Replace the file as a whole."""
        written = file.with_suffix(".part")
        written.write_text(json.dumps(vars(self) | {"summary": self.summary()}, indent=1) + "\n")
        written.replace(file)


class Group:
    """The workers of one group at one batch size.

    Every batch size gets new workers, because some contestants draft from earlier answers to the
    same questions."""

    def __init__(
        self,
        name: str,
        batch: int,
        contestants: list[Contestant],
        settings: Settings,
        results: Results,
        arguments: argparse.Namespace,
    ):
        self.name = name
        self.batch = batch
        self.results = results
        self.arguments = arguments
        self.contestants = [contestant for contestant in contestants if batch in contestant.batches]
        self.settings = settings
        self.workers: dict[tuple[str, ...], Worker | WorkerError] = {}
        self.failed: dict[str, str] = {}  # by contestant

    def run(self, warm_up: Trial, trials: list[Trial]) -> None:
        """Measure all trials that are not recorded yet."""
        missing = [trial for trial in trials if not self.results.has(**self.key(trial))]
        if not missing:
            return
        try:
            self.start()
            self.answers(warm_up)  # with other prompts; hf_slospec also measures its step costs
            for trial in missing:
                self.results.samples += self.answers(trial)
                self.record_workers()
                self.results.write(self.arguments.json)
        finally:
            for worker in self.workers.values():
                if isinstance(worker, Worker):
                    worker.stop()

    def key(self, trial: Trial) -> Record:
        """Return what names a trial in the records."""
        return {
            "group": self.name,
            "batch": self.batch,
            "task": trial.task,
            "question": trial.question,
        }

    def start(self) -> None:
        """Start the workers one after another, so that none slows the loading of another.

        Raises:
            WorkerError: the worker of stock ``generate``, the reference, did not start.
        """
        for key in dict.fromkeys(contestant.worker for contestant in self.contestants):
            say(f"{self.name}: starting {' '.join(key)}")
            own = self.arguments
            if own.isa != "native" and key[0] in UNRESTRICTED:
                self.workers[key] = WorkerError(UNRESTRICTED[key[0]])
                continue
            try:
                start_s = min(own.start_s, self.left_s())
                self.workers[key] = Worker(key, self.settings, start_s)
            except WorkerError as error:
                self.left_s()
                say(f"  failed: {error}")
                if not self.workers:
                    raise
                self.workers[key] = error

    def answers(self, trial: Trial) -> list[Record]:
        """Return a record of every contestant.

        Raises:
            OutOfTimeError: the records so far are dropped, so that every recorded trial is
                complete.
        """
        records: list[Record] = []
        expected: list[list[int]] = []
        for contestant in self.contestants:
            record: Record = {**self.key(trial), "name": contestant.name}
            answer = self.ask(contestant, {**contestant.options, "ids": trial.ids})
            if "error" in answer:
                record["error"] = self.failed[contestant.name] = answer["error"]
                if contestant.name in (STOCK, STOCK_BF16):
                    raise WorkerError(answer["error"])
            else:
                rows = [until_end(row, self.settings.ends) for row in answer["tokens"]]
                expected = expected or rows
                record |= {"seconds": answer["seconds"], "tokens": sum(map(len, rows))}
                record["different_at"] = different_at(expected, rows)
            records.append(record)
            outcome = record.get("error") or f"{record['tokens'] / record['seconds']:.1f} tokens/s"
            say(
                f"{self.name}, batch {self.batch}, {trial.task} {trial.question}, {contestant.name}: {outcome}"
            )
        return records

    def ask(self, contestant: Contestant, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer; an error once is an error in all later trials."""
        worker = self.workers[contestant.worker]
        if contestant.name in self.failed:
            return {"error": self.failed[contestant.name]}
        if isinstance(worker, WorkerError):
            return {"error": str(worker)}
        time.sleep(PAUSE_S)
        request = request | {"new_tokens": self.arguments.new_tokens}
        try:
            return worker.ask(request, min(self.arguments.call_s, self.left_s()))
        except WorkerError as error:
            self.left_s()  # a call that was cut off by the end of the time is no failure
            return {"error": str(error)}

    def left_s(self) -> float:
        """Return the seconds left; OutOfTimeError if there are none."""
        left_s: float = self.arguments.deadline_s - time.monotonic()
        if left_s <= 0:
            raise OutOfTimeError
        return left_s

    def record_workers(self) -> None:
        """Record versions, load times and memory of the workers."""
        own = self.results.workers.setdefault(self.name, {})
        for contestant in self.contestants:
            worker = self.workers[contestant.worker]
            if isinstance(worker, Worker) and worker.is_running():
                facts = worker.facts | {"rss_gb": worker.rss_gb()}
                if contestant.name == STOCK:
                    self.results.provenance[self.name] = facts["provenance"]
                own[contestant.name] = {
                    key: value for key, value in facts.items() if key != "provenance"
                }


def say(text: str) -> None:
    """Print progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def opened(file: Path, settings: dict[str, Any]) -> Results:
    """Return the results to continue: those of the file, if there is one with the same settings."""
    if not file.exists():
        return Results(settings)
    found = json.loads(file.read_text())
    if found["settings"] != settings:
        raise SystemExit(
            f"{file} has other settings, {found['settings']}; give another file or remove it"
        )
    return Results(found["settings"], found["workers"], found["provenance"], found["samples"])


class HeldOut:
    """The held-out texts of the embedded pair, in another order in every repeat; rows get their
    full length.
    """

    def __init__(self, models: Path, repeats: int):
        self.prompts = json.loads((models / "prompts.json").read_text())
        self.repeats = repeats
        self.ends: list[int] = []
        self.max_prompt = PROMPT_TOKENS

    def trials(self, batch: int) -> tuple[Trial, list[Trial]]:
        """Return the warm-up and the trials."""
        warm_up, *trials = (self.trial(repeat, batch) for repeat in range(-1, self.repeats))
        return warm_up, trials

    def trial(self, repeat: int, batch: int) -> Trial:
        """Return the prompts of a repeat."""
        ids = [self.prompts[(repeat * batch + row) % len(self.prompts)] for row in range(batch)]
        return Trial("held-out", str(repeat), ids)


class Questions:
    """First turns of Spec-Bench's questions, or of a file like it, with a checkpoint's chat
    template.
    """

    def __init__(self, models: Path, prompts: Path, per_task: int, max_prompt: int):
        self.tokenizer = AutoTokenizer.from_pretrained(models / "target-fp32")
        self.ends = sorted(
            model_end_tokens(GenerationConfig.from_pretrained(models / "target-fp32"))
        )
        self.questions = questions_of(prompts, per_task)
        self.max_prompt = max_prompt

    def trials(self, batch: int) -> tuple[Trial, list[Trial]]:
        """Return the warm-up and the trials."""
        warm_up = Trial("warm-up", "", self.ids(["Say hello, please."] * batch))
        groups = groups_of(self.questions, batch)
        return warm_up, [
            Trial(g[0].task, g[0].name, self.ids([one.turns[0] for one in g])) for g in groups
        ]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Encode one-turn conversations."""
        inputs = encoded_chats(
            self.tokenizer, [[text] for text in texts], self.max_prompt, torch.device("cpu")
        )
        masks = inputs["attention_mask"].bool()
        return [ids[mask].tolist() for ids, mask in zip(inputs["input_ids"], masks, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of install.py and export.py")
    parser.add_argument(
        "--target", help="the checkpoint given to export.py; default: the embedded pair"
    )
    parser.add_argument(
        "--groups", nargs="+", choices=PAIR_GROUPS | CHECKPOINT_GROUPS, help="default: all"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], help="leave out contestants whose names contain this"
    )
    parser.add_argument("--batches", default="1,8", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="without --target")
    parser.add_argument(
        "--prompts", type=Path, default=QUESTIONS, help="with --target: JSON Lines with turns"
    )
    parser.add_argument(
        "--per-task", type=int, default=10, help="with --target: questions per task"
    )
    parser.add_argument(
        "--max-prompt", type=int, default=2048, help="with --target: prompts are truncated to it"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--json", type=Path, help="default: results-ISA.json beside the models")
    parser.add_argument(
        "--total", type=float, default=3600, help="seconds after which no more is measured"
    )
    parser.add_argument("--call-s", type=float, default=180, help="seconds that one call may take")
    parser.add_argument(
        "--start-s", type=float, default=600, help="seconds that a worker may take to load"
    )
    own = parser.parse_args()
    groups = PAIR_GROUPS if own.target is None else CHECKPOINT_GROUPS
    names = own.groups or list(groups)
    if unknown := set(names) - set(groups):
        parser.error(
            f"no such groups here: {', '.join(sorted(unknown))}; there are {', '.join(groups)}"
        )
    models = models_folder(own.folder.resolve(), own.target)
    own.json = own.json or models / f"results-{own.isa}.json"
    own.deadline_s = time.monotonic() + own.total
    facts = {name: getattr(own, name) for name in ("new_tokens", "threads", "isa")}
    facts |= {"models": json.loads((models / "export.json").read_text())}
    prompts: HeldOut | Questions
    if own.target is None:
        prompts = HeldOut(models, own.repeats)
    else:
        prompts = Questions(models, own.prompts, own.per_task, own.max_prompt)
        facts |= {"prompts": own.prompts.name, "max_prompt": own.max_prompt}
    if not (models / "head").exists():
        own.without.append(WITH_HEAD)
    context = prompts.max_prompt + own.new_tokens
    settings = Settings(own.folder.resolve(), models, own.threads, own.isa, context, prompts.ends)
    results = opened(own.json, facts)
    try:
        for name in names:
            contestants = [
                c for c in groups[name] if not any(part in c.name for part in own.without)
            ]
            for batch in map(int, own.batches.split(",")):
                try:
                    Group(name, batch, contestants, settings, results, own).run(
                        *prompts.trials(batch)
                    )
                except WorkerError as error:
                    say(f"group {name}, batch {batch}, ended without its reference: {error}")
    except OutOfTimeError:
        say(f"out of time after {own.total:.0f} s; the same command continues")
    print(results.table())


if __name__ == "__main__":
    main()
