"""lm-eval's ``hf`` model with batches on grade-school maths, as it is and with an enabled model.

    pip install hf_slospec lm-eval==0.4.13 datasets
    python benchmarks/clients/run_lm_eval_hf.py org/target --json lm_eval_hf.json

The task has GSM8K's questions as Spec-Bench holds them, and stops at several strings of several
tokens, which end a batch when each of its rows has met one. Answers must be equal in fp32, so that
every score is; the two ways take turns, and the ratio is that of their seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout is what is tried

import hf_slospec
from benchmarks.spec_bench import QUESTIONS, questions_of
from hf_slospec.cli.benchmark import provenance

CATEGORY = "math_reasoning"
TASK = """task: slospec_maths
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: ""
generation_kwargs:
  until: ["Question:", "</s>", "<|im_end|>", "\\n\\n\\n"]
  max_gen_toks: {tokens}
  do_sample: false
metric_list:
  - metric: exact_match
"""


def answers(lm: HFLM, tasks: TaskManager) -> tuple[list[str], float]:
    """Return the answers to all questions, and the seconds that they took."""
    begun_s = time.perf_counter()
    out: Any = simple_evaluate(
        lm, tasks=["slospec_maths"], task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    seconds = time.perf_counter() - begun_s
    samples = sorted(out["samples"]["slospec_maths"], key=lambda one: one["doc_id"])
    return [one["resps"][0][0] for one in samples], seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="Hub repository or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    asked = questions_of(QUESTIONS, options.questions)
    questions = [each.turns[0] for each in asked if each.category == CATEGORY]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps({"question": one}) + "\n" for one in questions))
        task = TASK.format(data=data, tokens=options.tokens)
        (Path(folder) / "maths.yaml").write_text(task)
        tasks = TaskManager(include_path=folder, include_defaults=False)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
        with hf_slospec.enabled(model, always=True):
            answers(lm, tasks)  # measures, and compiles where that pays
        stock_s = list[float]()
        ours_s = list[float]()
        equal = list[int]()
        tokens_per_step = None
        for _ in range(options.repeats):
            expected, seconds = answers(lm, tasks)
            stock_s.append(seconds)
            with hf_slospec.enabled(model, always=True):
                found, seconds = answers(lm, tasks)
                done = hf_slospec.status(model).done
                tokens_per_step = None if done is None else done.tokens_per_step
            ours_s.append(seconds)
            equal.append(sum(map(str.__eq__, expected, found)))
    ratios = [stock / ours for stock, ours in zip(stock_s, ours_s, strict=True)]
    result = {
        **provenance(),
        "target": Path(options.target).name,
        "dtype": options.dtype,
        "questions": len(questions),
        "batch_size": options.batch_size,
        "max_new_tokens": options.tokens,
        "equal_answers": min(equal),
        "stock_s": stock_s,
        "ours_s": ours_s,
        "ratio": statistics.median(ratios),
        "tokens_per_step": tokens_per_step,
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    is_exact = options.dtype == "float32"
    return int(is_exact and min(equal) < len(questions))


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
