"""Spec-Bench on any checkpoint: speed and accepted tokens by task, against stock ``generate`` in
the same process.

    python -m benchmarks.spec_bench --target build/checkpoints/SmolLM2-135M-Instruct --json spec_bench.json

The protocol is that of Spec-Bench (Xia et al., 2024; github.com/hemingkx/Spec-Bench): its 480
questions of six tasks, one after another at batch 1, several turns where a question has them,
greedy and at temperature 1. For every question all methods take turns, in another order each time,
so that drift of the machine affects them equally. Later turns follow the answers of stock
``generate``, so that all methods get the same prompts; in bf16 their answers may differ.

Larger batches: ``generate`` gets padded batches of one task, and the batcher gets all questions of
a task at once and admits them as others leave. A speed-up is the mean of tokens per second over
that of stock ``generate`` on the same questions, with a bootstrap interval over questions. A file
is continued where it was interrupted.

A drafter with a shape, ``lookup/4`` or ``lookup/4x2``, verifies a beam of that depth and width in
every step, in place of what the policy ``auto`` chooses: the best of such constants per task is
what ``auto`` should find."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import CompileConfig
from transformers.utils import logging

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import encoded, provenance
from hf_slospec.generate.rows import model_end_tokens, until_end
from hf_slospec.model.transfer import synchronize
from hf_slospec.server.loading import chosen_device, load_pair

QUESTIONS = Path(__file__).parent / "data" / "spec_bench.jsonl"
TASKS = {  # Spec-Bench's six; the categories of MT-Bench are one
    "translation": "translation", "summarization": "summarization", "qa": "QA", "math_reasoning": "maths", "rag": "RAG",
}  # fmt: skip
CHAT = "MT-bench"
STOCK = "stock"
COMPILED = "stock, compiled"  # with a static cache
LOOKUPS = "3,5,10"  # constants of stock's prompt lookup
ASSISTED = (3, 5, 10)  # constants of stock's assisted generation
DRAFTERS = ("none", "lookup", "suffix", "lookup+suffix")
OURS = "hf_slospec, "
BATCHER = " in the batcher"
NUM_RESAMPLES = 2000
COLOURS = (
    "#767676",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#CC79A7",
    "#D55E00",
)  # Okabe and Ito's


class Question(NamedTuple):
    """A question with its task."""

    name: str
    task: str
    turns: list[str]
    category: str = ""  # in the file


class Answer(NamedTuple):
    """One timed call."""

    seconds: float
    num_tokens: int  # new tokens of all rows
    num_steps: float  # forwards of the target after the prefill, per row
    texts: list[str]
    expected: float = 0.0  # tokens that the policy expected of the steps with drafts
    committed: int = 0  # and those that they gave


Run = Callable[[dict[str, torch.Tensor]], Answer]  # encoded prompts -> answer


def questions_of(path: Path, per_task: int) -> list[Question]:
    """Return the first questions of each task, evenly over the categories of MT-Bench.

    Args:
        path: one JSON object with ``turns`` a line, and optionally ``question_id`` and
            ``category``.
        per_task: maximum number of questions per task.
    """
    by_task: dict[str, list[Question]] = defaultdict(list)
    by_category: dict[str, int] = defaultdict(int)
    rows = [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    for number, row in enumerate(rows):
        category = row.get("category", "prompts")
        task = TASKS.get(category, CHAT if "question_id" in row else category)
        by_category[category] += 1
        by_task[task].append(
            Question(
                f"{by_category[category]:03} {row.get('question_id', number)}",
                task,
                row["turns"],
                category,
            )
        )
    # The first of every category, then the second, ...
    return [
        question
        for task in by_task.values()
        for question in sorted(task, key=lambda one: one.name)[:per_task]
    ]


def encoded_chats(
    tokenizer: Any, conversations: list[list[str]], max_prompt: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Encode conversations, in which user and assistant take turns, as a left-padded batch."""
    is_plain = tokenizer.chat_template is None  # templates write special tokens themselves
    if is_plain:
        texts = ["\n\n".join(turns) for turns in conversations]
    else:
        texts = [
            tokenizer.apply_chat_template(
                [
                    {"role": ("user", "assistant")[i % 2], "content": turn}
                    for i, turn in enumerate(turns)
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
            for turns in conversations
        ]
    return encoded(tokenizer, texts, max_prompt, device, add_special_tokens=is_plain)


@contextlib.contextmanager
def constant_draft(draft: Any, num_tokens: int) -> Iterator[None]:
    """Let assisted generation draft this many tokens in every step, inside this context."""
    settings = {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    config = draft.generation_config
    stock = {name: getattr(config, name) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**stock)


def shaped(drafter: str) -> tuple[str, dict[str, Any]]:
    """Return the drafter without the shape that may follow it, and the settings of its policy."""
    if shape := re.fullmatch(r"(.+)/(\d+)(?:x(\d+))?", drafter):  # folders have slashes, too
        source, depth, width = shape.groups()
        return source, dict(policy="fixed", max_depth=int(depth), max_width=int(width or 1))
    return drafter, dict(policy="none" if drafter == "none" else "auto")


class Contest:
    """Methods on one target, with the same prompts and options."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        tokenizer: Any,
        new_tokens: int,
        temperature: float,
        max_prompt: int,
    ):
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.max_prompt = max_prompt
        self.num_forwards = 0
        sampling = (
            dict(do_sample=True, temperature=temperature, top_k=0)
            if temperature
            else dict(do_sample=False)
        )
        self.options: dict[str, Any] = dict(max_new_tokens=new_tokens, **sampling)
        self.ends = model_end_tokens(target.generation_config)

    def encoded(self, conversations: list[list[str]]) -> dict[str, torch.Tensor]:
        """Encode conversations as a left-padded batch."""
        return encoded_chats(self.tokenizer, conversations, self.max_prompt, self.target.device)

    def longest(self, groups: list[list[Question]]) -> dict[str, torch.Tensor]:
        """Return the group with the longest first turns, encoded."""
        group = max(groups, key=lambda group: max(len(question.turns[0]) for question in group))
        return self.encoded([question.turns[:1] for question in group])

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the target's forwards inside this context."""
        self.num_forwards = 0

        def count(*_: Any) -> None:
            self.num_forwards += 1

        hook = self.target.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()

    def timed(
        self, call: Callable[[], Any], num_prompt: int, is_ours: bool, is_plain: bool = False
    ) -> Answer:
        """Time a call that returns sequences, and count its new tokens up to the first end of every
        row.

        Args:
            call: the call.
            num_prompt: tokens of its padded prompts.
            is_ours: True if it returns the steps that it took.
            is_plain: True if it takes a step per token, so that steps need not be counted.
        """
        torch.manual_seed(0)
        # We do not compile a model with hooks, and stock would compile the counting anew in every step.
        with contextlib.nullcontext() if is_ours or is_plain else self.counting():
            synchronize(self.target.device)
            begun = time.perf_counter()
            output = call()
            synchronize(self.target.device)
            seconds = time.perf_counter() - begun
        rows = [
            until_end(row.tolist(), self.ends)
            for row in getattr(output, "sequences", output)[:, num_prompt:]
        ]
        num_steps = max(map(len, rows)) - 1 if is_plain else self.num_forwards - 1
        steps = [metrics.steps for metrics in output.slo] if is_ours else [num_steps]
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        drafted = (
            [step for step in output.steps if step.depth and not step.is_prefill] if is_ours else []
        )
        expected = sum(request.expected for step in drafted for request in step.requests)
        committed = sum(step.committed for step in drafted)
        return Answer(
            seconds, sum(map(len, rows)), float(np.mean(steps)), texts, expected, committed
        )

    def stock(self, is_plain: bool = False, **extra: Any) -> Run:
        """Return stock ``generate`` with further options; for ``is_plain`` see :meth:`timed`."""
        return lambda inputs: self.timed(
            lambda: self.target.generate(**inputs, **self.options, **extra),
            inputs["input_ids"].shape[1],
            False,
            is_plain,
        )

    def compiled(self) -> Run:
        """Return stock ``generate`` with a static cache and compiled forwards."""
        config = CompileConfig()
        # transformers compiles on GPUs by itself, and on a CPU if this private field says so.
        config._compile_all_devices = True
        return self.stock(is_plain=True, cache_implementation="static", compile_config=config)

    def assisted(self, constant: int) -> Run:
        """Return stock's assisted generation with a constant number of drafted tokens."""
        stock = self.stock(assistant_model=self.draft)

        def run(inputs: dict[str, torch.Tensor]) -> Answer:
            with constant_draft(self.draft, constant):
                return stock(inputs)

        return run

    def generator(self, drafter: str, max_batch: int = 64) -> SLOSpecGenerator:
        """Return a generator by the name of its drafter: none, assistant, or a source for
        ``load_drafter``.

        A shape after it, as in ``lookup/4x2``, fixes depth and width of its trees.
        """
        drafter, options = shaped(drafter)
        # A compiler that ran beside the methods would slow them all.
        config = SLOSpecConfig(**options, max_batch=max_batch, compile="wait")
        if drafter == "assistant":
            return SLOSpecGenerator(self.target, self.draft, self.tokenizer, config)
        return SLOSpecGenerator(
            self.target,
            None,
            self.tokenizer,
            config,
            drafter="lookup" if drafter == "none" else drafter,
        )

    def ours(self, drafter: str) -> Run:
        """Return our ``generate`` with a drafter."""
        generator = self.generator(drafter)
        return lambda inputs: self.timed(
            lambda: generator.generate(**inputs, **self.options, return_dict_in_generate=True),
            inputs["input_ids"].shape[1],
            True,
        )

    def batcher(self, drafter: str, max_batch: int) -> Run:
        """Return a run that submits all rows at once to a batcher of ``max_batch`` requests."""

        def run(inputs: dict[str, torch.Tensor]) -> Answer:
            rows = [
                ids[mask.bool()]
                for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
            ]
            with self.generator(drafter, max_batch) as generator:
                begun = time.perf_counter()
                handles = [
                    generator.submit(
                        row[None], seed=0 if self.options["do_sample"] else None, **self.options
                    )
                    for row in rows
                ]
                results = [handle.result() for handle in handles]
                seconds = time.perf_counter() - begun
            steps = float(np.mean([result.metrics.steps for result in results]))
            return Answer(
                seconds,
                sum(len(r.token_ids) for r in results),
                steps,
                [r.text or "" for r in results],
            )

        return run

    def methods(
        self, drafters: list[str], lookups: list[int], batch: int, has_compiled: bool
    ) -> dict[str, Run]:
        """Return the methods at one batch size; stock's own speculation is for batch 1."""
        methods = {STOCK: self.stock()}
        if has_compiled:
            methods[COMPILED] = self.compiled()
        if batch == 1:
            methods |= {
                f"prompt lookup {k}": self.stock(prompt_lookup_num_tokens=k) for k in lookups
            }
            if self.draft is not None:
                methods |= {f"assisted {k}": self.assisted(k) for k in ASSISTED}
        methods |= {OURS + drafter: self.ours(drafter) for drafter in drafters}
        if batch > 1:
            methods |= {
                OURS + drafter + BATCHER: self.batcher(drafter, batch) for drafter in drafters
            }
        return methods


def groups_of(questions: list[Question], batch: int) -> list[list[Question]]:
    """Return whole batches of one task, the first of every task first; a task with fewer questions
    has none.
    """
    by_task: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_task[question.task].append(question)
    begins = range(0, len(questions) - batch + 1, batch)
    return [
        task[begin : begin + batch]
        for begin in begins
        for task in by_task.values()
        if begin + batch <= len(task)
    ]


def speedups(records: list[dict[str, Any]], reference: str = STOCK) -> list[dict[str, Any]]:
    """Return a row per setting, task and method: speed-up with a 95 % interval, tokens per second
    and per step.

    Args:
        reference: the method whose speed is 1.
    """
    rows = []
    random = np.random.default_rng(0)
    settings = sorted({(r["temperature"], r["batch"]) for r in records})
    for temperature, batch in settings:
        own = [r for r in records if (r["temperature"], r["batch"]) == (temperature, batch)]
        tasks = list(dict.fromkeys(r["task"] for r in own))
        for task in [*tasks, "overall"]:
            calls: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for r in own:
                if task in (r["task"], "overall"):
                    calls[r["method"]][r["question"]].append(r)
            for method, by_question in calls.items():
                names = [name for name in by_question if name in calls[reference]]
                speeds = np.array(
                    [
                        [_speed(calls[which][name]) for name in names]
                        for which in (method, reference)
                    ]
                )
                drawn = random.integers(len(names), size=(NUM_RESAMPLES, len(names)))
                means = speeds[:, drawn].mean(axis=2)
                tokens = sum(r["tokens"] for name in names for r in by_question[name])
                steps = sum(
                    r.get("steps", 0.0) * batch for name in names for r in by_question[name]
                )
                calls_of = sum(batch for name in names for _ in by_question[name])
                rows.append({
                    "temperature": temperature, "batch": batch, "task": task, "method": method,
                    "questions": len(names) * batch,
                    "speedup": round(float(speeds[0].mean() / speeds[1].mean()), 3),
                    "interval": np.quantile(means[0] / means[1], (0.025, 0.975)).round(3).tolist(),
                    "tokens_per_s": round(float(speeds[0].mean()), 2),
                    # Rows of a stock batch that have ended take part in its steps.
                    "tokens_per_step": round((tokens - calls_of) / max(steps, 1.0), 3)
                    if steps and (batch == 1 or method.startswith(OURS)) else None,
                    "expected_over_committed": _calibration([r for name in names for r in by_question[name]]),
                })  # fmt: skip
    return rows


def _speed(calls: list[dict[str, Any]]) -> float:
    return sum(r["tokens"] for r in calls) / sum(r["seconds"] for r in calls)


def _calibration(calls: list[dict[str, Any]]) -> float | None:
    committed = sum(r.get("committed", 0) for r in calls)
    return round(sum(r.get("expected", 0.0) for r in calls) / committed, 3) if committed else None


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table per temperature and batch size: speed-up over stock by task, and tokens per
    step overall.
    """
    for temperature, batch in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
        tasks = list(dict.fromkeys(row["task"] for row in own))
        table = Table(title=f"T = {temperature:g}, batch {batch}: speed-up over stock generate")
        for heading in ("method", *tasks, "tokens per step"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for method in dict.fromkeys(row["method"] for row in own):
            cells = {row["task"]: row for row in own if row["method"] == method}
            low, high = cells["overall"]["interval"]
            table.add_row(
                method,
                *(f"{cells[task]['speedup']:.2f}" if task in cells else "" for task in tasks[:-1]),
                f"{cells['overall']['speedup']:.2f} ({low:.2f}-{high:.2f})",
                f"{cells['overall']['tokens_per_step'] or float('nan'):.2f}",
            )
        Console(width=150).print(table)


def plot(rows: list[dict[str, Any]], facts: dict[str, Any], file: Path) -> None:
    """Draw the speed-ups at batch 1 by task: stock's prompt lookup at its best constant, and our
    drafters, under a title with model, machine and number of questions.

    Args:
        facts: the provenance of the rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    own = {
        (row["method"], row["task"]): row
        for row in rows
        if (row["temperature"], row["batch"]) == (0.0, 1)
    }
    tasks = list(dict.fromkeys(task for _, task in own))
    lookups = [name for name, _ in own if name.startswith("prompt lookup")]
    best = max(lookups, key=lambda name: own[name, "overall"]["speedup"])
    shown = {
        best: f"transformers {best}",
        **{name: name for name, _ in own if name.startswith(OURS)},
    }
    shown |= {f"{OURS}none": f"{OURS}no drafts"}
    figure, panel = pyplot.subplots(figsize=(9, 3.8))
    width = 0.8 / len(shown)
    for index, ((name, label), colour) in enumerate(zip(shown.items(), COLOURS, strict=False)):
        at = np.arange(len(tasks)) + (index - (len(shown) - 1) / 2) * width
        speeds = np.array([own[name, task]["speedup"] for task in tasks])
        errors = np.abs(np.array([own[name, task]["interval"] for task in tasks]).T - speeds)
        panel.bar(
            at,
            speeds,
            width,
            yerr=errors,
            label=label,
            color=colour,
            ecolor="#444444",
            error_kw=dict(lw=1),
        )
        panel.bar_label(panel.containers[-1], [""] * (len(tasks) - 1) + [f"{speeds[-1]:.2f}"],
                        fontsize=7, label_type="center", rotation=90, color="white")  # fmt: skip
    panel.axhline(1.0, color="black", lw=1)
    panel.set(ylabel="speed, stock generate = 1", xticks=np.arange(len(tasks)))
    panel.set_xticklabels(tasks)
    panel.spines[["top", "right"]].set_visible(False)
    number = own[f"{OURS}none", "overall"]["questions"]
    title = f"{facts['target']}, {facts['dtype'].removeprefix('torch.')}, batch 1, greedy"
    figure.text(0.5, 0.955, f"{title}; {facts['cpu']}, {facts['isa']}", ha="center", fontsize=9)
    note = f"{number} questions of Spec-Bench; lines: 95 % intervals (bootstrap over questions)"
    figure.text(0.5, 0.01, note, ha="center", fontsize=8)
    figure.legend(ncols=5, loc=(0.06, 0.88), frameon=False, fontsize=8, columnspacing=1.0)
    figure.tight_layout(rect=(0, 0.03, 1, 0.91))
    figure.savefig(file, dpi=150)


def main(
    target: Annotated[str, typer.Option(help="A folder or a repository of the Hub.")],
    assistant: Annotated[str | None, typer.Option(help="A draft model.")] = None,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated: none, or sources for load_drafter; lookup/4x2.")
    ] = ",".join(DRAFTERS),
    lookups: Annotated[
        str, typer.Option(help="Comma-separated constants of stock's prompt lookup.")
    ] = LOOKUPS,
    prompts: Annotated[
        Path, typer.Option(help="JSON Lines with turns; default: Spec-Bench's questions.")
    ] = QUESTIONS,
    per_task: Annotated[int, typer.Option(help="Questions per task.")] = 10,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,1",
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1",
    new_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer; Spec-Bench has 1024.")
    ] = 128,
    max_prompt: Annotated[
        int, typer.Option(help="Prompts are truncated to this many tokens.")
    ] = 2048,
    compiled: Annotated[
        bool,
        typer.Option(help="Also stock with compiled forwards and a static cache, on CPUs, too."),
    ] = False,
    device: Annotated[str, typer.Option()] = "auto",
    dtype: Annotated[str, typer.Option(help="fast: what the device is fast in.")] = "fast",
    minutes: Annotated[
        float, typer.Option(help="Stop after so long; the same command continues.")
    ] = float("inf"),
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the results at batch 1.")
    ] = None,
) -> None:
    """Time all methods on all questions."""
    logging.set_verbosity_error()
    pair = load_pair(target, assistant, "tiny", dtype, str(chosen_device(device)))
    names = drafters.split(",") + (["assistant"] if assistant is not None else [])
    facts = provenance(
        target=Path(target).name, assistant=assistant and Path(assistant).name,
        dtype=str(pair.target.dtype), device=str(pair.target.device),
        new_tokens=new_tokens, per_task=per_task, max_prompt=max_prompt, prompts=prompts.name,
    )  # fmt: skip
    records: list[dict[str, Any]] = []
    if json_path is not None and json_path.exists():
        records = json.loads(json_path.read_text(encoding="utf-8"))["records"]
    ends = time.monotonic() + 60 * minutes
    questions = questions_of(prompts, per_task)
    for temperature in map(float, temperatures.split(",")):
        contest = Contest(
            pair.target, pair.draft, pair.tokenizer, new_tokens, temperature, max_prompt
        )
        for batch in map(int, batches.split(",")):
            methods = contest.methods(
                names, [int(one) for one in lookups.split(",") if one], batch, compiled
            )
            is_warm = False
            for number, group in enumerate(
                tqdm(groups_of(questions, batch), desc=f"T={temperature:g}, batch {batch}")
            ):
                key = dict(
                    temperature=temperature, batch=batch, task=group[0].task, question=group[0].name
                )
                if any(key.items() <= r.items() for r in records):
                    continue
                if time.monotonic() > ends:
                    break
                if not is_warm:
                    warm_up = contest.encoded([["Say hello, please."]] * batch)
                    is_warm = True
                    if compiled:  # the static cache keeps its greatest length, so this is first
                        methods[COMPILED](contest.longest(groups_of(questions, batch)))
                    for run in methods.values():
                        run(warm_up)
                records += [key | r for r in answers(contest, methods, group, number)]
                if json_path is not None:
                    content = {
                        "provenance": facts,
                        "results": speedups(records),
                        "records": records,
                    }
                    json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    results = speedups(records)
    show(results)
    if plot_path is not None:
        plot(results, facts, plot_path)


def answers(
    contest: Contest, methods: dict[str, Run], group: list[Question], number: int
) -> list[dict[str, Any]]:
    """Return records of a group of questions, answered by all methods; batches answer the first
    turn only.
    """
    found = []
    conversations: list[list[str]] = [[] for _ in group]
    num_turns = len(group[0].turns) if len(group) == 1 else 1
    order = list(methods)
    order = order[number % len(order) :] + order[: number % len(order)]
    for turn in range(num_turns):
        for conversation, question in zip(conversations, group, strict=True):
            conversation.append(question.turns[turn])
        inputs = contest.encoded(conversations)
        by_method = {name: methods[name](inputs) for name in order}
        for conversation, text in zip(conversations, by_method[STOCK].texts, strict=True):
            conversation.append(text)
        found += [
            {
                "method": name, "turn": turn, "seconds": round(answer.seconds, 4), "tokens": answer.num_tokens,
                "steps": answer.num_steps, "equal": sum(map(str.__eq__, answer.texts, by_method[STOCK].texts)),
                "expected": round(answer.expected, 2), "committed": answer.committed,
            }
            for name, answer in by_method.items()
        ]  # fmt: skip
    return found


if __name__ == "__main__":
    typer.run(main)
