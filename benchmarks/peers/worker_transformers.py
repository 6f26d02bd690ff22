"""Worker of stock ``generate``, assisted generation, prompt lookup and hf_slospec, in one dtype; for
hf_slospec also with weights of a GGUF file, or quantised by it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from protocol import NewTokens, Request, Settings, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.spec_bench import Contest
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance

HEAD = "head"  # the drafter of this name is the exported EAGLE-3 head


def restrict_fbgemm() -> None:
    """Restrict FBGEMM's kernels, which obey no environment variable, to AVX2 (the first of its
    instruction sets).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library._ZN6fbgemm14fbgemmForceIsaENS_10inst_set_tE(1)


def quantised(target: Any, models: Path, weights: str) -> Any:
    """Return the target with weights in "int8" or "int4", or with those of a GGUF file."""
    if weights not in ("int8", "int4"):
        name = f"target-{weights}.gguf"
        load: Any = AutoModelForCausalLM.from_pretrained
        target = load(models, gguf_file=name, dtype=target.dtype)
        weights = str(models / name)
    SLOSpecGenerator(
        target, drafter="lookup", config=SLOSpecConfig(weights=weights, compile=False)
    )  # packs the weights in place
    return target


def main() -> None:
    settings, (short, *weights) = Settings.read()
    if settings.isa == "avx2":
        restrict_fbgemm()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[short]
    torch.set_num_threads(settings.threads)
    load: Any = AutoModelForCausalLM.from_pretrained
    folders = [settings.models / f"{name}-{short}" for name in ("target", "draft")]
    target, draft = (load(folder, dtype=dtype) if folder.exists() else None for folder in folders)
    if weights:
        target = quantised(target, settings.models, *weights)
    for model in filter(None, (target, draft)):
        model.generation_config.eos_token_id = settings.ends or None
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ours = functools.cache(Contest(target, draft, tokenizer, 0, 0.0, settings.context).generator)
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    stock = draft and {
        name: getattr(draft.generation_config, name) for name in (*constant, "num_assistant_tokens")
    }

    def generate(request: Request) -> NewTokens:
        inputs = tokenizer.pad(
            {"input_ids": request["ids"]}, padding_side="left", return_tensors="pt"
        )
        options = {**inputs, "do_sample": False, "max_new_tokens": request["new_tokens"]}
        if "drafter" in request:
            drafter = request["drafter"]
            drafter = str(settings.models / HEAD) if drafter == HEAD else drafter
            sequences = ours(drafter).generate(**options)
        elif "assistant_tokens" in request:
            tokens = request["assistant_tokens"]  # None: transformers' defaults
            draft.generation_config.update(
                **(constant | {"num_assistant_tokens": tokens} if tokens else stock)
            )
            sequences = target.generate(**options, assistant_model=draft)
        else:
            sequences = target.generate(
                **options, prompt_lookup_num_tokens=request.get("prompt_lookup_num_tokens")
            )
        tokens: NewTokens = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    # The first call prepacks the weights, if memory is free: before the other workers take it.
    if draft is not None or short == "bf16":
        generate({"drafter": "none", "ids": [[1, 2, 3]], "new_tokens": 8})
    serve(generate, provenance=provenance())


if __name__ == "__main__":
    main()
