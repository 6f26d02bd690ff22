"""Worker of stock ``generate``, assisted generation and hf_slospec, in one dtype."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from protocol import NewTokens, Request, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance


def restrict_fbgemm() -> None:
    """Restrict FBGEMM's kernels, which obey no environment variable, to AVX2 (the first of its instruction sets)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library._ZN6fbgemm14fbgemmForceIsaENS_10inst_set_tE(1)


def main() -> None:
    folder, threads, isa, short = sys.argv[1:]
    if isa == "avx2":
        restrict_fbgemm()
    models, dtype = Path(folder) / "models", {"fp32": torch.float32, "bf16": torch.bfloat16}[short]
    torch.set_num_threads(int(threads))
    load: Any = AutoModelForCausalLM.from_pretrained
    target, draft = (load(models / f"{name}-{short}", dtype=dtype) for name in ("target", "draft"))
    for model in (target, draft):
        model.generation_config.eos_token_id = None  # every row gets its full length
    tokenizer = AutoTokenizer.from_pretrained(models / f"target-{short}")
    ours = {
        "hf_slospec": SLOSpecGenerator(target, draft, tokenizer),
        "hf_slospec, no drafts": SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(policy="none")),
    }
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    stock = {name: getattr(draft.generation_config, name) for name in (*constant, "num_assistant_tokens")}

    def generate(request: Request) -> NewTokens:
        ids = torch.tensor(request["ids"])  # [batch, prompt_len] int64
        options = {"do_sample": False, "max_new_tokens": request["new_tokens"], "attention_mask": torch.ones_like(ids)}
        if request["method"] in ours:
            sequences = ours[request["method"]].generate(input_ids=ids, **options)
        elif request["method"] == "assisted":
            tokens = request.get("assistant_tokens")  # None: transformers' defaults
            draft.generation_config.update(**(constant | {"num_assistant_tokens": tokens} if tokens else stock))
            sequences = target.generate(input_ids=ids, assistant_model=draft, **options)
        else:
            sequences = target.generate(input_ids=ids, **options)
        tokens: NewTokens = sequences[:, ids.shape[1] :].tolist()
        return tokens

    # The first call prepacks the weights, if memory is free: before the other workers take it.
    generate({"method": "hf_slospec", "ids": [[1, 2, 3]], "new_tokens": 8})
    serve(generate, provenance=provenance())


if __name__ == "__main__":
    main()
