"""The core as if folders of the package had been deleted; see tests/repository/test_blocked_folders.py,
which runs these tests in a process of their own.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest
import torch
import transformers

import hf_slospec
from hf_slospec import (
    InvalidInputError,
    PastAnswers,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    load_drafter,
)
from hf_slospec.model.paths import Facts, resolve_paths
from tests.repository.test_layers import CORE
from tests.support.blocked import BLOCKED
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

OPTIONS = dict(do_sample=False, max_new_tokens=8)


def without(*folders):
    """Run a test only where these folders are blocked."""
    is_blocked = {*folders} <= {*BLOCKED}
    return pytest.mark.skipif(not is_blocked, reason=f"without {' and '.join(folders)} only")


@pytest.mark.skipif(not BLOCKED, reason="with blocked folders only")
def test_every_module_of_the_core_is_imported():
    found = pkgutil.walk_packages(hf_slospec.__path__, "hf_slospec.", onerror=lambda name: None)
    names = [module.name for module in found if module.name.split(".")[1] in CORE]
    assert len(names) > 50
    for name in names:
        importlib.import_module(name)
    folders = tuple(f"hf_slospec.{folder}." for folder in BLOCKED)
    assert not [name for name in sys.modules if name.startswith(folders)]


@without("cpu", "cuda")
def test_forwards_are_eager():
    assert resolve_paths(SLOSpecConfig(), Facts("LlamaForCausalLM")).paths == ("eager",)


@without("heads")
def test_lookup_and_assistant_models_draft():
    target = tiny_model("llama")
    method = load_drafter(
        ["lookup", tiny_model("llama", noise=0.03)], target, share_texts=PastAnswers()
    )
    assert method.kind == "prompt lookup + assistant model"
    ours = SLOSpecGenerator(target, drafter=method)
    assert_same_as_stock(target, ours.generate, ragged_prompts(2), **OPTIONS)
    for name in ("suffix", "mtp"):
        with pytest.raises(InvalidInputError, match="by name are lookup, and sums"):
            load_drafter(name, target)


@without("families")
def test_models_of_missing_families_are_refused_and_others_decode_as_stock():
    config = SLOSpecConfig(policy="fixed", compile=False)
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=config)
    assert_same_as_stock(
        model, ours.generate, {"input_ids": torch.tensor([[3, 4, 5, 6]])}, **OPTIONS
    )
    for name in ("Mamba", "Qwen3Next", "Bamba", "Bloom", "DeepseekV32", "T5"):
        head = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
        kind = getattr(transformers, name + head)
        with pytest.raises(UnsupportedModelError, match=f"^{kind.__name__}"):
            SLOSpecGenerator(kind(tiny_config(kind.config_class)).eval(), config=config)
