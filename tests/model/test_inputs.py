"""Forwards of models whose layers keep no state read tensors only, made before them."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_slospec.model.batch import PlannedBatch
from hf_slospec.model.inputs import ForwardInputs
from tests.support.graph_bench import Bench
from tests.support.toys.tiny_configs import tiny_config

# Attention by the interface, with latent K and V, with chunks by position, and by the layers' own
# code.
FAMILIES = ["Llama", "Gemma2", "DeepseekV3", "Llama4", "Bloom"]


@pytest.mark.parametrize("attention", ["sdpa", "4d_mask"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_forward_of_tensors_gives_the_same_bits(family, attention):
    model_class = getattr(transformers, f"{family}ForCausalLM")
    bench = Bench(
        model_class(tiny_config(model_class.config_class)).eval(),
        attention=attention,
        prepack=False,
    )
    packed = bench.packed
    parts = bench.parts()
    pool = bench.sequences.cache.pool
    rows = torch.arange(sum(len(part.input_ids) for part in parts))
    # PlannedBatch makes no plans, so find_plans found all that the layers request.
    plans = packed.eager.find_plans()
    tensors = ForwardInputs(pool, parts, rows).tensors(plans)
    outputs = packed.eager.compute(pool, PlannedBatch(tensors.plans), tensors)
    assert torch.equal(outputs.logits, packed.forward(pool, parts, rows))
