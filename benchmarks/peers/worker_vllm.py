"""Worker of vLLM on a CPU: one engine, in one dtype, alone or with one way of drafting."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch._inductor.config
from protocol import NewTokens, Request, Settings, serve


def main() -> None:
    settings, (short, mode) = Settings.read()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if (
        settings.isa == "avx2"
    ):  # vLLM chooses its libraries and kernels by these functions; no variable restricts them
        for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16", "vnni"):
            setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
        torch._inductor.config.cpp.simdlen = 256
    import vllm

    torch.set_num_threads(settings.threads)
    method, _, num_tokens = mode.partition(":")
    speculative = {"method": method} | (
        {"num_speculative_tokens": int(num_tokens)} if num_tokens else {}
    )
    if method == "draft_model":
        speculative["model"] = f"{settings.models}/draft-{short}"
    elif method == "ngram":
        speculative |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = vllm.LLM(
        model=f"{settings.models}/target-{short}",
        dtype={"fp32": "float32", "bf16": "bfloat16"}[short],
        max_model_len=settings.context,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **({} if method == "none" else {"speculative_config": speculative}),
    )

    def generate(request: Request) -> NewTokens:
        options = {
            "temperature": 0.0,
            "ignore_eos": True,
            "stop_token_ids": settings.ends,
            "detokenize": False,
        }
        parameters = vllm.SamplingParams(max_tokens=request["new_tokens"], **options)
        prompts = [{"prompt_token_ids": ids} for ids in request["ids"]]
        return [
            list(output.outputs[0].token_ids)
            for output in llm.generate(prompts, parameters, use_tqdm=False)
        ]

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
