"""Models whose layers attend by themselves, or count tokens by themselves, against stock
``generate``.
"""

from __future__ import annotations

import pytest
import transformers

from hf_slospec import (
    SLOSpecGenerator,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.config import SLOSpecConfig
from hf_slospec.model.family import probe_layers
from hf_slospec.model.properties import CACHE_NAME
from tests.support.stock_matrix import model_of
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import ragged_prompts, sharpened

OWN = ["BloomForCausalLM", "MptForCausalLM", "DeepseekV32ForCausalLM"]
INTERFACE = ["BartForCausalLM", "BioGptForCausalLM", "Llama4ForCausalLM"]
(INTERFACE if CACHE_NAME == "cache" else OWN).append("GPTJForCausalLM")  # since transformers 5.24


@pytest.mark.parametrize("name", [*OWN, *INTERFACE])
def test_the_probe_finds_out_how_to_attend(name):
    family, layers = probe_layers(model_of(name))
    assert not family.has_states
    assert {layer.is_own for layer in layers} == {name in OWN}
    assert any(layer.shape.index_key for layer in layers) == (name == "DeepseekV32ForCausalLM")
    assert any(layer.chunk for layer in layers) == (name == "Llama4ForCausalLM")


@pytest.mark.parametrize("name", ["BartForCausalLM", "Llama4ForCausalLM"])
def test_padded_rows_of_models_that_count_padding_are_refused(name):
    ours = SLOSpecGenerator(model_of(name))
    with pytest.raises(
        UnsupportedInputError,
        match=rf"attention_mask masks .*{name} counts them .*one row at a time",
    ):
        ours.generate(**ragged_prompts(3, seed=3), do_sample=False, max_new_tokens=4)


def test_flash_is_refused():
    with pytest.raises(UnsupportedOptionError, match="layers attend by themselves"):
        SLOSpecGenerator(model_of("BloomForCausalLM"), config=SLOSpecConfig(attention="flash"))


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("GPTNeo", {}, r"GPTNeoForCausalLM cannot be packed: its buffer .*\.bias masks"),
        (
            "BigBird",
            dict(attention_type="block_sparse"),
            r"BigBirdForCausalLM attends to blocks.*original_full",
        ),
        ("Falcon", dict(alibi=True), "FalconForCausalLM cannot be packed: on a trial tree"),
    ],
)
def test_masks_by_the_index_of_keys_are_refused(name, settings, match):
    """Windows, blocks of keys, and ALiBi in the mask."""
    config = tiny_config(getattr(transformers, f"{name}Config"))
    vars(config).update(settings)
    model = sharpened(lambda: getattr(transformers, f"{name}ForCausalLM")(config), 0)
    with pytest.raises(UnsupportedModelError, match=match):
        SLOSpecGenerator(model)
