"""Test a tiny random model of every causal-LM class of the installed transformers, and write docs/support.md.

Each class runs in a separate process, so that a crash, a hang or a huge model affects no other class.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tiny random model needs nothing from the Hub

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecError, SLOSpecGenerator
from tests.support.tiny_configs import WINDOW, tiny_config
from tests.support.tiny_models import VOCAB, sharpened

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "support.json"
NEW_TOKENS, PROMPT_LENGTHS = 36, (12, 25)
MAX_PARAMETERS, MAX_MEMORY, TIME_LIMIT_S = 50_000_000, 12 << 30, 150
SEEDS = (0, 1, 2)
NEAR_TIE = 1e-4  # logits this close may change order with the order of a sum
OPTIONS = dict(max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=2)
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=30)

CODEBOOKS = "decodes several audio codebooks at once, with a generate of its own"
ASSISTANT = "drafts from the KV of the Gemma 4 model that it assists; does not decode alone"
UNTESTABLE = {
    "Gemma3nForConditionalGeneration": "its vision tower needs timm; its text decoder is Gemma3nForCausalLM",
    "Gemma4AssistantForCausalLM": ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": ASSISTANT,
    "MusicgenForCausalLM": CODEBOOKS,
    "MusicgenMelodyForCausalLM": CODEBOOKS,
}


class UntestableError(Exception):
    """The class cannot be tested; the message has the reason."""


def model_types() -> dict[str, list[str]]:
    """Return the model types that load each class, by class name."""
    types: dict[str, list[str]] = collections.defaultdict(list)
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            types[name].append(model_type)
    return dict(sorted(types.items()))


def count_parameters(model_class: Any, config: Any) -> int:
    """Return the number of parameters, or 0 if the model cannot be created without memory for them."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(config).parameters())
    except (RuntimeError, NotImplementedError):  # the constructor needs values; the memory limit applies
        return 0


