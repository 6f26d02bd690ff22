"""Models from the Hub or from folders: a chat answered under a TPOT SLO, compared with plain
``generate``.

    python examples/hub_models.py                                    # Qwen3 8B with Qwen3 0.6B; about 18 GB in bf16
    python examples/hub_models.py --target Qwen/Qwen3-1.7B --slo-tpot 0.1
    python examples/hub_models.py --target ./my-model --assistant ./my-draft --prompt "def main():" --prompt "import "
    torchrun --nproc-per-node 2 examples/hub_models.py               # the target split over two
    GPUs

Target and draft must have the same tokenizer. Several prompts make a batch. In bf16 a text may
differ from plain ``generate`` after a near-tie of two tokens (docs/generate.md); in fp32 it does
not."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers.distributed import DistributedConfig

from hf_slospec import SLOSpecGenerator

PROMPTS = [
    "Write a Python function that merges two sorted lists. Answer with code only.",
    "In two sentences: why is the sky blue?",
]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="Qwen/Qwen3-8B", help="a model of the Hub, or a folder")
    parser.add_argument("--assistant", default="Qwen/Qwen3-0.6B", help="its draft model")
    parser.add_argument("--prompt", action="append", help="repeatable")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="TPOT SLO in seconds")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float32, ...")
    parser.add_argument("--device-map", default="auto", help="auto, cpu, cuda, ...")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun, as RANK is
    place = {"device_map": options.device_map}
    if num_processes > 1:
        place = {"distributed_config": DistributedConfig(tp_size=num_processes)}
    gen = SLOSpecGenerator.from_pretrained(
        options.target, options.assistant, dtype=options.dtype, **place
    )
    tokenizer = gen.tokenizer
    prompts = options.prompt or PROMPTS
    is_chat = tokenizer.chat_template is not None
    texts = prompts
    if is_chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    padded = dict(
        return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    # Chat templates add special tokens themselves.
    batch = tokenizer(texts, add_special_tokens=not is_chat, **padded).to(gen.model.device)
    decoding = dict(max_new_tokens=options.new_tokens, do_sample=False)

    # Warm-ups; the second measures step times, once per machine.
    gen.model.generate(**batch, max_new_tokens=2)
    gen.generate(**batch, max_new_tokens=2)
    begun_s = time.perf_counter()
    plain = gen.model.generate(**batch, **decoding)
    plain_s = time.perf_counter() - begun_s
    out = gen.generate(**batch, **decoding, slo_tpot=options.slo_tpot, return_dict_in_generate=True)
    ours_s = time.perf_counter() - begun_s - plain_s

    if int(os.environ.get("RANK", 0)):  # all processes have the same outputs
        return
    prompt_len = batch["input_ids"].shape[1]
    table = Table("prompt", "TPOT", "SLO", "met", "tokens/step", "same tokens")
    for prompt, row, plain_row, own in zip(prompts, out.sequences, plain, out.slo, strict=True):
        print(
            f"--- {prompt.strip()}\n{tokenizer.decode(row[prompt_len:], skip_special_tokens=True).strip()}"
        )
        length = "" if own.acceptance_length is None else f"{own.acceptance_length:.2f}"
        tpot = "" if own.tpot_s is None else f"{1e3 * own.tpot_s:.1f} ms"
        min_len = min(len(row), len(plain_row))
        same = torch.equal(row[:min_len], plain_row[:min_len])
        verdicts = "yes" if own.attained else "no", length, "yes" if same else "no"
        table.add_row(
            prompt.strip().splitlines()[0][:24], tpot, f"{1e3 * options.slo_tpot:.1f} ms", *verdicts
        )
    Console(width=120).print(table)  # complete in a narrow terminal, too
    print(f"{options.target} with {options.assistant}: {plain_s / ours_s:.2f}x plain generate")


if __name__ == "__main__":
    main()
