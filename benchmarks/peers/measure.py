"""Compare hf_slospec on a CPU with llama.cpp, OpenVINO GenAI and vLLM, on the same models and prompts.

    python benchmarks/peers/measure.py FOLDER [--groups llama-f32 vllm-fp32] [--repeats 5] [--isa avx2] [--json FILE]

Every contestant of a group runs once per repeat and batch size with the repeat's prompts, so that drift affects all
alike; ratios are taken within a repeat. The file is written after every repeat, and the same command continues it.
``--isa avx2`` restricts the contestants to AVX2, so that a machine with AVX-512 can stand in for one without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contestants import GROUPS, STOCK, Contestant
from summary import Record, different_at, summarize, table
from workers import ISAS, UNRESTRICTED, Worker, WorkerError

PAUSE_S = 0.25  # before a call, so that the idle threads of the last one have stopped spinning


class OutOfTimeError(Exception):
    """The time given by ``--total`` is used up."""


@dataclass
class Results:
    """Contents of the JSON file."""

    settings: dict[str, Any]
    workers: dict[str, dict[str, Record]] = field(default_factory=dict)  # facts by group and contestant
    provenance: dict[str, Any] = field(default_factory=dict)  # by group
    samples: list[Record] = field(default_factory=list)

    def has(self, group: str, batch: int, repeat: int) -> bool:
        """Return whether this repeat was recorded."""
        return any((s["group"], s["batch"], s["repeat"]) == (group, batch, repeat) for s in self.samples)

    def summary(self) -> list[Record]:
        """Return figures per group, batch and contestant."""
        return summarize(self.samples, self.settings["new_tokens"])

    def write(self, file: Path) -> None:
        """Replace the file as a whole."""
        written = file.with_suffix(".part")
        written.write_text(json.dumps(vars(self) | {"summary": self.summary()}, indent=1) + "\n")
        written.replace(file)


class Group:
    """The workers of one group."""

    def __init__(self, name: str, contestants: list[Contestant], results: Results, arguments: argparse.Namespace):
        self.name, self.contestants, self.results, self.arguments = name, contestants, results, arguments
        self.prompts = json.loads((arguments.folder / "models" / "prompts.json").read_text())
        self.workers: dict[tuple[str, ...], Worker | WorkerError] = {}
        self.failed: dict[tuple[str, int], str] = {}  # by contestant and batch

    def run(self) -> None:
        """Measure all repeats that are not recorded yet."""
        batches = self.arguments.batches
        repeats = [(repeat, batch) for repeat in range(self.arguments.repeats) for batch in batches]
        missing = [(repeat, batch) for repeat, batch in repeats if not self.results.has(self.name, batch, repeat)]
        if not missing:
            return
        try:
            self.start()
            for batch in dict.fromkeys(batch for _, batch in missing):
                self.repeat(batch, -1)  # warm-up with other prompts, in which hf_slospec also measures its step costs
            for repeat, batch in missing:
                self.results.samples += self.repeat(batch, repeat)
                self.record_workers()
                self.results.write(self.arguments.json)
        finally:
            for worker in self.workers.values():
                if isinstance(worker, Worker):
                    worker.stop()

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
                self.workers[key] = Worker(key, own.folder, own.threads, own.isa, start_s)
            except WorkerError as error:
                self.left_s()
                say(f"  failed: {error}")
                if not self.workers:
                    raise
                self.workers[key] = error

    def repeat(self, batch: int, repeat: int) -> list[Record]:
        """Return a record of every contestant with this batch size.

        Raises:
            OutOfTimeError: the records so far are dropped, so that every recorded repeat is complete.
        """
        ids = [self.prompts[(repeat * batch + row) % len(self.prompts)] for row in range(batch)]
        records: list[Record] = []
        expected: list[list[int]] = []
        for contestant in self.contestants:
            if batch not in contestant.batches:
                continue
            record: Record = {"group": self.name, "batch": batch, "repeat": repeat, "name": contestant.name}
            answer = self.ask(contestant, batch, {**contestant.options, "ids": ids})
            if "error" in answer:
                record["error"] = self.failed[contestant.name, batch] = answer["error"]
                if contestant.name == STOCK:
                    raise WorkerError(answer["error"])
            else:
                if contestant.name == STOCK:
                    expected = answer["tokens"]
                record["seconds"] = answer["seconds"]
                record["different_at"] = different_at(expected, answer["tokens"])
            records.append(record)
            outcome = record.get("error") or f"{batch * self.arguments.new_tokens / record['seconds']:.1f} tokens/s"
            when = "warm-up" if repeat < 0 else f"repeat {repeat}"
            say(f"{self.name}, {when}, batch {batch}, {contestant.name}: {outcome}")
        return records

    def ask(self, contestant: Contestant, batch: int, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer; an error once is an error in all later repeats."""
        worker = self.workers[contestant.worker]
        if (contestant.name, batch) in self.failed:
            return {"error": self.failed[contestant.name, batch]}
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
                own[contestant.name] = {key: value for key, value in facts.items() if key != "provenance"}


def say(text: str) -> None:
    """Print progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def opened(file: Path, settings: dict[str, Any]) -> Results:
    """Return the results to continue: those of the file, if there is one with the same settings."""
    if not file.exists():
        return Results(settings)
    found = json.loads(file.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{file} has other settings, {found['settings']}; give another file or remove it")
    return Results(found["settings"], found["workers"], found["provenance"], found["samples"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of install.py and export.py")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--without", nargs="+", default=[], help="leave out contestants whose names contain this")
    parser.add_argument("--batches", nargs="+", type=int, choices=(1, 8), default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--json", type=Path, help="default: results-ISA.json in the folder")
    parser.add_argument("--total", type=float, default=3600, help="seconds after which no more is measured")
    parser.add_argument("--call-s", type=float, default=180, help="seconds that one call may take")
    parser.add_argument("--start-s", type=float, default=600, help="seconds that a worker may take to load")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.json = arguments.json or arguments.folder / f"results-{arguments.isa}.json"
    arguments.deadline_s = time.monotonic() + arguments.total
    settings = {name: getattr(arguments, name) for name in ("new_tokens", "threads", "isa")}
    settings |= {"models": json.loads((arguments.folder / "models" / "export.json").read_text())}
    results = opened(arguments.json, settings)
    for name in arguments.groups:
        contestants = [c for c in GROUPS[name] if not any(part in c.name for part in arguments.without)]
        try:
            Group(name, contestants, results, arguments).run()
        except OutOfTimeError:
            say(f"out of time after {arguments.total:.0f} s, in group {name}; the same command continues")
            break
        except WorkerError as error:
            say(f"group {name} ended without its reference: {error}")
    print(table(results.summary(), results.workers))


if __name__ == "__main__":
    main()
