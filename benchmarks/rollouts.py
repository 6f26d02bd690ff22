"""Tokens per step of rollouts by epoch, drafted from past answers to the same prompts.

    python benchmarks/rollouts.py --drafter suffix                        # the embedded target, or --target FOLDER

Every epoch samples new completions of the same prompts; the weights stay. Counts do not depend on
the machine."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_slospec import (
    PastAnswers,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_drafter,
    load_tiny_pair,
    tiny_prompts,
)

QUESTIONS = (
    "A farmer has 17 sheep and buys 5 more, then sells 8. How many are left? Show your reasoning.",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether? Think step "
    "by step.",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model with a chat template")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if given.target is None:
        model, _, tokenizer = load_tiny_pair()
        prompts: list[Any] = [
            tokenizer(text[:200], return_tensors="pt") for text in tiny_prompts()[:2]
        ]
    else:
        loaded: Any = AutoModelForCausalLM
        model = loaded.from_pretrained(given.target, dtype=torch.bfloat16).requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(given.target)
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        options: dict[str, Any] = dict(
            add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    past = PastAnswers(max_per_prompt=given.epochs * given.completions)
    config = SLOSpecConfig(policy="fixed", max_depth=4, max_width=3)
    generator = SLOSpecGenerator(
        model,
        drafter=load_drafter(given.drafter, model, tokenizer=tokenizer, share_texts=past),
        config=config,
    )
    for epoch in range(given.epochs):
        rows = list[Any]()
        for index, prompt in enumerate(prompts):
            torch.manual_seed(1000 * epoch + index)
            rows += generator.generate(
                **prompt, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=given.completions,
                max_new_tokens=given.tokens, return_dict_in_generate=True,
            ).slo  # fmt: skip
        print(
            f"epoch {epoch + 1}: {sum(row.tokens - 1 for row in rows) / sum(row.steps for row in rows):.2f}"
        )


if __name__ == "__main__":
    main()
