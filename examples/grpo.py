"""TRL's GRPO with LoRA, its rollouts speculated: the same completions as with stock ``generate``,
in fewer steps.

    pip install trl peft datasets arctic-inference
    python examples/grpo.py [EPOCHS]

Each epoch draws new completions of the same prompts, and the suffix drafter looks into those of
earlier epochs. Runs on the embedded target; nothing is downloaded. The reward is a toy.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from hf_slospec import RolloutCallback, load_tiny_pair

PROMPTS = ["def main():\n", "import os\n", "class Stack:\n", "for line in lines:\n"]


def distinct(completions: list[str], **_: Any) -> list[float]:
    """Return the rewards: the number of different characters."""
    return [float(len(set(completion))) for completion in completions]


def main(epochs: int = 3, new_tokens: int = 48) -> None:
    model, _, tokenizer = load_tiny_pair()
    callback = RolloutCallback("suffix")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, num_train_epochs=epochs, per_device_train_batch_size=8, num_generations=8,
            max_completion_length=new_tokens, learning_rate=1e-5, seed=0, use_cpu=True, bf16=False, report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model.float(), distinct, config, Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0), callbacks=[callback],
        )  # fmt: skip
        trainer.train()
    for epoch, length in enumerate(callback.tokens_per_step, 1):
        print(f"epoch {epoch}: {length:.2f} tokens per step and row")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
