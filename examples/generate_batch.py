"""Transformers' ``generate_batch`` and its manager with an enabled model: the same tokens as
``generate``, in fewer steps, with SLOs per request.

    python examples/generate_batch.py

Runs on the embedded target; nothing is downloaded.
"""

from __future__ import annotations

from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_slospec

TEXTS = ["def main():\n", "import os\n", "class Stack:\n", "for line in lines:\n", "try:\n"]


def main(new_tokens: int = 48) -> None:
    model, draft, tokenizer = hf_slospec.load_tiny_pair()
    model.float()
    draft.float()
    prompts = tokenizer(TEXTS)["input_ids"]
    hf_slospec.enable(model, draft)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    batching = ContinuousBatchingConfig(max_requests_per_batch=4, return_logprobs=True)

    # One call for many prompts of different lengths.
    outputs = model.generate_batch(prompts, config, batching)
    for output in outputs.values():
        first = tokenizer.decode(output.generated_tokens).splitlines()[:1]
        mean = sum(output.logprobs) / len(output.logprobs)
        print(f"{output.request_id}: {first}, mean log probability {mean:.2f}")

    # A manager: requests come and go, each with its own settings.
    with model.continuous_batching_context_manager(config) as manager:
        urgent = manager.add_request(prompts[0], streaming=True, slo_tpot=0.2, priority=-1)
        manager.add_requests(prompts[1:], slo_tpot=[0.2, 0.2, None, None])
        parts = list(manager.request_id_iter(urgent))
        print(f"{urgent} came in {len(parts)} parts: {len(parts[-1].generated_tokens)} tokens")
        done = [manager.get_result() for _ in prompts[1:]]
        print(f"{len(done)} others are done, too")
    print(f"{hf_slospec.status(model).done.tokens_per_step:.2f} tokens per step and request")


if __name__ == "__main__":
    main()