def ragged_prompts(seed: int) -> list[torch.Tensor]:
    """Return three prompts of different lengths, each [1, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*PROMPT_LENGTHS, (3,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in lengths]


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``attention_mask`` of prompts, each [num_rows, longest] int64."""
    longest = max(row.shape[1] for row in rows)
    pad = functools.partial(torch.nn.functional.pad, value=0)
    ids = torch.cat([pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def generated(generate: Any, rows: list[torch.Tensor], **options: Any) -> list[list[int]]:
    """Return the new tokens of each row, up to its end-of-text token."""
    torch.manual_seed(7)
    inputs = left_padded(rows)
    out = generate(**inputs, **OPTIONS, **options)
    new = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [tokens[: tokens.index(2) + 1] if 2 in tokens else tokens for tokens in new]


@torch.no_grad()
def margin(model: Any, prompt: torch.Tensor, tokens: list[int]) -> float:
    """Return the difference of the two highest logits of stock after ``prompt`` and ``tokens``."""
    ids = torch.cat((prompt, torch.tensor([tokens], dtype=torch.int64)), dim=1)
    best, second = model(input_ids=ids).logits[0, -1].topk(2).values.tolist()
    return best - second


def first_difference(stock: list[list[int]], other: list[list[int]]) -> tuple[int, int] | None:
    """Return (row, index of the new token) of the first difference of two outputs; None if they are equal."""
    for row, (left, right) in enumerate(zip(stock, other, strict=True)):
        if left != right:
            pairs = zip(left, right, strict=False)
            return row, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    return None


def short(error: BaseException) -> str:
    """Return type and message of an error, truncated, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''}"


@dataclasses.dataclass
class Verdict:
    """Result for one class."""

    status: str  # exact, refused, untested or wrong
    notes: list[str] = dataclasses.field(default_factory=list)


def verdict_on(name: str) -> Verdict:
    """Build a tiny model of a class and compare its outputs with and without speculation."""
    if name in UNTESTABLE:
        return Verdict("untested", [UNTESTABLE[name]])
    model_class = getattr(transformers, name)
    try:
        config = tiny_config(model_class.config_class)
        if (count := count_parameters(model_class, config)) > MAX_PARAMETERS:
            raise UntestableError(f"no tiny model: {count / 1e6:.0f} M parameters")
        model = sharpened(lambda: model_class(config), 0)
    except UntestableError as why:
        return Verdict("untested", [str(why)])
    except Exception as error:  # noqa: BLE001 - constructors may raise anything
        return Verdict("untested", [f"the tiny model cannot be built: {short(error)}"])
    notes: list[str] = []
    for seed in SEEDS:
        model, draft = (sharpened(lambda: model_class(config), seed, noise) for noise in (0.0, 0.03))
        try:
            verdict, is_near_tie = compare(name, model, draft, ragged_prompts(seed))
        except UntestableError as why:
            return Verdict("untested", [str(why)])
        if not is_near_tie:
            return Verdict(verdict.status, notes[:1] + verdict.notes)
        notes = ["differed from stock at a near-tie with another seed"]
    return verdict


def compare(name: str, model: Any, draft: Any, rows: list[torch.Tensor]) -> tuple[Verdict, bool]:
    """Return the verdict for one model, and whether its difference from stock is a near-tie."""
    stock = functools.partial(type(model).generate, model)
    try:
        alone = [generated(stock, [row])[0] for row in rows]
    except Exception as error:  # noqa: BLE001 - stock may raise anything
        raise UntestableError(f"stock generate fails on the tiny model: {short(error)}") from None
    batches, notes = [rows[:1]], []
    try:
        padded_difference = first_difference(alone, generated(stock, rows))
    except Exception as error:  # noqa: BLE001 - stock may raise anything
        notes.append(f"batch 1 only: stock fails on a padded batch ({short(error)})")
    else:
        if padded_difference is None:
            batches.append(rows)
        else:
            row, token = padded_difference
            if margin(model, rows[row], alone[row][:token]) < NEAR_TIE:
                return Verdict("untested", ["stock's padded rows differ from the same rows alone at a near-tie"]), True
            notes.append("batch 1 only: stock itself decodes a padded row differently from the row alone")
    if len({token for tokens in alone for token in tokens}) < 6:
        notes.append("weak test: the tiny model repeats itself")
    try:
        ours = SLOSpecGenerator(
            model, draft, config=SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40)
        )
        for batch in batches:
            for sampling in ({}, SAMPLING):
                expected, got = generated(stock, batch, **sampling), generated(ours.generate, batch, **sampling)
                if (difference := first_difference(expected, got)) is None:
                    continue
                row, token = difference
                gap = margin(model, batch[row], expected[row][:token])
                kind = f"{'sampled' if sampling else 'greedy'}, batch of {len(batch)}"
                note = f"{kind}: row {row} differs from stock at new token {token} (top-2 gap {gap:.1e})"
                return Verdict("wrong", [note, *notes]), gap < NEAR_TIE
    except SLOSpecError as error:
        reason = re.sub(rf"^{name} (cannot be packed: )?", "", " ".join(str(error).split()))
        reason = re.split("; (?!such)", reason)[0]  # without the advice
        return Verdict("refused", [reason]), False
    except Exception as error:  # noqa: BLE001 - any other error of speculation is a bug
        return Verdict("wrong", [f"error {short(error)}", *notes]), False
    return Verdict("exact", notes), False


def in_child(name: str, answer: Connection) -> None:
    """Test one class under a memory limit, without output, and send its verdict."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull), contextlib.redirect_stderr(devnull):
        answer.send(dataclasses.asdict(verdict_on(name)))


def tested(names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield every class with its verdict and the seconds it took, in order of completion."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch", "transformers.generation", "hf_slospec"])
    waiting = collections.deque(names)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(name, sender))
            child.start()
            sender.close()
            running[receiver] = name, child, time.monotonic()
        answered = wait(list(running), timeout=1.0)
        for connection, (name, child, start) in list(running.items()):
            elapsed_s = time.monotonic() - start
            if connection in answered:
                try:
                    verdict = connection.recv()
                except EOFError:
                    child.join()
                    verdict = dataclasses.asdict(Verdict("untested", [f"the test died (exit code {child.exitcode})"]))
            elif elapsed_s > TIME_LIMIT_S:
                verdict = dataclasses.asdict(Verdict("untested", [f"no verdict within {TIME_LIMIT_S} s"]))
            else:
                continue
            child.kill()
            child.join()
            del running[connection]
            yield name, verdict, elapsed_s


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/support.md."""
    rank = {"wrong": 0, "exact": 1, "refused": 2, "untested": 3}
    types = model_types()
    counts = collections.Counter(result["status"] for result in results.values())
    lines = [
        "# Supported model classes",
        "",
        f"This table lists every causal-LM class of transformers {transformers.__version__}, tested with hf_slospec "
        f"{hf_slospec.__version__} (PyTorch {torch.__version__}, Python {platform.python_version()}, fp32 on CPU) on "
        "a tiny random model of it and a noisy copy as the draft. **Exact** means that greedy and sampled outputs "
        f"equal those of stock `generate` token for token over {NEW_TOKENS} new tokens, for a single prompt and for "
        f"a left-padded batch of three; models with a sliding window use a window of {WINDOW} tokens, shorter than "
        "every prompt. **Refused** means that `SLOSpecGenerator` (or `enable`) raises an error with the reason before "
        "any token is decoded; the notes give the reason. **Untested** means that no tiny model of the class could be "
        "built or run by stock `generate` itself. **Wrong** is a bug.",
        "",
        "A class is exact for the settings tested here. A checkpoint may use other settings, so each model is checked "
        "by a trial when it is enabled.",
        "",
        "**Attention.** The tests above use `sdpa`. `flash` (CUDA, bf16 or fp16; the default there) attends to "
        "committed tokens by flash-attention kernels, with sliding windows and sinks. These layers use `sdpa` instead, "
        "with a debug log: layers in fp32, with K and V of different sizes (latent attention as in DeepSeek), with "
        "heads larger than 256 or not a multiple of 8, and with softcap (Gemma 2) unless the `flash-attn` package is "
        "installed. Its packing and merging are tested on CPU with a stand-in for the kernels. **Nothing has run on a "
        "GPU yet**; `python -m pytest -m gpu` runs the tests for one.",
        "",
        "This page is generated by `python -m scripts.support_matrix --write docs/support.md` (`--only NAME ...` "
        "tests single classes again and keeps the other results, from `build/support.json`).",
        "",
        "| status | classes |",
        "| --- | --- |",
        *(f"| {status} | {counts[status]} |" for status in rank if counts[status]),
        f"| all | {len(results)} |",
        "",
        "| class | model types | status | notes |",
        "| --- | --- | --- | --- |",
    ]
    for name, result in sorted(results.items(), key=lambda item: (rank[item[1]["status"]], item[0])):
        status = "**wrong**" if result["status"] == "wrong" else result["status"]
        notes = "; ".join(result["notes"]).replace("|", "\\|")
        lines.append(f"| {name} | {', '.join(types[name])} | {status} | {notes} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="test these classes and keep the results of the others"
    )
    parser.add_argument("--jobs", type=int, default=1, help="classes to test in parallel")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the Markdown page")
    arguments = parser.parse_args()
    types = model_types()
    if unknown := set(arguments.only or ()) - types.keys():
        parser.error(f"no causal-LM class of transformers {transformers.__version__}: {', '.join(sorted(unknown))}")
    known = json.loads(RESULTS.read_text()) if arguments.only and RESULTS.exists() else {}
    results = {name: result for name, result in known.items() if name in types}
    RESULTS.parent.mkdir(exist_ok=True)
    names = arguments.only or list(types)
    for count, (name, verdict, elapsed_s) in enumerate(tested(names, arguments.jobs), 1):
        results[name] = verdict
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{count:3}/{len(names)} {elapsed_s:5.1f} s  {verdict['status']:8} {name}  {'; '.join(verdict['notes'])}",
              flush=True)  # fmt: skip
    if arguments.write:
        arguments.write.write_text(page(results))
    if wrong := [name for name, result in results.items() if result["status"] == "wrong"]:
        parser.exit(1, f"wrong: {', '.join(wrong)}\n")


if __name__ == "__main__":
    main()
