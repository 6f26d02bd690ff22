"""Train the embedded pair: tokenizer, target and draft, from the Python standard library's source.

    python scripts/train_tiny_pair.py                      # about two hours on two cores
    python scripts/train_tiny_pair.py --target-steps 20 --draft-steps 20 --out /tmp/pair --work /tmp/work

Stages: a byte-level BPE tokenizer; the target, trained on the corpus; the draft, distilled from the
target's distribution, half on corpus windows and half on texts sampled from the target. Every stage
writes checkpoints to ``--work`` and resumes from them. The seed determines data order and initial
weights (bitwise, on the same machine with the same number of threads).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_slospec import SLOSpecConfig, SLOSpecGenerator

VOCAB_SIZE = 2048
# Share of the steps after which windows are four times as long, in batches a quarter as large
LONG_FROM = 0.7
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
HELD_OUT = (  # modules excluded from training: for evaluation and for the prompts of the package
    "argparse.py calendar.py configparser.py csv.py fractions.py heapq.py json pathlib.py sched.py shlex.py "
    "statistics.py textwrap.py urllib/parse.py wsgiref"
).split()
SKIPPED = (
    "site-packages test tests idle_test encodings pydoc_data lib2to3 turtledemo __phello__".split()
)

TARGET_SHAPE = dict(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)
DRAFT_SHAPE = dict(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclass(frozen=True)
class Plan:
    """Settings of a training run; the command's defaults made the pair of the package."""

    seed: int
    target_steps: int
    draft_steps: int
    batch: int
    seq_len: int
    work: Path
    out: Path


def corpus_files(held_out: bool) -> list[Path]:
    """Return the sorted source files of the interpreter's standard library that are, or are not,
    held out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in SKIPPED for part in relative.parts):
            continue
        is_held_out = any(
            relative.as_posix() == name or name in relative.as_posix().split("/")[:-1]
            for name in HELD_OUT
        )
        if is_held_out == held_out:
            files.append(path)
    return files


def read_source(path: Path) -> str:
    """Return a source file's text."""
    return path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(plan: Plan) -> PreTrainedTokenizerFast:
    """Train the tokenizer, unless it exists, and load it."""
    path = plan.out / "tokenizer"
    if not (path / "tokenizer.json").exists():
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator((read_source(p) for p in corpus_files(held_out=False)), trainer)
        PreTrainedTokenizerFast(
            tokenizer_object=core,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=PAD,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            model_max_length=4096,
        ).save_pretrained(path)
    return PreTrainedTokenizerFast.from_pretrained(path)


def encode_corpus(tokenizer: PreTrainedTokenizerFast, held_out: bool, seed: int) -> torch.Tensor:
    """Return the tokens of all files in random order, an end-of-text token after each.  ->
    [num_tokens] int64
    """
    files = corpus_files(held_out)
    random.Random(seed).shuffle(files)
    ids: list[int] = []
    for path in files:
        ids += tokenizer(read_source(path))["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(ids)


def new_model(shape: dict[str, int], seed: int) -> LlamaForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        **shape,
    )
    return LlamaForCausalLM(config)


def windows(data: torch.Tensor, plan: Plan, step: int, is_long: bool) -> torch.Tensor:
    """Return random windows determined by seed and step, the same in a resumed run.  -> [rows,
    length + 1] int64
    """
    batch, seq_len = (plan.batch // 4, plan.seq_len * 4) if is_long else (plan.batch, plan.seq_len)
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - seq_len - 1, (batch,), generator=generator)
    return torch.stack([data[s : s + seq_len + 1] for s in starts.tolist()])


