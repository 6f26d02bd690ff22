"""Worker of vLLM on a CPU: one engine, in one dtype, with or without the draft."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._inductor.config
from protocol import NewTokens, Request, serve


def main() -> None:
    folder, threads, isa, short, draft_tokens = sys.argv[1:]
    os.environ |= {
        "VLLM_CACHE_ROOT": f"{folder}/vllm-cache",  # compiled kernels, for the next start
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if isa == "avx2":  # vLLM chooses among its libraries and kernels by these functions; no variable restricts them
        for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16", "vnni"):
            setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
        torch._inductor.config.cpp.simdlen = 256
    import vllm

    torch.set_num_threads(int(threads))
    speculative = {
        "method": "draft_model",
        "model": f"{folder}/models/draft-{short}",
        "num_speculative_tokens": int(draft_tokens),
    }
    llm = vllm.LLM(
        model=f"{folder}/models/target-{short}",
        dtype={"fp32": "float32", "bf16": "bfloat16"}[short],
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **({"speculative_config": speculative} if speculative["num_speculative_tokens"] else {}),
    )

    def generate(request: Request) -> NewTokens:
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        parameters = vllm.SamplingParams(max_tokens=request["new_tokens"], **options)
        prompts = [{"prompt_token_ids": ids} for ids in request["ids"]]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, parameters, use_tqdm=False)]

    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split("/")[-1] for line in maps if "/vllm/_C" in line}
    serve(
        generate,
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        kernels=sorted(libraries),
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
