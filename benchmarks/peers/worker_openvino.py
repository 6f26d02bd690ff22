"""Worker of OpenVINO GenAI: the target alone and with the draft, with weights of one precision."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from protocol import NewTokens, Request, serve


def main() -> None:
    folder, threads, _, short = sys.argv[1:]
    models = Path(folder) / "models"
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    # Without instructions for bf16, bf16 weights are computed in fp32.
    precision = "bf16" if short == "bf16" and "BF16" in capabilities else "f32"
    options = {
        "INFERENCE_NUM_THREADS": int(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # the default is 8 bits
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 16, False  # cache in GB
    scheduler.max_num_batched_tokens = 1024  # the prompts of a batch at once: drafting is wrong after split ones
    drafted = options | {"draft_model": genai.draft_model(models / f"ov-draft-{short}", "CPU", **options)}
    pipelines = [
        genai.ContinuousBatchingPipeline(models / f"ov-target-{short}", scheduler, "CPU", own)
        for own in (options, drafted)
    ]

    def generate(request: Request) -> NewTokens:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = request["new_tokens"], False, True
        draft_tokens = request.get("draft_tokens", 0)
        if draft_tokens:
            config.num_assistant_tokens = draft_tokens
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in request["ids"]]
        results = pipelines[bool(draft_tokens)].generate(prompts, [config] * len(prompts))
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    serve(
        generate,
        versions={"openvino": openvino.__version__, "openvino_genai": genai.__version__},
        capabilities=capabilities,
        computes_in=precision,
    )


if __name__ == "__main__":
    main()
