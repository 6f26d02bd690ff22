"""GRPO of TRL with rollouts by this package, each beside the same rollout by stock ``generate``.

    pip install hf_slospec trl==1.16.0 peft datasets
    python benchmarks/clients/run_trl.py WORK --json trl.json              # the embedded target, or --model FOLDER

Both sample from the same weights with the same seeds, in turns, and the trainer goes on with the
completions of this package. They are equal in fp32; in bf16, near-ties may be decided differently.
No packed copy may differ from a new one (``stale``). The first rollout, in which forwards are
compiled and costs measured, is left out of the speed-ups.

With ``--batches``, both sample with ``generate_batch``, stock's with another order of noise, and the
trainer takes old log probabilities from verification; ``skipped`` counts the forwards saved."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_slospec
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cpu.packed_weights import PackedWeight

WAYS = {  # dtype of the weights, and settings of the trainer
    "fp32, adamw_torch_fused": (torch.float32, {"optim": "adamw_torch_fused", "bf16": False}),
    "bf16 weights, adamw_torch_fused": (
        torch.bfloat16,
        {"optim": "adamw_torch_fused", "bf16": False},
    ),
    "bf16 weights, adamw_torch": (torch.bfloat16, {"optim": "adamw_torch", "bf16": False}),
    "fp32 weights, autocast in bf16": (torch.float32, {"optim": "adamw_torch_fused", "bf16": True}),
}
QUESTIONS = Path(__file__).parents[1] / "data" / "spec_bench.jsonl"
PROMPTS = ["def main():\n", "import os\n", "class Stack:\n", "for line in lines:\n"]


def num_stale(decoder: Any) -> int:
    """Return how many packed copies differ from new ones."""
    overrides = decoder.speculator.target.packed.overrides
    copies = [one for layer in overrides.layers.values() for one in layer.copies]
    new = [PackedWeight(one.layer, one.name, one.autocast) for one in copies]
    return sum(not torch.equal(values(a), values(b)) for a, b in zip(copies, new, strict=True))


def values(packed: PackedWeight) -> torch.Tensor:
    """Return the products of the identity with a packed weight.  -> [num_experts * inputs, outputs]"""
    identity = torch.eye(packed.weight.shape[-1], dtype=packed.autocast or packed.weight.dtype)
    return torch.cat([matrix(identity, None) for matrix in packed.matrices])


def train(
    folder: str, dtype: torch.dtype, settings: dict[str, Any], options: Any
) -> list[dict[str, Any]]:
    """Return the seconds, completions and stale copies of every rollout."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    past = hf_slospec.PastAnswers(max_per_prompt=2 * options.completions)
    drafter = hf_slospec.load_drafter(options.drafter, model, tokenizer=tokenizer, share_texts=past)
    hf_slospec.enable(model, drafter=drafter, config=options.config, always=True)
    method = "generate_batch" if options.batches else "generate"
    twin = copy.deepcopy(model)  # stock generate_batch calls other methods that enable() replaces
    hf_slospec.disable(twin)
    ways = {"stock": getattr(twin, method), "ours": getattr(model, method)}
    rollouts = list[Any]()
    decoder = model.generate.decoder  # type: ignore[attr-defined]

    def both(*arguments: Any, **given: Any) -> Any:
        state = torch.get_rng_state()
        twin.to(model.dtype).load_state_dict(model.state_dict())
        found = dict[str, Any]()
        seconds = dict[str, float]()
        for name in sorted(ways, reverse=bool(len(rollouts) % 2)):
            torch.set_rng_state(state)
            begun_s = time.perf_counter()
            found[name] = ways[name](*arguments, **given)
            seconds[name] = time.perf_counter() - begun_s
        stock, ours = (new_tokens(found[name], given) for name in ("stock", "ours"))
        equal_rows = sum(own == other for own, other in zip(stock, ours, strict=True))
        rollouts.append(
            {
                "seconds": seconds,
                "rows": len(ours),
                "new_tokens": {"stock": sum(map(len, stock)), "ours": sum(map(len, ours))},
                "equal_rows": equal_rows,
                "stale": num_stale(decoder),
                "tokens_per_step": decoder.done.tokens_per_step,
            }
        )
        decoder.done = type(decoder.done)()
        return found["ours"]

    setattr(model, method, both)
    config = GRPOConfig(
        output_dir=str(options.folder / "trl"), num_train_epochs=options.epochs, learning_rate=options.lr,
        per_device_train_batch_size=options.completions, num_generations=options.completions,
        max_completion_length=options.tokens, seed=0, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, num_iterations=1 + options.batches,
        use_transformers_continuous_batching=options.batches,
        # Stock's K/V takes most of the memory otherwise, which makes it slow on a CPU.
        transformers_continuous_batching_config={"num_blocks": 64, "page_size": 256}, **settings,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in options.prompts])
    trainer = GRPOTrainer(model, lambda completions, **_: [float(len(set(str(c)))) for c in completions], config, data,
                          processing_class=tokenizer)  # fmt: skip
    reused = hf_slospec.reuse_logprobs(trainer) if options.batches else None
    trainer.train()
    if reused is not None:
        rollouts[-1]["skipped"] = reused.num_skipped
    return rollouts


def new_tokens(output: Any, given: dict[str, Any]) -> list[list[int]]:
    """Return the new tokens of each row that ``generate`` or ``generate_batch`` returned."""
    if isinstance(output, dict):
        return [one.generated_tokens for one in output.values()]
    rows: list[list[int]] = output[:, given["input_ids"].shape[1] :].tolist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--model", type=str, help="a model with a chat template, for questions of Spec-Bench"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--config", type=hf_slospec.SLOSpecConfig.model_validate_json, default="{}")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--batches", action="store_true", help="sample with generate_batch")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    model = options.model or str(options.folder / "target")
    prompts = list[Any](PROMPTS)
    if options.model is None:
        target, _, tokenizer = hf_slospec.load_tiny_pair()
        target.save_pretrained(model)
        tokenizer.save_pretrained(model)
    else:
        questions = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
        maths = [
            question["turns"][0]
            for question in questions
            if question["category"] == "math_reasoning"
        ]
        prompts = [[{"role": "user", "content": text}] for text in maths]
    options.prompts = prompts[: options.prompts]
    results = []
    for way in options.ways:
        rollouts = train(model, *WAYS[way], options)
        speeds = [
            {name: one["new_tokens"][name] / one["seconds"][name] for name in one["seconds"]}
            for one in rollouts
        ]
        ratios = [one["ours"] / one["stock"] for one in speeds]
        ends = range(len(options.prompts), len(ratios) + 1, len(options.prompts))
        epochs = [
            statistics.median(ratios[max(end - len(options.prompts), 1) : end]) for end in ends
        ]
        total = {
            name: sum(one[name] for one in rollouts) for name in ("rows", "equal_rows", "stale")
        }
        results.append({"way": way, "speedups by epoch": epochs, **total, "rollouts": rollouts})
        print(way, {**results[-1], "rollouts": len(rollouts)}, flush=True)
        if options.json is not None:
            facts = provenance(
                model=Path(model).name, drafter=options.drafter, epochs=options.epochs, prompts=len(options.prompts),
                completions=options.completions, tokens=options.tokens, batches=options.batches,
            )  # fmt: skip
            content = {"provenance": facts, "results": results}
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
