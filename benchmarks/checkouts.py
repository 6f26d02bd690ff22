"""Compare the decoding speed of two checkouts of this repository on the same questions.

    python -m benchmarks.checkouts --before ../before --target build/checkpoints/SmolLM2-135M-Instruct --json out.json

Each checkout runs in a process of its own, which loads the model once. The processes take turns:
the same batch of questions (the first turns of ``benchmarks.spec_bench``) is decoded by one while
the other waits for input, with the order reversed for every batch, so that drift of the machine
affects both equally. Forwards are compiled before anything is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.spec_bench import NUM_RESAMPLES, QUESTIONS, groups_of, questions_of
from hf_slospec.cli.benchmark import provenance

# Runs in a checkout: a JSON object a line in, a JSON object a line out. It uses the names that
# benchmarks.spec_bench has had since it exists.
WORKER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print
from benchmarks.spec_bench import Contest, load_pair
target, dtype, new_tokens, max_prompt = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pair = load_pair(target, None, "tiny", dtype, "cpu" if sys.argv[5] == "cpu" else "cuda")
contest = Contest(pair.target, None, pair.tokenizer, new_tokens, 0.0, max_prompt)
runs = {}
for line in sys.stdin:
    asked = json.loads(line)
    key = asked["drafter"], asked["batcher"]
    if key not in runs:
        runs[key] = contest.batcher(key[0], key[1]) if key[1] else contest.ours(key[0])
    answer = runs[key](contest.encoded(asked["conversations"]))
    print(json.dumps([answer.seconds, answer.num_tokens, answer.num_steps, answer.texts]), file=answers, flush=True)
"""


class Worker:
    """A checkout's process."""

    def __init__(self, checkout: Path, *arguments: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments],
            cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> tuple[float, int, float, list[str]]:
        """Return seconds, number of new tokens, steps per row and texts of one call."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process in {self.process.args} ended")
        seconds, num_tokens, num_steps, texts = json.loads(line)
        return seconds, num_tokens, num_steps, texts


def ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speed of ``after`` as a ratio of ``before`` by batch size and drafter: the
    geometric mean over batches of questions with a 95 % bootstrap interval.
    """
    random = np.random.default_rng(0)
    rows = []
    for batch, drafter in dict.fromkeys((r["batch"], r["drafter"]) for r in records):
        own = [r for r in records if (r["batch"], r["drafter"]) == (batch, drafter)]
        speed = {
            side: np.array([r[side]["tokens"] / r[side]["seconds"] for r in own])
            for side in ("before", "after")
        }
        logs = np.log(speed["after"] / speed["before"])
        drawn = logs[random.integers(len(logs), size=(NUM_RESAMPLES, len(logs)))].mean(axis=1)
        rows.append({
            "batch": batch, "drafter": drafter, "calls": len(own),
            "ratio": round(float(np.exp(logs.mean())), 3),
            "interval": np.exp(np.quantile(drawn, (0.025, 0.975))).round(3).tolist(),
            "tokens_per_s": {side: round(float(speeds.mean()), 1) for side, speeds in speed.items()},
            "equal_texts": sum(r["before"]["texts"] == r["after"]["texts"] for r in own),
        })  # fmt: skip
    return rows


def main(
    before: Annotated[Path, typer.Option(help="The checkout to compare with.")],
    target: Annotated[str, typer.Option(help="A folder with a checkpoint.")],
    after: Annotated[Path, typer.Option(help="The checkout to judge.")] = Path(),
    drafters: Annotated[str, typer.Option(help="Comma-separated.")] = "none,lookup",
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    batcher: Annotated[bool, typer.Option(help="Submit the rows to the batcher.")] = False,
    per_task: Annotated[int, typer.Option(help="Questions per task at batch 1.")] = 3,
    rounds: Annotated[int, typer.Option(help="Times that every batch is decoded.")] = 1,
    new_tokens: Annotated[int, typer.Option()] = 128,
    max_prompt: Annotated[int, typer.Option()] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option()] = "fast",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print the ratio of speeds."""
    arguments = (str(Path(target).resolve()), dtype, str(new_tokens), str(max_prompt), device)
    workers = {"before": Worker(before, *arguments), "after": Worker(after, *arguments)}
    records: list[dict[str, Any]] = []
    facts = provenance(target=Path(target).name, dtype=dtype, new_tokens=new_tokens, rounds=rounds)
    for batch in map(int, batches.split(",")):
        for drafter in drafters.split(","):
            common = {"drafter": drafter, "batcher": batch if batcher else 0}
            for worker in workers.values():  # compiles and measures costs
                for _ in range(2):
                    worker.ask(conversations=[["Say hello, please."]] * batch, **common)
            groups = groups_of(questions_of(QUESTIONS, max(per_task, batch)), batch) * rounds
            for number, group in enumerate(groups):
                conversations = [question.turns[:1] for question in group]
                record: dict[str, Any] = {"batch": batch, "drafter": drafter, "task": group[0].task}
                for side in ("before", "after") if number % 2 else ("after", "before"):
                    answer = workers[side].ask(conversations=conversations, **common)
                    record[side] = dict(
                        zip(("seconds", "tokens", "steps", "texts"), answer, strict=True)
                    )
                records.append(record)
            print(json.dumps(ratios(records)[-1]), flush=True)
    for worker in workers.values():
        worker.process.communicate()
    rows = ratios(records)
    if json_path is not None:
        for record in records:
            del record["before"]["texts"], record["after"]["texts"]
        content = {"provenance": facts, "results": rows, "records": records}
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
