"""How many kernels a layer of a packed forward launches."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_slospec.cuda import few_rows
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda.flash_kernels import TorchVarlen
from tests.support.cuda_tests import on_cuda
from tests.support.graph_bench import Bench
from tests.support.stand_ins.device_ops import device_operations
from tests.support.toys.tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.usefixtures("device"),
]


def launches_per_layer(family, attention, fused_layers):
    """Operations of one more layer in a forward that is not replayed, as graphs capture it."""
    counts = []
    for num_layers in (2, 4):
        config = copy.deepcopy(tiny_model(family).config)
        config.num_hidden_layers = num_layers
        config.layer_types = ["full_attention"] * num_layers
        model = on_cuda(AutoModelForCausalLM.from_config(config).eval(), torch.bfloat16)
        bench = Bench(model, attention=attention, fused_layers=fused_layers, cuda_graphs=False)
        bench.verify()
        with device_operations() as names:
            bench.verify()
        counts.append(Counter(names))
    few, many = counts
    return Counter({name: (number - few[name]) // 2 for name, number in many.items()})


def test_launches_per_layer(monkeypatch):
    """The table in docs/design.md."""
    monkeypatch.setattr(kernel_choice, "KERNELS", (TorchVarlen,))
    totals = [
        launches_per_layer(family, attention, fused_layers).total()
        for family, attention, fused_layers in (
            ("llama", "flash", False),
            ("llama", "triton", False),
            ("llama", "triton", True),
            ("qwen3", "triton", True),
        )
    ]
    monkeypatch.setattr(few_rows, "is_faster", lambda *_: True)
    totals.append(launches_per_layer("llama", "triton", True).total())
    # Where keys are split, attention is two kernels instead of one.
    assert totals == [69, 40, 16, 18, 12]
