"""Worker of OpenVINO GenAI: one pipeline with weights of one type, alone or with one way of
drafting.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai
from protocol import NewTokens, Request, Settings, serve


def main() -> None:
    settings, (kind, mode) = Settings.read()
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    # Without instructions for bf16, bf16 weights are computed in fp32.
    precision = "bf16" if kind != "fp32" and "BF16" in capabilities else "f32"
    options = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # the default is 8 bits
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = (
        1,
        16,
        False,
    )  # cache in GB
    # The prompts of a batch at once: drafting is wrong after split ones.
    scheduler.max_num_batched_tokens = 8 * settings.context
    drafting = {
        "none": lambda: {},
        "prompt_lookup": lambda: {"prompt_lookup": True},
        "draft": lambda: {
            "draft_model": genai.draft_model(settings.models / f"ov-draft-{kind}", "CPU", **options)
        },
        "eagle3": lambda: {
            "draft_model": genai.draft_model(settings.models / "ov-head", "CPU", **options)
        },
    }
    model = settings.models / f"ov-target-{kind}"
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options | drafting[mode]())

    def generate(request: Request) -> NewTokens:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["new_tokens"]
        config.do_sample = False
        config.ignore_eos = not settings.ends
        config.stop_token_ids = set(settings.ends)
        for name in ("num_assistant_tokens", "max_ngram_size"):
            if name in request:
                setattr(config, name, request[name])
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in request["ids"]]
        results = pipeline.generate(prompts, [config] * len(prompts))
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    serve(
        generate,
        versions={"openvino": openvino.__version__, "openvino_genai": genai.__version__},
        capabilities=capabilities,
        computes_in=precision,
    )


if __name__ == "__main__":
    main()
