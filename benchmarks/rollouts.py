"""Rollouts by ``generate_batch``, several epochs of the same prompts, against stock transformers.

    python -m benchmarks.rollouts --target build/checkpoints/SmolLM2-135M-Instruct --json FILE

A batch has ``--completions`` sampled completions of each of ``--per-batch`` prompts: questions of
Spec-Bench's maths, which are GSM8K's. Every epoch samples all of them again, with other seeds and
the same weights, and drafts are looked up in the answers of earlier epochs. The systems take turns
at every batch. Counts (``steps``, ``drafted``, ``accepted``) do not depend on the machine if the
policy does not (``--config '{"policy": "fixed", "max_depth": 4, "max_width": 3}'``); times do.

With a trained head as ``--drafter``, the system "hf_slospec, retrained" trains it after every epoch
on the epoch's completions (``HeadRetrainer``), in seconds that are counted apart.

The file is written after every batch, and continued where it was interrupted, with the past answers
of the file beside it. Without ``--target``, the embedded target completes code in fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_slospec
from benchmarks.generate_batch import BATCHES, GENERATE, OURS, Rows, batches, padded, prompts_of
from benchmarks.spec_bench import TASKS
from hf_slospec.cli.benchmark import provenance

PLAIN = f"{OURS}, no drafts"
RETRAINED = f"{OURS}, retrained"
ENABLED = (OURS, PLAIN, RETRAINED)
SYSTEMS = (OURS, PLAIN, BATCHES, GENERATE)
# Facts of a file that must be those of the run which continues it
FACTS = ("target", "drafter", "prompts", "per_batch", "completions", "tokens", "limit", "config",
         "systems")  # fmt: skip
COUNTS = ("new_tokens", "rows", "steps", "drafted", "accepted")
WARM_UP = 8  # new tokens of the first batch of each system, which is not measured


def loaded(options: argparse.Namespace) -> tuple[Any, Any, Rows]:
    """Return the target, its tokenizer, and the token ids of the prompts and of one more."""
    number = options.prompts + 1
    if options.target is None:
        model, _, tokenizer = map(copy.deepcopy, hf_slospec.load_tiny_pair())
        texts = [text[:200] for text in hf_slospec.tiny_prompts()[:number]]
        return model.float(), tokenizer, tokenizer(texts)["input_ids"]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16)
    prompts = prompts_of(tokenizer, number, options.prompt_tokens, TASKS["math_reasoning"])
    return model, tokenizer, prompts


class Measurement:
    """Models, prompts and settings of a run, and the rows of its file."""

    def __init__(self, options: argparse.Namespace):
        """Read the file, load the models, and enable those that are to speculate."""
        self.options = options
        self.past = hf_slospec.PastAnswers(max_per_prompt=2 * options.completions)
        self.facts = provenance(
            target=Path(options.target or "embedded").name, drafter=Path(options.drafter).name,
            prompts=options.prompts, per_batch=options.per_batch, completions=options.completions,
            tokens=options.tokens, limit=options.limit, systems=options.systems,
            config=options.config.model_dump_json(exclude_unset=True),
        )  # fmt: skip
        self.rows = list[dict[str, Any]]()
        self.training = dict[int, dict[str, Any]]()  # seconds and loss of the head's, by epoch
        if options.json is not None and options.json.exists():
            found = json.loads(options.json.read_text(encoding="utf-8"))
            changed = [name for name in FACTS if found["provenance"][name] != self.facts[name]]
            if changed or RETRAINED in options.systems:
                raise SystemExit(
                    f"{options.json} was measured with another {', '.join(changed) or 'head'}"
                )
            self.facts = found["provenance"]
            self.rows = found["rows"]
            self.past.load(self._past_file)
        self.stock, tokenizer, (*self.prompts, self.other_prompt) = loaded(options)
        self.config = GenerationConfig(
            max_new_tokens=options.tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=self.stock.generation_config.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or 0,
        )  # fmt: skip
        self.enabled = {
            name: self._enabled(name, tokenizer) for name in ENABLED if name in options.systems
        }
        self.retrainer = hf_slospec.HeadRetrainer(every=options.prompts * options.completions)
        if RETRAINED in self.enabled:
            self.retrainer.attach(self.enabled[RETRAINED])

    def _enabled(self, name: str, tokenizer: Any) -> Any:
        model, _, _ = loaded(self.options)
        config = self.options.config
        drafter = hf_slospec.load_drafter(
            self.options.drafter, model, tokenizer=tokenizer, share_texts=self.past
        )
        if name == PLAIN:
            drafter = None
            config = hf_slospec.SLOSpecConfig(**dict(config) | {"policy": "none"})
        return hf_slospec.enable(model, drafter=drafter, config=config)

    @property
    def _past_file(self) -> Path:
        path: Path = self.options.json
        return path.with_suffix(".past.json")

    def run(self) -> None:
        """Measure the batches that the file does not have, and print a line per epoch."""
        known = {(row["epoch"], row["batch"]) for row in self.rows}
        systems = self.options.systems
        size = self.options.per_batch
        short = copy.copy(self.config)
        short.max_new_tokens = WARM_UP
        self.measure(systems, [self.other_prompt], short, seed=0)
        for epoch in range(1, self.options.epochs + 1):
            for batch, begin in enumerate(range(0, len(self.prompts), size)):
                if (epoch, batch) in known:
                    continue
                first = (epoch + batch) % len(systems)
                prompts = self.prompts[begin : begin + size]
                seed = 10_000 * epoch + 100 * batch
                found = self.measure(systems[first:] + systems[:first], prompts, self.config, seed)
                self.rows += [{"epoch": epoch, "batch": batch, **one} for one in found]
                self.save()
            if RETRAINED in self.enabled:
                begun_s = time.perf_counter()
                loss = self.retrainer.train()
                self.training[epoch] = {"seconds": time.perf_counter() - begun_s, "loss": loss}
                self.save()
            print(f"epoch {epoch}: {json.dumps(self.summary(epoch))}", flush=True)

    def measure(
        self, systems: list[str], prompts: Rows, config: GenerationConfig, seed: int
    ) -> list[dict[str, Any]]:
        """Return the seconds and counts of one batch by each system."""
        rows = [prompt for prompt in prompts for _ in range(self.options.completions)]
        limit = self.options.limit
        measured = list[dict[str, Any]]()
        for name in systems:
            model = self.enabled.get(name, self.stock)
            run: Callable[[], Rows] = partial(batches, model, rows, config, limit, seed)
            if name == GENERATE:
                run = partial(padded, model, rows, config, limit)
                torch.manual_seed(seed)
            decoder = getattr(model.generate, "decoder", None)
            before = None if decoder is None else decoder.done
            begun_s = time.perf_counter()
            new = run()
            seconds = time.perf_counter() - begun_s
            one = {"system": name, "seconds": seconds, "new_tokens": sum(map(len, new))}
            if decoder is not None:
                counts = zip(before._fields, decoder.done, before, strict=True)
                one |= {field: now - then for field, now, then in counts if field != "tokens"}
            measured.append(one)
        return measured

    def summary(self, epoch: int) -> dict[str, Any]:
        """Return the figures of an epoch by system: tokens per second, the median ratio to stock's
        over the batches, tokens per step and row, and the share of drafted tokens that were
        accepted.
        """
        rows = [row for row in self.rows if row["epoch"] == epoch]
        figures: dict[str, Any] = {}
        for name in self.options.systems:
            own = [row for row in rows if row["system"] == name]
            speeds = {row["batch"]: row["new_tokens"] / row["seconds"] for row in own}
            figures[name] = {"tokens_per_s": round(statistics.median(speeds.values()), 2)}
            for other in {BATCHES, GENERATE, PLAIN} - {name}:
                ratios = [
                    speeds[row["batch"]] * row["seconds"] / row["new_tokens"]
                    for row in rows
                    if row["system"] == other
                ]
                if ratios and name in self.enabled:
                    figures[name][f"of {other}"] = round(statistics.median(ratios), 3)
            if name in self.enabled:
                total = {key: sum(row[key] for row in own) for key in own[0] if key in COUNTS}
                tokens = total["new_tokens"] - total["rows"]  # a row's first is its prefill's
                figures[name]["tokens_per_step"] = round(tokens / total["steps"], 3)
                if total["drafted"]:
                    acceptance = total["accepted"] / total["drafted"]
                    figures[name]["acceptance_rate"] = round(acceptance, 3)
        return figures

    def save(self) -> None:
        """Write the past answers and then the rows, if a file is wanted."""
        if self.options.json is None:
            return
        self.past.save(self._past_file)
        epochs = sorted({row["epoch"] for row in self.rows})
        content = {
            "provenance": self.facts,
            "epochs": {epoch: self.summary(epoch) for epoch in epochs},
            "training": self.training,
            "rows": self.rows,
        }
        self.options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model with a chat template, in bf16")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--config", type=hf_slospec.SLOSpecConfig.model_validate_json,
                        default='{"compile": "wait"}', help="settings, as JSON")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="longest prompt")
    parser.add_argument("--per-batch", type=int, default=4, help="prompts per batch")
    parser.add_argument("--completions", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="longest completion")
    parser.add_argument("--limit", type=int, default=16, help="rows that run together")
    parser.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), choices=(*SYSTEMS, RETRAINED)
    )
    parser.add_argument("--json", type=Path)
    Measurement(parser.parse_args(arguments)).run()


if __name__ == "__main__":
    main()
