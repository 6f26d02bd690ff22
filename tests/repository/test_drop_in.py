"""Ordinary transformers scripts print the same with every model they load enabled."""

from __future__ import annotations

import pytest

from examples.drop_in import SCRIPTS, is_unchanged, save_pair


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_output_is_unchanged(script, saved):
    assert is_unchanged(script, saved)


def test_a_change_would_be_seen(saved, tmp_path):
    script = tmp_path / "tells.py"
    script.write_text(
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "import torch\n"
        "model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)\n"
        "print('generate' in model.__dict__)\n"
    )
    assert not is_unchanged(script, saved)
