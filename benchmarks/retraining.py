"""Accepted drafts while a target is trained: its head as it was, and retrained on the rollouts.

    python -m benchmarks.retraining --json FILE

The embedded target, in fp32, is trained by policy gradient (a toy reward: different tokens per
completion) on its own completions of code. Every epoch samples the same completions twice: with the
embedded EAGLE-3 head, and with a copy of it that ``HeadRetrainer`` trains after every epoch. Chains
of four tokens are drafted in every step, so that counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

import hf_slospec
from hf_slospec.cli.benchmark import provenance
from hf_slospec.generate.call import Done
from hf_slospec.generate.enable import decoder_of

CONFIG = hf_slospec.SLOSpecConfig(policy="fixed", max_depth=4, max_width=1, compile=False)
Rows = list[tuple[list[int], list[int]]]  # prompts and completions


def sampled(model: Any, prompts: list[list[int]], tokens: int, seed: int) -> tuple[Rows, Done]:
    """Return completions at temperature 1, and what was drafted for them."""
    decoder = decoder_of(model)
    assert decoder is not None, "enabled"
    decoder.done = Done()
    torch.manual_seed(seed)
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0)
    outputs = model.generate_batch(prompts, config).values()
    return [(one.prompt_ids, one.generated_tokens) for one in outputs], decoder.done


def improve(model: Any, optimizer: torch.optim.Optimizer, rows: Rows, batch: int) -> float:
    """Take policy gradient steps on the completions; return their mean reward."""
    rewards = torch.tensor([float(len(set(completion))) for _, completion in rows])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    order = torch.randperm(len(rows)).split(batch)
    for indices in order:
        texts = [torch.tensor([*rows[i][0], *rows[i][1]]) for i in indices]
        ids = pad_sequence(texts, batch_first=True)
        counts = pad_sequence(
            [torch.arange(1, len(text)) >= len(rows[i][0]) for i, text in zip(indices, texts, strict=True)],
            batch_first=True,
        )  # fmt: skip
        logprobs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(taken * counts * advantages[indices, None]).sum() / counts.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return rewards.mean().item()


def enabled() -> tuple[Any, Any]:
    """Return the embedded target, which drafts with its head, and the tokenizer."""
    model, _, tokenizer = map(copy.deepcopy, hf_slospec.load_tiny_pair())
    model = model.float()
    head = hf_slospec.load_tiny_drafter("eagle3", model)
    hf_slospec.enable(model, drafter=head, config=CONFIG, always=True)
    return model, tokenizer


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per epoch."""
    torch.manual_seed(options.seed)
    model, tokenizer = enabled()
    other, _ = enabled()  # whose head stays
    retrainer = hf_slospec.HeadRetrainer(
        every=options.prompts * options.completions, rate=options.rate
    )
    retrainer.attach(model)
    texts = [text[:60] for text in hf_slospec.tiny_prompts()[: options.prompts]]
    prompts = [ids for ids in tokenizer(texts)["input_ids"] for _ in range(options.completions)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    rows = list[dict[str, Any]]()
    for epoch in range(1, options.epochs + 1):
        other.load_state_dict(model.state_dict())
        seed = 1000 * options.seed + epoch
        completions, retrained = sampled(model, prompts, options.tokens, seed)
        same, kept = sampled(other, prompts, options.tokens, seed)
        assert completions == same, "drafts change no completion"
        model.train()
        reward = improve(model, optimizer, completions, options.batch)
        model.eval()
        begun_s = time.perf_counter()
        loss = retrainer.train()
        rows.append({
            "epoch": epoch, "reward": reward, "kept": kept.tokens_per_step, "retrained": retrained.tokens_per_step,
            "loss": loss, "training_s": time.perf_counter() - begun_s,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--batch", type=int, default=16, help="completions per optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3, help="the target's learning rate")
    parser.add_argument("--rate", type=float, default=0.3, help="see HeadRetrainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    content = {"provenance": provenance(**settings), "epochs": measure(options)}
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
