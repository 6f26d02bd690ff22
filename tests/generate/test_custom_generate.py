"""``model.generate(custom_generate=folder)`` with the folder that is ready for the Hub."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_slospec import InvalidInputError
from tests.support.paths import ROOT
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy

FOLDER = str(ROOT / "examples" / "custom_generate")


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return tiny_copy("llama")


def test_drafter_fallback_and_errors(model):
    ours = dict(custom_generate=FOLDER, trust_remote_code=True, max_new_tokens=6, do_sample=False)
    inputs = ragged_prompts(2)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**inputs, drafter="suffix", **ours), expected)
    with pytest.raises(InvalidInputError, match="slo_tpot"):
        model.generate(**inputs, slo_tpot=-1.0, **ours)
    with pytest.warns(UserWarning, match="stock generate runs instead"):
        beams = model.generate(**inputs, num_beams=2, fallback=True, **ours)
    assert torch.equal(
        beams, model.generate(**inputs, num_beams=2, max_new_tokens=6, do_sample=False)
    )


def test_a_repository_with_the_folder_speculates_every_call(model, tmp_path):
    inputs = ragged_prompts(2)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path / "target")
    shutil.copytree(
        os.path.join(FOLDER, "custom_generate"), tmp_path / "target" / "custom_generate"
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", trust_remote_code=True, dtype=torch.float32
    )
    out = loaded.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and len(out.slo) == 2
    assert torch.equal(loaded.generate(inputs["input_ids"], max_new_tokens=8, do_sample=False,
                                       attention_mask=inputs["attention_mask"]), expected)  # fmt: skip