class Trainer:
    """Trains with AdamW for tables and norms, Muon for matrices; linear warm-up, constant, linear
    decay to zero.
    """

    def __init__(self, model: nn.Module, steps: int, checkpoint: Path):
        self.model = model
        self.steps = steps
        self.checkpoint = checkpoint
        is_matrix = {
            n: p.ndim == 2 and "embed" not in n and "lm_head" not in n
            for n, p in model.named_parameters()
        }
        matrices = [p for n, p in model.named_parameters() if is_matrix[n]]
        others = [p for n, p in model.named_parameters() if not is_matrix[n]]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_lrs = [0.02, 3e-3]
        self.step = 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self.step = state["step"]
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def run(self, loss_at: Callable[[int], torch.Tensor], title: str) -> None:
        """Train for the remaining steps; ``loss_at`` returns the loss of a step."""
        self.model.train()
        bar = tqdm(
            range(self.step, self.steps),
            initial=self.step,
            total=self.steps,
            desc=title,
            mininterval=5.0,
        )
        for step in bar:
            scale = min(1.0, (step + 1) / 50, 2.5 * (self.steps - step) / self.steps)
            for optimizer, lr in zip(self.optimizers, self.base_lrs, strict=True):
                optimizer.param_groups[0]["lr"] = lr * scale
            loss = loss_at(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step = step + 1
            if self.step % 20 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
            if self.step % 200 == 0 or self.step == self.steps:
                self.save()
        self.model.eval()

    def save(self) -> None:
        """Write a checkpoint."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(
            self.checkpoint
        )  # atomic: an interrupted save keeps the previous checkpoint


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return logits, computed in bf16.  -> [rows, length, vocab] f32"""
    with torch.autocast("cpu", torch.bfloat16):
        return model(ids, use_cache=False).logits.float()


def train_target(plan: Plan, data: torch.Tensor) -> LlamaForCausalLM:
    """Train the target on the corpus."""
    model = new_model(TARGET_SHAPE, plan.seed)

    def loss_at(step: int) -> torch.Tensor:
        ids = windows(data, plan, step, is_long=step >= LONG_FROM * plan.target_steps)
        return F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    Trainer(model, plan.target_steps, plan.work / "target.pt").run(loss_at, "target")
    return model


@torch.no_grad()
def sample_from_target(
    plan: Plan, target: LlamaForCausalLM, data: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return continuations of corpus prompts by the target, greedy and sampled.  -> [num_rows,
    seq_len + 1] int64
    """
    path = plan.work / "samples.pt"
    target.to(torch.bfloat16).float()  # round to the weights of the package, also in a resumed run
    if path.exists():
        return torch.load(path, weights_only=True)
    prompt_len = 48
    rows_per_call = 128
    target = target.to(torch.bfloat16)
    rows: list[torch.Tensor] = []
    calls = math.ceil(num_tokens / (rows_per_call * plan.seq_len))
    for call in tqdm(range(calls), desc="sampling"):
        torch.manual_seed(plan.seed + call)
        starts = torch.randint(len(data) - prompt_len, (rows_per_call,)).tolist()
        prompts = torch.stack([data[s : s + prompt_len] for s in starts])
        sampling = (
            dict(do_sample=True, temperature=(0.6, 0.8, 1.0)[call % 4 - 1], top_k=0)
            if call % 4
            else dict(do_sample=False)
        )
        rows.append(
            target.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=plan.seq_len + 1 - prompt_len,
                max_new_tokens=plan.seq_len + 1 - prompt_len,
                **sampling,
            )
        )
    samples = torch.cat(rows)
    target.float()
    torch.save(samples, path)
    return samples


def train_draft(plan: Plan, target: LlamaForCausalLM, data: torch.Tensor) -> LlamaForCausalLM:
    """Distil the draft from the target."""
    samples = sample_from_target(plan, target, data, num_tokens=160 * plan.draft_steps)
    draft = new_model(DRAFT_SHAPE, plan.seed + 1)

    def loss_at(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 7_000_003 + step)
        own = samples[torch.randint(len(samples), (plan.batch,), generator=generator)]
        is_long = step >= LONG_FROM * plan.draft_steps
        ids = (own if step % 2 else windows(data, plan, step, is_long))[:, :-1]
        with torch.no_grad():
            teacher = F.log_softmax(logits_of(target, ids), -1)
        student = F.log_softmax(logits_of(draft, ids), -1)
        return F.kl_div(
            student.flatten(0, 1), teacher.flatten(0, 1), log_target=True, reduction="batchmean"
        )

    Trainer(draft, plan.draft_steps, plan.work / "draft.pt").run(loss_at, "draft")
    return draft


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: torch.Tensor, seq_len: int) -> float:
    """Return the mean cross-entropy in nats per token over the held-out modules, in windows of
    ``seq_len``.
    """
    rows = data[: (len(data) - 1) // seq_len * seq_len]
    inputs = rows.view(-1, seq_len)
    labels = data[1 : len(rows) + 1].view(-1, seq_len)
    losses = [
        F.cross_entropy(model(i).logits.flatten(0, 1), label.flatten()).item()
        for i, label in zip(inputs.split(8), labels.split(8), strict=True)
    ]
    return sum(losses) / len(losses)


def held_out_prompts(count: int, seed: int, lines: int = 12) -> Iterator[str]:
    """Yield prompts: runs of ``lines`` whole source lines from the held-out modules."""
    rng = random.Random(seed)
    files = [
        path
        for path in corpus_files(held_out=True)
        if len(read_source(path).splitlines()) > 4 * lines
    ]
    for index in range(count):
        source = read_source(files[index % len(files)]).splitlines(keepends=True)
        start = rng.randrange(lines, len(source) - 2 * lines)
        yield "".join(source[start : start + lines])


def acceptance_lengths(plan: Plan) -> dict[str, float]:
    """Return the mean committed tokens per verify step of the pair on its held-out prompts, in
    fp32.
    """
    shapes = {
        "chain of 4": {"max_depth": 4, "max_width": 1, "token_budget": 5},
        "tree of 12 nodes": {"max_depth": 6, "max_width": 4, "token_budget": 12},
        "tree of 16 nodes": {"max_depth": 6, "max_width": 4, "token_budget": 16},
    }
    target = LlamaForCausalLM.from_pretrained(plan.out / "target", dtype=torch.float32)
    draft = LlamaForCausalLM.from_pretrained(plan.out / "draft", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(plan.out / "tokenizer")
    prompts = json.loads((plan.out / "prompts.json").read_text())[:32]
    lengths = {}
    for name, shape in shapes.items():
        generator = SLOSpecGenerator(
            target, draft, config=SLOSpecConfig(policy="adaserve", **shape)
        )
        for decoding, sampling in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "top_k": 0}),
        ):
            torch.manual_seed(plan.seed)
            steps = tokens = 0
            for prompt in tqdm(prompts, desc=f"{name}, {decoding}"):
                inputs = tokenizer(prompt, return_tensors="pt")
                out = generator.generate(
                    **inputs, **sampling, max_new_tokens=96, return_dict_in_generate=True
                )
                steps = steps + out.slo[0].steps
                tokens = tokens + out.slo[0].tokens - 1
            lengths[f"{name}, {decoding}"] = round(tokens / steps, 3)
    return lengths


CARD = """# The embedded pair

A Llama target ({target[parameters]:,} parameters), a Llama draft ({draft[parameters]:,}) and a byte-level BPE tokenizer
({vocab} tokens), made by `scripts/train_tiny_pair.py` (seed {seed}) so that examples, tests and benchmarks need no
download. They write Python-like text with real, uneven predictability and have no other use.

**Data.** The source of the Python {python} standard library without its tests: {train_tokens:,} tokens. Held out, and
the source of `prompts.json`: {modules} ({held_out_tokens:,} tokens). The draft was distilled on the
target's distribution, half on corpus windows and half on text sampled from the target.

**Licence.** The weights and the tokenizer are under the project's Apache-2.0. The training text and the excerpts in
`prompts.json` are copyright the Python Software Foundation, used under the PSF License Version 2 (`PSF-LICENSE.txt`).

**Loss on the held-out modules** (nats per token, windows of {window} tokens, bf16 weights as in the package): target
{target[held_out_loss]:.3f}, draft {draft[held_out_loss]:.3f}.

**Acceptance length** (committed tokens per verify step, fp32, 32 held-out prompts, 96 new tokens each; nodes count
the root of trees, a chain of 4 is 4 drafted tokens):

| tree | greedy | sampled at temperature 1 |
|---|---|---|
{lengths}
"""


def write_card(plan: Plan, facts: dict[str, Any]) -> None:
    """Write the pair's README."""
    lengths = facts["acceptance_length"]
    names = dict.fromkeys(name.rsplit(", ", 1)[0] for name in lengths)
    rows = [
        f"| {name} | {lengths[f'{name}, greedy']:.2f} | {lengths[f'{name}, sampled']:.2f} |"
        for name in names
    ]
    modules = ", ".join(f"`{module}`" for module in HELD_OUT)
    filled = facts | {
        "vocab": VOCAB_SIZE,
        "modules": modules,
        "window": 4 * plan.seq_len,
        "lengths": "\n".join(rows),
    }
    (plan.out / "README.md").write_text(CARD.format(**filled))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-steps", type=int, default=2800)
    parser.add_argument("--draft-steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--work", type=Path, default=Path("build/tiny_pair"), help="checkpoints; safe to delete"
    )
    parser.add_argument("--out", type=Path, default=Path("hf_slospec/tiny/pair"))
    parser.add_argument(
        "--corpus", type=Path, help="only write the text to this file, for train-drafter --data"
    )
    given = vars(parser.parse_args())
    if (corpus := given.pop("corpus")) is not None:
        corpus.write_text(
            END_OF_TEXT.join(map(read_source, corpus_files(held_out=False))), encoding="utf-8"
        )
        return
    plan = Plan(**given)
    for folder in (plan.work, plan.out):
        folder.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(plan)
    train = encode_corpus(tokenizer, held_out=False, seed=plan.seed)
    test = encode_corpus(tokenizer, held_out=True, seed=plan.seed)
    print(f"{len(train):,} training tokens, {len(test):,} held out")
    target = train_target(plan, train)
    draft = train_draft(plan, target, train)

    facts = {
        "seed": plan.seed,
        "python": platform.python_version(),
        "train_tokens": len(train),
        "held_out_tokens": len(test),
        "held_out_modules": HELD_OUT,
    }
    for name, model in (("target", target), ("draft", draft)):
        model = model.to(
            torch.bfloat16
        )  # the package has bf16 weights, and the facts describe these
        model.save_pretrained(plan.out / name)
        facts[name] = {
            "parameters": model.num_parameters(),
            "held_out_loss": round(held_out_loss(model.float(), test, 4 * plan.seq_len), 4),
        }
    prompts = list(held_out_prompts(64, plan.seed))
    (plan.out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    facts["acceptance_length"] = acceptance_lengths(plan)
    (plan.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    write_card(plan, facts)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
