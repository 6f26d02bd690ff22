"""Without hf_slospec.families, its models are refused by name and all others work."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["hf_slospec.families"] = None
import torch, transformers
from hf_slospec import SLOSpecGenerator, UnsupportedModelError, SLOSpecConfig
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import sharpened, tiny_model

config = SLOSpecConfig(policy="fixed", compile=False)
model = tiny_model("llama")
ids = torch.tensor([[3, 4, 5, 6]])
ours = SLOSpecGenerator(model, tiny_model("llama", 0, 0.03), config=config)
options = dict(max_new_tokens=8, do_sample=False)
assert torch.equal(ours.generate(ids, **options), model.generate(ids, **options))
for name in ("Mamba", "Qwen3Next", "Bamba", "Bloom", "DeepseekV32", "T5"):
    head = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    kind = getattr(transformers, name + head)
    try:
        SLOSpecGenerator(kind(tiny_config(kind.config_class)).eval(), config=config)
    except UnsupportedModelError as error:
        assert str(error).startswith(kind.__name__), error
        print(error)
    else:
        raise AssertionError(name)
assert not any(name.startswith("hf_slospec.families.") for name in sys.modules)
"""


def test_models_of_missing_families_are_refused_and_others_decode_as_stock():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 6
