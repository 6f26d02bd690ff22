"""lm-eval on the server against lm-eval's own ``hf`` model on the same weights.

    python benchmarks/clients/run_lm_eval.py FOLDER --json lm_eval.json

Two small tasks are made of the embedded prompts. Log-likelihoods must agree within ``--tolerance``,
and generations must be equal.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from common import MODEL, Client, Work, parse, read_jsons, report, save_pair, server

from hf_slospec import tiny_prompts

CHOICE = "slospec_choice"
TEXT = "slospec_text"
CHOICES = 4
SHORTEST = 300  # characters of a prompt that can be split
# characters of its parts
CONTEXT = 160
CONTINUATION = 60
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
doc_to_text: "{{{{context}}}}"
"""
CHOICE_TASK = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""
TEXT_TASK = """output_type: generate_until
doc_to_target: "{{continuation}}"
generation_kwargs:
  until: ["\\n\\n\\n"]
  max_gen_toks: 48
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path, documents: int) -> None:
    """Write the tasks and their data: a prompt's beginning, its own continuation, and those of
    others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for text in tiny_prompts() if len(text) >= SHORTEST][: max(documents, CHOICES)]
    parts = [(text[:CONTEXT], text[CONTEXT : CONTEXT + CONTINUATION]) for text in texts]
    rows = []
    for place, (context, continuation) in enumerate(parts[:documents]):
        choices = [parts[(place + step) % len(parts)][1] for step in range(CHOICES)]
        label = place % CHOICES
        choices[0], choices[label] = choices[label], choices[0]
        rows.append(
            {"context": context, "continuation": continuation, "choices": choices, "label": label}
        )
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, own in ((CHOICE, CHOICE_TASK), (TEXT, TEXT_TASK)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + own)


def evaluate(
    client: Client, label: str, model: str, arguments: dict[str, Any], tasks: str, *options: str
) -> bool:
    """Run lm-eval, its samples in a folder of this label; -> whether it succeeded."""
    output = client.work.folder / "lm_eval" / label
    shutil.rmtree(output, ignore_errors=True)
    joined = ",".join(f"{name}={value}" for name, value in arguments.items())
    common = [
        "--include_path",
        client.work.folder / "tasks",
        "--output_path",
        output,
        "--log_samples",
    ]
    command = ["lm_eval", "run", "--model", model, "--model_args", joined, "--tasks", tasks]
    return client.run(*command, *common, *options, log=f"lm_eval-{label}", timeout_s=900) == 0


def answers(work: Work, label: str, task: str) -> list[list[Any]]:
    """Return the model's answers to every document of a task."""
    samples = read_jsons(work.folder / "lm_eval" / label, f"samples_{task}_*.jsonl")
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: int(sample["doc_id"]))]


def has_samples(work: Work, label: str) -> bool:
    """Return whether an earlier run left answers to as many documents, which is enough of what
    needs no server.
    """
    return all(len(answers(work, label, task)) == work.options.documents for task in (CHOICE, TEXT))


def loglikelihoods(work: Work, label: str) -> list[tuple[float, bool]]:
    """Return every choice's log-likelihood, and whether it is what the model would have written."""
    pairs = [choice[0] for document in answers(work, label, CHOICE) for choice in document]
    return [(float(value), str(is_greedy) == "True") for value, is_greedy in pairs]


def generations(work: Work, label: str) -> list[str]:
    """Return the text for every document."""
    return [document[0][0] for document in answers(work, label, TEXT)]


def main() -> int:
    work = parse(__doc__, documents=12, tolerance=1e-4)
    client = Client(work, "lm-eval[api,hf]")
    target = save_pair(work)
    write_tasks(work.folder / "tasks", work.options.documents)
    both = f"{CHOICE},{TEXT}"
    hf = {"pretrained": target, "dtype": "float32"}
    ran = {
        "hf": has_samples(work, "hf") or evaluate(client, "hf", "hf", hf, both, "--device", "cpu")
    }
    with server(work) as url:
        completions = {
            "model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": target,
            "tokenizer_backend": "huggingface", "num_concurrent": 2,
        }  # fmt: skip
        chat = {"model": MODEL, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 2}
        name = "local-completions"
        ran[name] = evaluate(client, name, name, completions, both, "--batch_size", "4")
        name = "local-chat-completions"
        ran[name] = evaluate(client, name, name, chat, TEXT, "--apply_chat_template")
    theirs = loglikelihoods(work, "hf")
    ours = loglikelihoods(work, "local-completions")
    pairs = list(zip(theirs, ours, strict=False))
    differences = [abs(one[0] - other[0]) for one, other in pairs]
    texts = generations(work, "hf")
    our_texts = generations(work, "local-completions")
    chats = generations(work, "local-chat-completions")
    worst = max(differences, default=float("inf"))
    expected = work.options.documents * CHOICES
    checks = {f"lm-eval ran with {name}": holds for name, holds in ran.items()} | {
        "all log-likelihoods came": len(theirs) == len(ours) == expected,
        f"log-likelihoods agree within {work.options.tolerance:g}": worst <= work.options.tolerance,
        "they agree on what is greedy": all(one[1] == other[1] for one, other in pairs),
        "generations are equal": len(texts) == work.options.documents and texts == our_texts,
        "all chats were answered": len(chats) == work.options.documents and all(chats),
    }
    figures = {
        "loglikelihoods": len(ours),
        "largest_difference": None if worst == float("inf") else worst,
        "generations_equal": f"{sum(map(str.__eq__, texts, our_texts))}/{len(texts)}",
        "chats": len(chats),
        "characters": sum(map(len, our_texts)),
    }
    return report(work, "lm-eval", client.version(), checks, **figures)


if __name__ == "__main__":
    sys.exit(main())
