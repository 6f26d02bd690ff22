"""GRPO of TRL with rollouts by this package against the same training with stock ``generate``.

    pip install hf_slospec trl==1.16.0 peft datasets
    python benchmarks/clients/run_trl.py WORK --json trl.json              # the embedded target, or --model FOLDER

Every way trains twice from the same weights with the same seeds. A rollout's completions are equal where the seeds and
the weights are; in bf16, near-ties may be decided differently. No packed copy may differ from a new one (``stale``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_slospec
from hf_slospec.models.linear.packed_weight import PackedWeight

WAYS = {  # dtype of the weights, and settings of the trainer
    "fp32, adamw_torch_fused": (torch.float32, {"optim": "adamw_torch_fused", "bf16": False}),
    "bf16 weights, adamw_torch_fused": (torch.bfloat16, {"optim": "adamw_torch_fused", "bf16": False}),
    "bf16 weights, adamw_torch": (torch.bfloat16, {"optim": "adamw_torch", "bf16": False}),
    "fp32 weights, autocast in bf16": (torch.float32, {"optim": "adamw_torch_fused", "bf16": True}),
}
PROMPTS = ["def main():\n", "import os\n", "class Stack:\n", "for line in lines:\n"]


def num_stale(decoder: Any) -> int:
    """Return how many packed copies differ from new ones."""
    copies = decoder.speculator.target.packed.prepacked._copies
    new = [PackedWeight(layer, name, one.autocast) for (layer, name), one in copies.items()]
    return sum(not torch.equal(a._unpacked(), b._unpacked()) for a, b in zip(copies.values(), new, strict=True))


def train(folder: str, dtype: torch.dtype, settings: dict[str, Any], is_ours: bool, options: Any) -> dict[str, Any]:
    """Return every rollout's completions, and the stale copies in it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if is_ours:
        hf_slospec.enable(model, always=True)
    rollouts, stale, generate = list[Any](), list[int](), model.generate

    def watched(*arguments: Any, **given: Any) -> Any:
        found = generate(*arguments, **given)
        rollouts.append(found[:, given["input_ids"].shape[1] :].tolist())
        if is_ours:
            stale.append(num_stale(generate.decoder))
        return found

    model.generate = watched
    config = GRPOConfig(
        output_dir=str(options.folder / "trl"), max_steps=options.rollouts, learning_rate=options.lr,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=options.tokens, seed=0, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS * options.rollouts})
    trainer = GRPOTrainer(model, lambda completions, **_: [float(len(set(c))) for c in completions], config, data,
                          processing_class=tokenizer)  # fmt: skip
    trainer.train()
    return {"rollouts": rollouts, "stale": stale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=str)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    options = parser.parse_args()
    model = options.model or str(options.folder / "target")
    if options.model is None:
        target, _, tokenizer = hf_slospec.load_tiny_pair()
        target.save_pretrained(model)
        tokenizer.save_pretrained(model)
    result = {}
    for way in options.ways:
        stock, ours = (train(model, *WAYS[way], is_ours, options) for is_ours in (False, True))
        pairs = list(zip(stock["rollouts"], ours["rollouts"], strict=True))
        rows = [a == b for own, other in pairs for a, b in zip(own, other, strict=True)]
        result[way] = {
            "rollouts": len(pairs),
            "equal_rollouts": sum(a == b for a, b in pairs),
            "rows": len(rows),
            "equal_rows": sum(rows),
            "stale": ours["stale"],
        }
        print(way, result[way], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
